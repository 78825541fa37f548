"""Measure the project on this machine's GPU in one call and within a time limit: speeds, ratios, roofline, tests.

    bash benchmarks/gpu_report.sh out=DIR time_limit_s=520
    bash benchmarks/gpu_report.sh out=DIR groups=environment,resnet50-fp16-256      adds to the results in DIR

Every group of measurements runs in its own process. A group that fails, hangs, is killed or runs out of memory keeps
the rows that it has measured. `report.json` and `report.md` are rewritten after each group.
"""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_groups import ROOT
from benchmarks.gpu_plan import Group, all_groups, group_limit_s, tiny_groups
from benchmarks.roofline import Machine, roofline
from cl_train.cli import exit_code
from cl_train.config.schema import ConfigError, setting
from cl_train.config.validation import settings_from_arguments
from cl_train.memory_format.audit_report import markdown_table
from cl_train.models.sources import build_model
from cl_train.system.files import write_json, write_text

NCU = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv"]
NCU += ["--metrics", "dram__bytes_read.sum,dram__bytes_write.sum"]
PYTEST = ["-m", "pytest", "-v", "-m", "gpu", "tests/test_gpu.py", "-p", "no:cacheprovider"]


@dataclass
class ReportSettings:
    """Settings of the GPU report."""

    out: str = setting("outputs/gpu_report", "folder for report.json, report.md and the logs of the groups")
    time_limit_s: float = setting(520.0, "the whole report ends within this time", above=0)
    groups: list[str] = setting([], "run only these groups and add them to the results in `out`")
    dry_run: bool = setting(False, "run every kind of group on the CPU with tiny settings; the figures are meaningless")


def run_report(settings: ReportSettings, groups: Sequence[Group]) -> int:
    """Run the groups one after the other; returns 0 if all completed, 1 if one failed or was left out."""
    folder = Path(settings.out)
    folder.mkdir(parents=True, exist_ok=True)
    if not settings.groups:
        for log in folder.glob("*.log"):
            log.unlink()
    started_at = time.monotonic()
    outcomes: dict[str, str] = {}
    for group in groups:
        limit_s = group_limit_s(group, settings.time_limit_s - (time.monotonic() - started_at))
        outcomes[group.name] = "left out: too little time" if limit_s is None else run_group(group, limit_s, settings)
        print(f"[{time.monotonic() - started_at:5.0f} s] {group.name}: {outcomes[group.name]}", flush=True)
        rows = read_rows("\n".join(log.read_text(errors="replace") for log in sorted(folder.glob("*.log"))))
        report = {"settings": asdict(settings), "groups": outcomes, "rows": rows}
        write_json(folder / "report.json", report)
        write_text(folder / "report.md", as_markdown(report))
    print((folder / "report.md").read_text(encoding="utf-8"))
    return 0 if all(outcome.startswith("done") for outcome in outcomes.values()) else 1


def run_group(group: Group, limit_s: float, settings: ReportSettings) -> str:
    """Run one group in a process with its own log, kill it at its time limit, and read the log."""
    folder = Path(settings.out).absolute()
    mode = "dry_run" if settings.dry_run else "real"
    command = [sys.executable, "-m", "benchmarks.gpu_groups", group.name, str(folder), str(limit_s), mode]
    counts_bytes = group.name.startswith("bytes") and not settings.dry_run
    if group.name == "tests":
        command = [sys.executable, *PYTEST]
    elif counts_bytes and shutil.which("ncu") is None:
        return "done: nothing, ncu is not installed"
    elif counts_bytes:
        command = [*NCU, *command]
    log = folder / f"{group.name}.log"
    outcome = run_limited(command, log, limit_s)
    text = log.read_text(errors="replace")
    if group.name == "tests":
        outcome += f": {count_tests(text)}"
    elif counts_bytes:
        outcome += f": {dram_bytes(text, group.batch_size)}"
    return outcome


def run_limited(command: Sequence[str], log: Path, limit_s: float) -> str:
    """Run `command` with its output in `log`; after `limit_s` it is killed with everything that it started."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    started_at = time.monotonic()
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=limit_s)
        except BaseException as error:  # also after Ctrl-C: the group must release the device
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return f"killed after {limit_s:.0f} s (see {log.name}); its rows so far are kept"
    if code != 0:
        return f"failed with exit code {code} (see {log.name}); its rows so far are kept"
    return f"done in {time.monotonic() - started_at:.0f} s"


def read_rows(log: str) -> list[dict[str, Any]]:
    """The rows in the logs. A later row for the same variant completes the earlier one; half a line is ignored."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in log.splitlines():
        with suppress(ValueError):
            row = json.loads(line) if line.startswith('{"group"') else {}
            key = tuple(row.get(name) for name in ("group", "model", "precision", "batch_size", "variant"))
            rows[key] = rows.get(key, {}) | row
    found = [row for row in rows.values() if row]
    for machine in (row for row in found if row["group"] == "environment"):
        for row in (row for row in found if "images_per_s" in row):
            full = row["precision"] in ("fp32", "tf32")
            peaks = Machine(machine["flops_per_s"]["tf32" if full else "half"], machine["copy_bytes_per_s"])
            limit = roofline_images_per_s(row["model"], row["image_size"], row["compile"], 4 if full else 2, peaks)
            row["pct_of_roofline"] = limit and 100 * row["images_per_s"] / limit
    return found


@lru_cache
def roofline_images_per_s(name: str, size: int, fused: bool, element_bytes: int, machine: Machine) -> float | None:
    """The limit set by the measured copy bandwidth and matmul rate; None if the model cannot be traced."""
    try:
        with torch.device("meta"):
            model = build_model(name, num_classes=1000)
        return roofline(model, machine, fused=fused, image_size=size, element_bytes=element_bytes).images_per_s
    except ValueError:
        return None


def count_tests(log: str) -> str:
    """The results that pytest -v has printed so far, with the names of the tests that failed."""
    results = re.findall(r"^(\S+::\S.*?) (PASSED|FAILED|ERROR|SKIPPED)\b", log, re.MULTILINE)
    counts = Counter(result for _, result in results)
    failed = [name.partition("::")[2] for name, result in results if result in ("FAILED", "ERROR")]
    text = ", ".join(f"{count} {result.lower()}" for result, count in counts.items()) or "no test finished"
    return text + (f": {', '.join(failed)}" if failed else "")


_UNITS = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12}


def dram_bytes(log: str, images: int) -> str:
    """Megabytes of device memory per image in ncu's CSV, over all kernels; values that cannot be read are counted."""
    values: list[float] = []
    unreadable = 0
    for row in csv.DictReader(line for line in log.splitlines() if line.startswith('"')):
        if (row.get("Metric Name") or "").startswith("dram__bytes"):
            try:
                values.append(float((row["Metric Value"] or "").replace(",", "")) * _UNITS[row["Metric Unit"]])
            except (ValueError, KeyError, TypeError):  # "n/a", or a unit that is not in the table
                unreadable += 1
    read = f"{sum(values) / images / 1e6:.1f} MB per image" if values else "ncu counted no bytes"
    return read + (f" and {unreadable} unreadable values" if unreadable else "")


def as_markdown(report: dict[str, Any]) -> str:
    """The machine, a table of speeds, and the outcome of each group."""
    lines = ["# GPU report", ""]
    machine = next((row for row in report["rows"] if row["group"] == "environment"), None)
    if machine is not None:
        versions = ", ".join(f"{name} {value}" for name, value in machine["environment"].items() if value)
        half, tf32 = (machine["flops_per_s"][name] / 1e12 for name in ("half", "tf32"))
        lines += [
            f"{machine['device']}, {machine['cores']} cores. {versions}.",
            f"Measured: copy {machine['copy_bytes_per_s'] / 1e12:.3f} TB/s (read + written), matmul {half:.1f} TFLOP/s "
            f"in 16 bit, {tf32:.1f} in TF32; shares of the roofline refer to these.",
            "",
        ]
    outcomes = [{"group": name, "outcome": outcome} for name, outcome in report["groups"].items()]
    for row in report["rows"]:
        if "outcome" in row:
            what = f"{row['group']}: {row['model']} {row['variant']}"
            outcomes.append({"group": what, "outcome": row["outcome"]})
    speeds = [_speed_cells(row) for row in report["rows"] if "images_per_s" in row]
    return "\n".join([*lines, markdown_table(speeds), "", markdown_table(outcomes), ""])


def _speed_cells(row: dict[str, Any]) -> dict[str, str]:
    def text(name: str, digits: int) -> str:
        return "" if row.get(name) is None else f"{row[name]:.{digits}f}"

    interval = " [{:.3f}, {:.3f}]".format(*row["ci95"]) if row.get("ci95") else ""
    return {
        **{name: str(row[name]) for name in ("model", "precision", "batch_size", "variant")},
        "images/s": text("images_per_s", 1),
        "ms/step": text("step_ms", 2),
        "ratio [95 %]": text("ratio", 3) + interval,
        "to": row.get("versus", ""),
        "% of roofline": text("pct_of_roofline", 1),
        "GiB": text("peak_memory_gib", 2),
    }


def main(words: Sequence[str]) -> int:
    settings = settings_from_arguments(ReportSettings, words)
    groups = tiny_groups() if settings.dry_run else all_groups()
    known = [group.name for group in groups]
    if unknown := [name for name in settings.groups if name not in known]:
        raise ConfigError([f"groups={name}: there are {', '.join(known)}" for name in unknown])
    if not (settings.dry_run or torch.cuda.is_available()):
        raise ConfigError("this machine has no usable CUDA device; dry_run=true tests the report on the CPU")
    return run_report(settings, [group for group in groups if not settings.groups or group.name in settings.groups])


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
