"""The process of one job of a sweep, and how it ended: `job.json` in its folder."""

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from cl_train.config.command_line import quoted
from cl_train.config.environment import parse_environment
from cl_train.config.schema import HERE
from cl_train.errors import ConfigError
from cl_train.sweeps.places import Place
from cl_train.sweeps.plan import Job
from cl_train.system.files import lock_file, open_no_link, read_json
from cl_train.system.processes import SAVE_SIGNAL, end_with_parent
from cl_train.system.run_folder import SUMMARY, Run, read_run

PROGRAM: Sequence[str] = ("-m", "cl_train", "train")  # what a job runs; tests replace it
PACKAGE_ROOT = Path(__file__).resolve().parents[2]
LOG_NAME = "job.log"  # in the folder of a job, from its start on
JOB_NAME = "job.json"  # how its last process ended
_ERROR = re.compile(
    r"(?:\[rank\d+\]: ?)?[\w.]*(?:Error|Exception|Interrupt|Fault|Exit)\b|.*\bthe run failed: "
)


def start_job(job: Job, folder: Path, place: Place) -> "subprocess.Popen[bytes]":
    """Starts the process of a job, which ends when this process is killed. Waits for an earlier one
    that is still ending.

    Raises ConfigError: the folder is not one of this sweep.
    """
    log = folder / LOG_NAME
    words = [*job.overrides, f"hydra.run.dir={quoted(folder.absolute())}"]
    if job.environment != HERE:
        words.append(f"environment={quoted(job.environment)}")  # for its config.yaml
    if any(path.is_symlink() for path in (folder, log, folder / JOB_NAME)):
        raise ConfigError(f"{folder} is, or has, a symbolic link")
    if log.exists():
        words += _to_continue(job, folder)
    elif folder.exists():
        raise ConfigError(f"{folder} exists already, and this sweep has not created it")
    folder.mkdir(exist_ok=True)
    (folder / JOB_NAME).unlink(missing_ok=True)

    environment = parse_environment(job.environment)
    variables = {**os.environ, **environment.variables}
    path = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), variables.get("PYTHONPATH")]))
    devices = {"CUDA_VISIBLE_DEVICES": ",".join(place.gpus[: job.nproc])} if place.gpus else {}
    launch = [environment.python]
    if job.nproc > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.nproc}"]
    with open(log, "ab", opener=open_no_link) as output:
        process = subprocess.Popen(
            [*launch, *PROGRAM, *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**variables, "PYTHONPATH": path, **devices},
            process_group=0,  # Ctrl-C in a terminal must reach it once, from the sweep
            preexec_fn=_begin_job,
        )
    if place.cores:
        os.sched_setaffinity(process.pid, place.cores)
    return process


def _begin_job() -> None:
    """Restores signals that a process forked during a `StopRequest` ignores."""
    for signum in (signal.SIGINT, SAVE_SIGNAL):
        signal.signal(signum, signal.SIG_DFL)
    end_with_parent(signal.SIGTERM)


def _to_continue(job: Job, folder: Path) -> list[str]:
    """Returns the word with which a job that was started before goes on, or begins again: without a
    checkpoint, or if it is completed, but damaged.
    """
    with lock_file(folder / ".lock", waiting_for=job.name):
        if _status(folder) == "completed" or not any((folder / "checkpoints").glob("*.pt")):
            return ["overwrite=true"]
    return ["resume=auto"]


def _status(folder: Path) -> object:
    try:
        return read_json(folder / SUMMARY).get("status")
    except (OSError, ValueError, AttributeError):
        return None


# --- how it ended ---


def outcome_of(folder: Path) -> Run | str:
    """Returns the completed run of the job in this folder, or in words why there is none."""
    if not folder.exists():
        return "has not run"
    try:
        run = read_run(folder)
        if run.summary.get("status") == "completed" and not run.is_damaged:
            return run
        done = "no summary.json says that it is completed"
        why = run.problems[0] if run.is_damaged else done
    except ConfigError as error:
        why = str(error)
    return _how_it_ended(folder) or why


def _how_it_ended(folder: Path) -> str | None:
    """Returns how a job failed, from `job.json` and the log; None after exit code 0."""
    try:
        ended = read_json(folder / JOB_NAME)
        exit_code, signal_name = ended["exit_code"], ended["signal"]
    except (OSError, ValueError, LookupError, TypeError):
        return "runs, or was killed"
    if exit_code == 0:
        return None
    if signal_name in ("SIGINT", "SIGTERM", "SIGHUP"):
        return f"interrupted, stopped by {signal_name}"
    if signal_name:
        hint = ", often because memory ran out (see dmesg)" if signal_name == "SIGKILL" else ""
        return f"killed by {signal_name}{hint}"
    return f"{_last_error(folder)[:300]} (exit code {exit_code})"


def _last_error(folder: Path) -> str:
    """Returns the line of the log that says why the job failed; torchrun prints more after it."""
    log = folder / LOG_NAME
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.match(line) and "ChildFailedError" not in line]
    return (errors or lines or ["no output"])[-1]
