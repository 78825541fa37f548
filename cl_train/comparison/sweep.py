"""`python train.py -m ...`: every job of a sweep in a process of its own, and a comparison at the end.

A job that raises, is killed or runs out of memory cannot poison the next one, its exit code and log are kept, and what
is missing can be run later. `sweep.json` in the sweep's folder is the record. Jobs run one after the other: they share
the machine that is being measured.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from types import FrameType

from cl_train.comparison.pairs import compare_runs
from cl_train.comparison.report import Comparison, FailedJob, as_markdown, write_report
from cl_train.comparison.run_records import read_run
from cl_train.config.command_line import quoted, split_sweep
from cl_train.config.schema import Config, ConfigError
from cl_train.config.validation import settings_from_arguments
from cl_train.system.machine_load import MachineLoad
from cl_train.system.run_folder import safe_name

SCHEMA_VERSION = 1
SWEEP_KEYS = ("nproc", "repeats", "resume_sweep", "compare_by")  # meant for this file, not for the jobs
LOG_NAME = "job.log"
GRACE_S = 20.0  # a stopped job saves a checkpoint first
_REFUSAL = "torchrun cannot start a sweep: run `python train.py -m nproc=N ...`, and each job runs under torchrun"
_ERROR_LINE = re.compile(
    r"^(?:\[rank\d+\]: ?)?(?:[\w.]*(?:Error|Exception|Interrupt|Fault|Exit)\b.*|.*\bthe run failed: .*)"
)


@dataclass
class Job:
    """One run of a sweep: what to run, and what became of it."""

    number: int
    name: str  # of its folder
    overrides: list[str]
    nproc: int = 1
    repeat: int = 1
    status: str = "pending"  # running, completed, failed, interrupted
    exit_code: int | None = None
    why: str | None = None
    seconds: float | None = None
    others_pct: float | None = None  # share of the cores that other processes took meanwhile


@dataclass
class Sweep:
    """The jobs in the order in which they run."""

    folder: Path
    compare_by: str
    jobs: list[Job]

    def save(self) -> None:
        """Atomically: the launcher may be killed at any time, and `resume_sweep` reads it."""
        document = {
            "schema_version": SCHEMA_VERSION,
            "compare_by": self.compare_by,
            "jobs": [asdict(job) for job in self.jobs],
        }
        temporary = self.folder / ".sweep.json.tmp"
        temporary.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, self.folder / "sweep.json")


class Stopped(Exception):
    """A signal asked the sweep to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def run_sweep(arguments: Sequence[str], program: Sequence[str] | None = None) -> int:
    """Run all jobs of train.py's `arguments` (checked already), then write the comparison.

    Args:
        program: what a job's process runs; train.py. Tests put a stand-in here.

    Returns:
        The exit code: 0, 1 when a job failed, 2 under torchrun, 128 + n after signal n (with a report then too).

    Raises:
        ConfigError: a setting of the sweep itself, or `resume_sweep` of a folder that is none.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ or "LOCAL_RANK" in os.environ:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(_REFUSAL, file=sys.stderr, flush=True)
        else:
            time.sleep(2)  # torchrun ends all ranks with the first that leaves: that must be the one that speaks
        return 2
    program = program or ["-m", "cl_train", "train"]
    sweep = plan_sweep(arguments)
    sweep.folder.mkdir(parents=True, exist_ok=True)
    sweep.save()
    write_dashboard_layout(sweep.folder)
    signum = 0
    try:
        with _signals_as_exceptions():
            _run_jobs(sweep, program)
    except Stopped as stop:
        signum = stop.signum
    report(sweep.folder)
    if signum:
        return 128 + signum
    return 0 if all(job.status == "completed" for job in sweep.jobs) else 1


# --- planning ---------------------------------------------------------------------------------------------------------


def plan_sweep(arguments: Sequence[str]) -> Sweep:
    """The jobs of a command line, or with `resume_sweep=` those of that sweep, of which the completed ones stay."""
    fixed, varying = split_sweep([word for word in arguments if word not in ("-m", "--multirun")])
    own = {word.partition("=")[0]: word for word in fixed if word.partition("=")[0] in SWEEP_KEYS}
    swept = {axis[0].partition("=")[0] for axis in varying} & {"repeats", "resume_sweep", "compare_by"}
    if swept:
        raise ConfigError([f"{key} belongs to the whole sweep and takes one value" for key in sorted(swept)])
    twice = [axis[0].partition("=")[0] for axis in varying if len(set(axis)) < len(axis)]
    if twice:
        raise ConfigError([f"{key}: a value is listed twice; repeats=2 runs every job twice" for key in twice])
    settings = settings_from_arguments(Config, list(own.values()))
    folders = [word for word in fixed if word.startswith("hydra.sweep.dir=")]
    if any(word.startswith("hydra.run.dir=") for word in fixed):
        raise ConfigError("hydra.run.dir: the jobs of a sweep have folders of their own; use hydra.sweep.dir=FOLDER")
    words = [word for word in fixed if word not in own.values() and word not in folders]
    if settings.resume_sweep is not None:
        return _resumed_sweep(Path(settings.resume_sweep), words, varying, settings)
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder = Path(folders[-1].partition("=")[2].strip("'\"")) if folders else Path("multirun") / stamp
    if (folder / "sweep.json").is_file():
        raise ConfigError(f"{folder} holds a sweep already: resume_sweep={folder} runs what is missing in it")
    return Sweep(folder, settings.compare_by, _plan_jobs(words, varying, settings))


def _plan_jobs(fixed: Sequence[str], varying: Sequence[Sequence[str]], settings: Config) -> list[Job]:
    """Settings equal but for the compared key stand together, and repeats of them alternate: A B B A A B."""
    compared = [axis for axis in varying if axis[0].partition("=")[0] == settings.compare_by]
    others = [axis for axis in varying if axis not in compared]
    jobs: list[Job] = []
    taken: Counter[str] = Counter()
    for group in itertools.product(*others):
        sides = list(itertools.product(*compared))
        for repeat in range(1, settings.repeats + 1):
            for side in sides if repeat % 2 else sides[::-1]:
                names = [*side, *group] + ([f"repeat={repeat}"] if settings.repeats > 1 else [])
                words = [*side, *group]
                nproc = [int(word.partition("=")[2]) for word in words if word.startswith("nproc=")]
                words = [word for word in words if not word.startswith("nproc=")]
                name = safe_name(",".join(names) or "run")
                taken[name] += 1
                name += f"-{taken[name]}" if taken[name] > 1 else ""  # a/b and a_b are the same folder
                jobs.append(Job(len(jobs), name, [*fixed, *words], nproc[0] if nproc else settings.nproc, repeat))
    return jobs


def _resumed_sweep(folder: Path, words: Sequence[str], varying: Sequence[Sequence[str]], settings: Config) -> Sweep:
    sweep = read_sweep(folder)
    if words or varying:
        asked = {job.name: job.overrides for job in _plan_jobs(words, varying, settings)}
        known = {job.name: job.overrides for job in sweep.jobs}
        if asked != known:
            raise ConfigError(
                f"resume_sweep={folder}: the settings beside it give other jobs than that sweep has; "
                "leave them out to run what is missing"
            )
    for job in sweep.jobs:
        if job.status != "completed":
            job.status, job.exit_code, job.why = "pending", None, None
    return sweep


def read_sweep(folder: Path) -> Sweep:
    """The record of a sweep.

    Raises:
        ConfigError: the folder has none, or one that cannot be read.
    """
    path = folder / "sweep.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return Sweep(folder, document["compare_by"], [Job(**job) for job in document["jobs"]])
    except FileNotFoundError:
        raise ConfigError(f"{folder} is not the folder of a sweep: it has no sweep.json") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read as a sweep's record ({error})") from None


# --- running ----------------------------------------------------------------------------------------------------------


def _run_jobs(sweep: Sweep, program: Sequence[str]) -> None:
    """Run what is pending, one after the other.

    Raises:
        Stopped: by a signal; the job that it hit has ended.
    """
    waiting = [job for job in sweep.jobs if job.status == "pending"]
    print(f"sweep of {len(sweep.jobs)} jobs, {len(waiting)} to run, in {sweep.folder}", flush=True)
    started_at = time.monotonic()
    for count, job in enumerate(waiting, start=1):
        print(f"[{count}/{len(waiting)}] {job.name}: log {sweep.folder / job.name / LOG_NAME}", flush=True)
        job.status = "running"
        sweep.save()
        stopped = None
        begun_at, load = time.monotonic(), MachineLoad()
        try:
            job.exit_code = _run_job(job, sweep.folder / job.name, program)
        except Stopped as error:
            stopped = error
        job.seconds, job.others_pct = round(time.monotonic() - begun_at, 1), load.others_pct()
        _judge(job, sweep.folder / job.name, stopped)
        sweep.save()
        remaining_s = (time.monotonic() - started_at) / count * (len(waiting) - count)
        left = f"; about {_duration(remaining_s)} left" if count < len(waiting) and not stopped else ""
        why = f" ({job.why})" if job.why else ""
        print(f"[{count}/{len(waiting)}] {job.name}: {job.status} in {_duration(job.seconds)}{why}{left}", flush=True)
        if stopped:
            raise stopped


@contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP become an exception; afterwards they do what they did before."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Stopped(signum)

    before = {signum: signal.signal(signum, stop) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _run_job(job: Job, folder: Path, program: Sequence[str]) -> int:
    """Run one job to its end and return its exit code (-n for signal n).

    It has a process group of its own: the terminal's Ctrl-C must reach it once, from here.
    """
    has_checkpoint = any((folder / "checkpoints").glob("*")) if folder.is_dir() else False
    if folder.exists() and not has_checkpoint:
        shutil.rmtree(folder)  # of an attempt that left nothing to continue: its events would show up as this run's
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable]
    if job.nproc > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.nproc}"]
    overrides = _continued(job.overrides, folder) if has_checkpoint else job.overrides
    command += [*program, *overrides, f"hydra.run.dir={quoted(folder.absolute())}"]
    if has_checkpoint and not any(word.startswith("resume=") for word in job.overrides):
        command.append("resume=auto")
    with open(folder / LOG_NAME, "ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, process_group=0
        )
        try:
            return process.wait()
        except Stopped as stop:
            _end(process, stop.signum)
            raise


def _continued(overrides: Sequence[str], folder: Path) -> list[str]:
    """`batch_size=auto` is measured once: a run that goes on keeps what was found, as its config.yaml has it."""
    if "batch_size=auto" not in overrides:
        return list(overrides)
    found = re.search(r"^batch_size: (\d+)$", (folder / "config.yaml").read_text(encoding="utf-8"), re.MULTILINE)
    return [f"batch_size={found[1]}" if word == "batch_size=auto" and found else word for word in overrides]


def _end(process: subprocess.Popen[bytes], signum: int) -> None:
    """Pass the signal on, so that the job can save; after `GRACE_S`, or a second signal, kill it and its children."""
    process.send_signal(signal.SIGTERM if signum == signal.SIGHUP else signum)
    try:
        process.wait(GRACE_S)
    except (subprocess.TimeoutExpired, Stopped):
        for pid in [*_descendants(process.pid), process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _descendants(pid: int) -> list[int]:
    """Processes below `pid` (Linux): torchrun's workers have sessions of their own, so killing a group misses them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            child = int(path.parent.name)
            found += [*_descendants(child), child]
    return found


def _judge(job: Job, folder: Path, stopped: Stopped | None) -> None:
    """Turn an exit code into a status and a reason."""
    code = job.exit_code
    if stopped is not None:
        job.status, job.why = "interrupted", f"stopped by {stopped}"
    elif code == 0:
        job.status = "completed"
    elif code in (130, 143):
        job.status, job.why = "interrupted", f"the job was stopped by a signal (exit code {code})"
    else:
        job.status, job.why = "failed", _reason(job, folder / LOG_NAME)


def _reason(job: Job, log: Path) -> str:
    assert job.exit_code is not None
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - 65536))
        lines = [line.rstrip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    errors = [line.strip() for line in lines if _ERROR_LINE.match(line) and "ChildFailedError" not in line]
    if job.exit_code < 0:
        name = signal.Signals(-job.exit_code).name
        hint = ", often the kernel's answer to memory running out (dmesg tells)" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"
    last = errors[-1] if errors else lines[-1].strip() if lines else "no output"
    is_memory = any(
        word in last for word in ("OutOfMemoryError", "out of memory", "can't allocate memory", "MemoryError")
    )
    return f"{'out of memory: ' if is_memory else ''}{last[:300]} (exit code {job.exit_code})"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


# --- reporting --------------------------------------------------------------------------------------------------------


def report(
    folder: Path,
    by: str | None = None,
    *,
    whole: bool = False,
    output: Path | None = None,
    parity_failures: Mapping[str, str] | None = None,
) -> Comparison:
    """Compare the runs of a sweep, write the report into its folder, and say the verdict on the console's last line.

    Args:
        by: the key to compare by, other than the sweep's own.
        whole: print the page above that line.
        output: another folder for the report.
        parity_failures: messages by model, as of `compare_runs`.
    """
    sweep = read_sweep(folder)
    runs, remarks = [], []
    failed = [
        FailedJob(job.number, " ".join(job.overrides), job.why or job.status)
        for job in sweep.jobs
        if job.status != "completed"
    ]
    for job in sweep.jobs:
        if job.status == "completed":
            try:
                run = read_run(folder / job.name)
                settings = run.settings | {"nproc": job.nproc}  # which no job is told: torchrun is
                runs.append(replace(run, settings=settings, others_pct=job.others_pct, repeat=job.repeat))
            except ConfigError as error:
                remarks += error.problems
    by = by or sweep.compare_by
    comparison = Comparison(compare_runs(runs, by, parity_failures), failed, remarks)
    target = output or folder
    target.mkdir(parents=True, exist_ok=True)
    verdict = write_report(comparison, target)
    if target == folder:
        write_dashboard_report(folder)
    if whole:
        print(as_markdown(comparison))
    for missing in failed:
        print(f"not finished: job {missing.job} ({missing.overrides}): {missing.why}")
    print(f"{verdict} Report: {target / 'comparison.md'}", flush=True)
    return comparison


def write_dashboard_layout(folder: Path) -> None:
    """TensorBoard's Custom Scalars: charts that overlay all runs, there from the first job on."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        writer.add_custom_scalars(
            {
                "compare": {
                    "images per second, all runs": ["Multiline", ["throughput/images_per_s"]],
                    "training loss, all runs": ["Multiline", ["train/loss"]],
                    "share of time that waits for data, all runs": ["Multiline", ["throughput/data_wait_pct"]],
                }
            }
        )


def write_dashboard_report(folder: Path) -> None:
    """The report as TensorBoard's text, and its chart as an image."""
    import numpy as np
    from PIL import Image
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer, Image.open(folder / "comparison.png", formats=("PNG",)) as chart:
        text = (folder / "comparison.md").read_text(encoding="utf-8")
        writer.add_text("comparison", "\n".join(line for line in text.splitlines() if not line.startswith("![")))
        writer.add_image("comparison", np.asarray(chart), dataformats="HWC")
