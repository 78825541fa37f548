"""What this project does on the GPU at hand, in one call and a fixed time: speeds, ratios, the roofline, tests.

Each group of measurements is a process of its own, so that one that fails, hangs or runs out of memory costs its own
rows only. Rows are appended to `rows.jsonl` as they are measured; `report.json` and `report.md` are written anew after
every group, so a run that is cut short leaves what it had.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.gpu_measurements import ROOT, Group, Rows, dram_bytes, plan_groups, read_rows, run_group
from benchmarks.gpu_report_table import as_markdown
from cl_train.config.schema import ConfigError, setting
from cl_train.config.validation import settings_from_arguments, stop_with

NCU = ["--clock-control", "none", "--profile-from-start", "off", "--csv", "--metrics"]
NCU_METRICS = "dram__bytes_read.sum,dram__bytes_write.sum"


@dataclass
class ReportSettings:
    """The command line of benchmarks/gpu_report.sh."""

    folder: str = setting("outputs/gpu_report", "where rows.jsonl, report.json and report.md go")
    seconds: float = setting(520.0, "the whole report ends within this time", above=0)
    dry_run: bool = setting(False, "run everything on a CPU with tiny settings; the figures mean nothing")
    groups: list[str] = setting([], "run only these groups")
    group: str | None = setting(None, "used by the report itself: run one group in this process")


def run_report(settings: ReportSettings) -> int:
    """Every group in turn; returns 0 when all ran to their end, 1 when one failed or was left out."""
    folder = Path(settings.folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not settings.groups:  # a part is added to what is there
        (folder / "rows.jsonl").unlink(missing_ok=True)
    started_at = time.monotonic()
    outcomes: dict[str, str] = {}
    for group in plan_groups(dry_run=settings.dry_run):
        if settings.groups and group.name not in settings.groups:
            continue
        left_s = settings.seconds - (time.monotonic() - started_at)
        if left_s < 25:
            outcomes[group.name] = "left out: the time was over"
        else:
            outcomes[group.name] = _run_apart(group, min(group.limit_s, left_s - 5), settings)
        print(f"[{time.monotonic() - started_at:5.0f} s] {group.name}: {outcomes[group.name]}", flush=True)
        _write(folder, outcomes)
    print((folder / "report.md").read_text(encoding="utf-8"))
    return 0 if all(outcome.startswith("done") for outcome in outcomes.values()) else 1


def _run_apart(group: Group, limit_s: float, settings: ReportSettings) -> str:
    """Run `group` in a process that is ended at its limit; its output goes to a file of its own."""
    words = [f"folder={settings.folder}", f"seconds={limit_s}", f"dry_run={settings.dry_run}", f"group={group.name}"]
    command = [sys.executable, "-m", "benchmarks.gpu_report", *words]
    counts_bytes = group.name.startswith("bytes") and not settings.dry_run
    if counts_bytes:
        profiler = shutil.which("ncu")
        if profiler is None:
            return "done: nothing, as there is no ncu here"
        command = [profiler, *NCU, NCU_METRICS, *command]
    log = Path(settings.folder) / f"{group.name}.log"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    began_at = time.monotonic()
    with log.open("w", encoding="utf-8") as out:
        # A session of its own: what the group started (loader workers, compile workers) ends with it.
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=limit_s)
        except BaseException as error:  # Ctrl-C too: the group must not stay on the device
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return f"cut short after {limit_s:.0f} s (see {log.name}); what was measured by then is kept"
    if code != 0:
        return f"failed with exit code {code} (see {log.name})"
    if counts_bytes:
        _add_bytes(group, Path(settings.folder), log.read_text(encoding="utf-8"))
    return f"done in {time.monotonic() - began_at:.0f} s"


def _add_bytes(group: Group, folder: Path, text: str) -> None:
    moved = dram_bytes(text)
    outcome = "ncu counted nothing" if moved is None else f"{moved / group.batch_size / 1e6:.1f} MB per image"
    Rows(group, folder, 0.0).add(way=group.ways[0].name, model=group.model, outcome=outcome)


def _write(folder: Path, outcomes: dict[str, str]) -> None:
    report = {"groups": outcomes, "rows": read_rows(folder)}
    for name, text in (("report.json", json.dumps(report, indent=1)), ("report.md", as_markdown(report))):
        temporary = folder / f".{name}"
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, folder / name)


def main(words: Sequence[str]) -> int:
    try:
        settings = settings_from_arguments(ReportSettings, words)
        known = [group.name for group in plan_groups(dry_run=settings.dry_run)]
        unknown = [name for name in settings.groups if name not in known]
        if unknown:
            raise ConfigError([f"groups={name}: there are {', '.join(known)}" for name in unknown])
        if not settings.dry_run and not torch.cuda.is_available():
            raise ConfigError("this machine has no usable CUDA device; dry_run=true tries the report on a CPU")
    except ConfigError as error:
        stop_with(error)
    if settings.group is not None:
        run_group(settings.group, Path(settings.folder), settings.seconds, dry_run=settings.dry_run)
        return 0
    print(json.dumps(asdict(settings)))
    return run_report(settings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
