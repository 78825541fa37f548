"""The process of one job of a sweep: its command, its end, and the reason of a failure."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cl_train.comparison.slots import Slot
from cl_train.comparison.slurm_queue import own_allocation
from cl_train.comparison.sweep_plan import Job
from cl_train.config.command_line import quoted
from cl_train.system.child_process import end_with_parent
from cl_train.system.locks import lock_file

LOG_NAME = "job.log"
PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_ERROR_LINE = re.compile(
    r"^(?:\[rank\d+\]: ?)?(?:[\w.]*(?:Error|Exception|Interrupt|Fault|Exit)\b.*|.*\bthe run failed: .*)"
)


def start_job(job: Job, folder: Path, program: Sequence[str], slot: Slot) -> subprocess.Popen[bytes] | None:
    """Start the process of a job; None if its `folder` belongs to something else (then the job has failed).

    It has its own process group, because Ctrl-C in a terminal must reach it once, from the sweep. It is stopped when
    this process is killed: a job must not outlive the sweep.
    """
    if folder.exists() and not job.is_started:
        job.status, job.why = "failed", f"{folder} exists already, and this sweep has not created it"
        return None
    folder.mkdir(exist_ok=True)
    with lock_file(folder / ".lock", waiting_for=f"the end of an earlier {job.name}"):
        has_checkpoint = any((folder / "checkpoints").glob("*.pt"))
    command = [*_launch_command(job.nproc, slot), *program, *_continued(job.overrides, folder)]
    command.append(f"hydra.run.dir={quoted(folder.absolute())}")
    if has_checkpoint and not any(word.startswith("resume=") for word in job.overrides):
        command.append("resume=auto")
    elif job.is_started and not has_checkpoint:
        command.append("overwrite=true")
    job.status, job.is_started = "running", True
    path = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
    devices = {"CUDA_VISIBLE_DEVICES": ",".join(slot.gpus[: job.nproc])} if slot.gpus else {}
    with open(folder / LOG_NAME, "ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path, **devices},
            process_group=0,
            preexec_fn=partial(_prepare_child, slot.cores),
        )


def _launch_command(nproc: int, slot: Slot) -> list[str]:
    if slot.nodes > 1:
        cores = [f"--cpus-per-task={slot.cpus_per_task}"] if slot.cpus_per_task else []
        return ["srun", f"--nodes={slot.nodes}", f"--ntasks={nproc}", "--kill-on-bad-exit=1", *cores, sys.executable]
    if nproc > 1:
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    return [sys.executable]


def _prepare_child(cores: Sequence[int]) -> None:
    if cores:
        os.sched_setaffinity(0, cores)
    end_with_parent(signal.SIGTERM)


def _continued(overrides: Sequence[str], folder: Path) -> list[str]:
    """`batch_size=auto` is measured once: a job that continues keeps the size in its config.yaml."""
    config = folder / "config.yaml"
    if "batch_size=auto" not in overrides or not config.is_file():
        return list(overrides)
    found = re.search(r"^batch_size: (\d+)$", config.read_text(encoding="utf-8"), re.MULTILINE)
    return [f"batch_size={found[1]}" if word == "batch_size=auto" and found else word for word in overrides]


def record_end(job: Job, exit_code: int, log: Path) -> None:
    """Record the status, the exit code (-n for signal n) and the reason of a failure."""
    job.exit_code = exit_code
    if exit_code == 0:
        job.status = "completed"
    elif exit_code in (130, 143):
        job.status, job.why = "interrupted", f"the job was stopped by a signal (exit code {exit_code})"
    else:
        job.status, job.why = "failed", _reason(exit_code, log)


def request_stop(process: subprocess.Popen[bytes], signum: int, slot: Slot) -> None:
    """Ask a job to save a checkpoint and end."""
    if slot.nodes > 1:  # srun would kill its tasks; scancel passes the signal on to them
        subprocess.run(["scancel", "--signal=TERM", own_allocation()], check=False)
    else:
        process.send_signal(signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM)


def training_line(log: Path) -> str:
    """The last line of training in a job's log."""
    lines = [line for line in _last_lines(log) if line.startswith("Epoch:")] if log.is_file() else []
    return lines[-1] if lines else "starting"


def _reason(exit_code: int, log: Path) -> str:
    """The signal, or the last line of the log that looks like an error."""
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        return f"killed by {name}{', often because memory ran out (see dmesg)' if name == 'SIGKILL' else ''}"
    lines = _last_lines(log)
    errors = [line for line in lines if _ERROR_LINE.match(line) and "ChildFailedError" not in line]
    last = (errors or lines or ["no output"])[-1]
    words = ("OutOfMemoryError", "out of memory", "can't allocate memory", "MemoryError")
    return f"{'out of memory: ' if any(word in last for word in words) else ''}{last[:300]} (exit code {exit_code})"


def _last_lines(log: Path) -> list[str]:
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - 65536))
        return [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
