"""The GPU report's own logic, and its whole course on a CPU with tiny settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu_measurements import Group, Rows, dram_bytes, plan_groups, read_rows
from benchmarks.gpu_report import main
from benchmarks.gpu_report_images import write_jpegs
from benchmarks.gpu_report_table import as_markdown

ROOT = Path(__file__).resolve().parents[2]


def test_the_plan_has_every_combination_and_starts_with_the_ceilings() -> None:
    groups = plan_groups(dry_run=False)
    assert groups[0].name == "environment" and len({group.name for group in groups}) == len(groups)
    resnets = {(g.precision, g.batch_size) for g in groups if g.model == "resnet50" and g.ways}
    wanted = {(precision, size) for precision in ("fp16", "bf16", "fp16_o2", "tf32") for size in (32, 256)}
    assert wanted <= resnets
    for group in groups:
        assert group.limit_s >= 40 and (not group.ways or group.steps >= 50), group.name
    small = {g.model for g in groups if g.batch_size == 32 and g.precision == "fp16"}
    assert {"resnet18", "mobilenet_v2", "squeezenet1_1"} <= small


def test_the_last_row_about_a_thing_counts_and_a_torn_line_is_dropped(tmp_path: Path) -> None:
    rows = Rows(Group("one", 10.0), tmp_path, time.monotonic() + 10)
    rows.add(way="eager", images_per_s=1.0)
    rows.add(way="graphed", images_per_s=2.0)
    rows.add(way="eager", images_per_s=3.0)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"group": "one", "way": "ea')
    assert [(row["way"], row["images_per_s"]) for row in read_rows(tmp_path)] == [("eager", 3.0), ("graphed", 2.0)]
    assert read_rows(tmp_path / "none") == []


def test_bytes_of_ncu_are_summed_over_kernels_and_units() -> None:
    text = "\n".join(
        [
            "==PROF== Connected to process 1",
            '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"',
            '"0","conv","dram__bytes_read.sum","Mbyte","1,234.5"',
            '"0","conv","dram__bytes_write.sum","Kbyte","500"',
            '"1","bn","dram__bytes_read.sum","Gbyte","2"',
            '"1","bn","gpu__time_duration.sum","nsecond","7"',
        ]
    )
    assert dram_bytes(text) == pytest.approx(1234.5e6 + 5e5 + 2e9)
    assert dram_bytes("==ERROR== no permission") is None


def test_the_table_says_what_was_left_out() -> None:
    row = {"group": "a", "model": "resnet50", "precision": "fp16", "batch_size": 256, "way": "eager"}
    report = {
        "groups": {"a": "done in 9 s", "b": "left out: the time was over"},
        "rows": [{**row, "images_per_s": 5432.1, "step_ms": 47.1, "ratio": 1.7, "ci95": [1.6, 1.8], "versus": "nchw"}],
    }
    text = as_markdown(report)
    assert "| resnet50 | fp16 | 256 | eager | 5432.1 | 47.10 | 1.700 [1.600, 1.800] | nchw |" in text
    assert "| b | left out: the time was over |" in text


def test_the_jpegs_weigh_what_imagenets_do(tmp_path: Path) -> None:
    assert write_jpegs(tmp_path, distinct=4, copies=3, size=(500, 375)) == 12
    files = list((tmp_path / "train").glob("*/*.JPEG"))
    assert len(files) == 12 and len({file.stat().st_ino for file in files}) == 4
    assert 70_000 < sum(file.stat().st_size for file in files) / 12 < 150_000


@pytest.mark.slow
def test_the_whole_report_runs_to_its_end_on_a_cpu(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "benchmarks/gpu_report.sh", "--dry-run", f"folder={tmp_path}", "seconds=240"],
        cwd=ROOT,
        env=os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(report["groups"]) == {group.name for group in plan_groups(dry_run=True)}
    assert all(outcome.startswith("done") for outcome in report["groups"].values())
    ways = {row["way"] for row in report["rows"] if row["group"] == "resnet50-fp16-256"}
    assert {"eager contiguous", "eager channels_last", "compiled graphed channels_last"} <= ways
    assert any(way.startswith("timm") for way in ways)
    assert all("ratio" in row for row in report["rows"] if row["group"] in ("resnet50-fp16-256", "zoo", "jpeg"))
    assert (tmp_path / "report.md").read_text().startswith("# GPU report")


@pytest.mark.slow
def test_a_report_that_runs_out_of_time_keeps_what_it_has(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_report", "dry_run=true", f"folder={tmp_path}", "seconds=34"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert done.returncode == 1
    assert report["rows"][0]["group"] == "environment"
    assert report["groups"]["bytes-eager"] == "left out: the time was over"


def test_wrong_settings_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in ((["seconds=0"], "must be above 0"), (["groups=zo", "dry_run=true"], "groups=zo: there are")):
        with pytest.raises(SystemExit) as caught:
            main([*words, f"folder={tmp_path}"])
        assert caught.value.code == 2 and said in capsys.readouterr().err
