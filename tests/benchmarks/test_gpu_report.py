"""The GPU report's own logic, and its whole course on a CPU with tiny settings."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_groups, gpu_report
from benchmarks.gpu_groups import Rows, Step, measure_variants, run_group
from benchmarks.gpu_plan import EAGER, EAGER_NCHW, GRAPHED, Group, Variant, tiny_groups
from benchmarks.gpu_report import as_markdown, count_tests, dram_bytes, main, read_rows, run_limited
from benchmarks.roofline import Machine, roofline
from cl_train.config.schema import ConfigError
from cl_train.models.sources import build_model
from tests.processes import LIMIT_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def printed_rows(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    return {row["variant"]: row for row in read_rows(capsys.readouterr().out)}


def test_later_rows_complete_earlier_ones_and_half_a_line_is_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    rows = Rows(Group("one", 10.0, batch_size=8), 10)
    rows.add_speed(EAGER, 4.0, peak_memory_gib=2.0)
    rows.add_speed(GRAPHED, 8.0)
    print("a line of another program")
    rows.add_speed(EAGER, 2.0)
    print('{"group": "one", "variant": "ea')
    found = read_rows(capsys.readouterr().out)
    assert [(row["variant"], row["images_per_s"]) for row in found] == [(EAGER.name, 4.0), (GRAPHED.name, 1.0)]
    assert found[0]["peak_memory_gib"] == 2.0
    assert read_rows("") == []


def test_the_share_of_the_roofline_refers_to_the_measured_rates(capsys: pytest.CaptureFixture[str]) -> None:
    rows = Rows(Group("one", 10.0, model="resnet18", batch_size=8), 10)
    rows.add_speed(EAGER, 1.0)
    Rows(Group("environment", 10.0), 10).add(flops_per_s={"half": 1e12, "tf32": 1e11}, copy_bytes_per_s=1e11)
    row, _ = read_rows(capsys.readouterr().out)
    with torch.device("meta"):
        limit = roofline(build_model("resnet18", num_classes=1000), Machine(1e12, 1e11)).images_per_s
    assert row["pct_of_roofline"] == pytest.approx(800 / limit)


NCU_LOG = """==PROF== Connected to process 1
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","conv","dram__bytes_read.sum","Mbyte","1,234.5"
"0","conv","dram__bytes_write.sum","Kbyte","500"
"1","bn","dram__bytes_read.sum","Gbyte","2"
"1","bn","gpu__time_duration.sum","nsecond","7"
"""


def test_bytes_of_ncu_are_summed_over_kernels_and_units() -> None:
    assert dram_bytes(NCU_LOG, 10).startswith(f"{(1234.5e6 + 5e5 + 2e9) / 10 / 1e6:.1f} MB per image")


@pytest.mark.parametrize(
    "line", ['"2","x","dram__bytes_read.sum","Mbyte","n/a"', '"2","x","dram__bytes_read.sum","yard","1"']
)
def test_unreadable_values_of_ncu_are_counted(line: str) -> None:
    text = dram_bytes(NCU_LOG + line + "\n", 10)
    assert "323.5 MB" in text and "1 unreadable" in text
    assert "MB" not in dram_bytes("==ERROR== no permission", 10)
    assert "MB" not in dram_bytes('"ID","Metric Name"\n"0","dram__bytes_read.sum"\n', 10)


def test_the_test_log_counts_even_if_pytest_was_killed() -> None:
    lines = ("test_a[x y] PASSED [ 3%]", "test_b FAILED [ 6%]", "test_c ")
    assert count_tests("\n".join(f"tests/test_gpu.py::{line}" for line in lines)) == "1 passed, 1 failed: test_b"
    assert count_tests("") == "no test finished"


def test_the_table_says_what_was_left_out() -> None:
    row = {"group": "a", "model": "resnet50", "precision": "fp16", "batch_size": 256, "variant": "eager"}
    report = {
        "groups": {"a": "done in 9 s", "b": "left out: too little time"},
        "rows": [{**row, "images_per_s": 5432.1, "step_ms": 47.1, "ratio": 1.7, "ci95": [1.6, 1.8], "versus": "nchw"}],
    }
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in as_markdown(report).splitlines()]
    assert ["resnet50", "fp16", "256", "eager", "5432.1", "47.10", "1.700 [1.600, 1.800]", "nchw", "", ""] in rows
    assert ["b", "left out: too little time"] in rows


def test_out_of_memory_while_alternating_drops_the_last_variant(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {"graphed channels_last": 0}

    def build_step(variant: Variant, group: Group, device: torch.device) -> Step:
        def step() -> None:
            if variant is GRAPHED:
                calls[variant.name] += 1
                if calls[variant.name] > 12:  # alone it fits
                    raise torch.OutOfMemoryError("CUDA out of memory")

        return step

    monkeypatch.setattr(gpu_groups, "build_step", build_step)
    group = Group("g", 100, batch_size=4, variants=(EAGER_NCHW, EAGER, GRAPHED), steps=2, blocks_s=0.0)
    measure_variants(Rows(group, 1000), CPU)
    rows = printed_rows(capsys)
    assert "ratio" not in rows[GRAPHED.name] and rows[GRAPHED.name]["images_per_s"] > 0
    assert "ratio" in rows[EAGER.name] and rows[EAGER.name]["versus"] == EAGER_NCHW.name


def test_a_variant_that_fails_is_named_and_the_others_are_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_step(variant: Variant, group: Group, device: torch.device) -> Step:
        if variant is EAGER:
            raise RuntimeError("no kernel image")
        return lambda: None

    monkeypatch.setattr(gpu_groups, "build_step", build_step)
    group = Group("g", 100, variants=(EAGER, EAGER_NCHW, GRAPHED), steps=2, blocks_s=0.0)
    measure_variants(Rows(group, 1000), CPU)
    rows = printed_rows(capsys)
    assert "no kernel image" in rows[EAGER.name]["outcome"] and "ratio" in rows[GRAPHED.name]


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("print('row', flush=True); import time; time.sleep(10_000)", "killed"),
        ("print('row', flush=True); import os; os.kill(os.getpid(), 9)", "failed"),
        ("print('row')", "done"),
    ],
)
def test_however_a_group_ends_its_log_stays(
    tmp_path: Path, program: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, wait = tmp_path / "group.log", subprocess.Popen.wait

    def wait_from_the_row_on(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        """The time limit counts from the row on, so that the start of Python does not."""
        if timeout is not None:
            wait_until(lambda: log.read_text() == "row\n" or process.poll() is not None)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_from_the_row_on)
    limit_s = 0.1 if expected == "killed" else LIMIT_S
    assert run_limited([sys.executable, "-c", program], log, limit_s).startswith(expected)
    assert log.read_text() == "row\n"


@pytest.mark.slow
def test_the_whole_report_runs_to_its_end_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups run in this process, except that of the tests: each would import torch anew."""

    def run_here(command: Sequence[str], log: Path, limit_s: float) -> str:
        if command[2] != "benchmarks.gpu_groups":
            return run_limited(command, log, limit_s)
        with log.open("w") as file, contextlib.redirect_stdout(file):
            run_group(command[3], Path(command[4]), float(command[5]), dry_run=command[6] == "dry_run")
        return "done here"

    monkeypatch.setattr(gpu_report, "run_limited", run_here)
    assert main(["dry_run=true", f"out={tmp_path}", "time_limit_s=3600"]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report["groups"]) == {group.name for group in tiny_groups()}
    assert all(outcome.startswith("done") for outcome in report["groups"].values())
    variants = {row["variant"] for row in report["rows"] if row["group"] == "resnet50-fp16-256"}
    assert {"eager contiguous", "eager channels_last", "compiled graphed channels_last"} <= variants
    assert all("ratio" in row for row in report["rows"] if row["group"] in ("resnet50-fp16-256", "zoo", "jpeg"))
    assert (tmp_path / "report.md").read_text().startswith("# GPU report")


@pytest.mark.slow
def test_a_group_of_the_report_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "benchmarks/gpu_report.sh", "dry_run=true", f"out={tmp_path}", "groups=environment"],
        cwd=ROOT,
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["groups"].keys() == {"environment"} and report["groups"]["environment"].startswith("done")
    assert [row["group"] for row in report["rows"]] == ["environment"]
    assert (tmp_path / "environment.log").is_file()
    assert (tmp_path / "report.md").read_text().startswith("# GPU report")


@pytest.mark.parametrize("words", [["time_limit_s=0"], ["groups=zo", "dry_run=true"]])
def test_wrong_settings_are_refused(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words[0].partition("=")[0]):
        main([*words, f"out={tmp_path}"])
