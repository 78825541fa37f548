"""`python train.py -m ...`: run every job of a sweep in its own process, here or on a Slurm cluster, then compare.

On a cluster each group of jobs that are compared is an element of an array, which runs this program for that group:
`resume_sweep=FOLDER only_group=N`. Before the time limit, and when Slurm preempts the element, the running job saves a
checkpoint; the element is requeued and resumes there.
"""

import hashlib
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cl_train.comparison.report import compare_folders
from cl_train.comparison.sweep_jobs import (
    PACKAGE_ROOT,
    LocalJobs,
    Slot,
    Stopped,
    chosen_gpus,
    own_allocation,
    own_cores,
    plan_slots,
    signals_handled,
    visible_gpus,
)
from cl_train.comparison.sweep_plan import LOG_NAME, Sweep, plan_sweep, problem_of, setting_of, write_end
from cl_train.config.command_line import check_command_line
from cl_train.config.schema import Config, ConfigError
from cl_train.config.validation import setting_fields
from cl_train.system.launcher import read_launch
from cl_train.system.locks import LockHeld, lock_file

_QUEUE_POLL_S = 5.0
_TIME_LIMIT_SIGNAL = signal.SIGUSR2


def run_sweep(
    arguments: Sequence[str],
    program: Sequence[str] = ("-m", "cl_train", "train"),
    gpus: Sequence[str] | None = None,
    runs: Sequence[Config] | None = None,
) -> int:
    """Run all jobs of train.py's `arguments`, then write the comparison.

    Args:
        runs: as in `plan_sweep`.
        program: what the process of a job runs; tests replace it.
        gpus: the GPUs of this machine; None = those that CUDA sees.

    Returns:
        The exit code: 0, 1 if a job has not completed, 128 + n after signal n (the comparison is written too).

    Raises:
        ConfigError: as `plan_sweep` and `plan_slots`, started by torchrun or srun, or another process runs this sweep.
    """
    if read_launch() is not None:
        raise ConfigError(
            "torchrun and srun cannot start a sweep; python train.py -m nproc=N starts each job under torchrun"
        )
    sweep = plan_sweep(arguments, runs)
    if sweep.only_group is not None:
        return _run_element(sweep, program)
    is_local = sweep.launcher.name == "local"
    if not is_local:
        _check_slurm(sweep)
    _check_elements_ended(sweep)
    slots = _slots(sweep, gpus)
    _advise_compare_by(sweep)
    sweep.folder.mkdir(parents=True, exist_ok=True)
    signum, is_waited_for = 0, True
    try:
        with lock_file(sweep.folder / ".sweep.lock"):
            sweep.save()
            groups = sweep.missing_groups()
            count = sum(map(len, groups))
            print(f"sweep of {len(sweep.jobs)} jobs, {count} to run, in {sweep.folder}/<job>/{LOG_NAME}", flush=True)
            try:
                with signals_handled():
                    if is_local:
                        LocalJobs(sweep.folder, groups, slots, program).run()
                    elif groups:
                        is_waited_for = _submit(sweep, [group[0].group for group in groups])
            except Stopped as stop:
                signum, is_waited_for = stop.signum, is_local
            if not is_waited_for:
                print(
                    f"the Slurm jobs continue; cl-train compare {shlex.quote(str(sweep.folder))} reports what has ended"
                )
                return 128 + signum if signum else 0
            compare_folders([sweep.folder])
    except LockHeld as holder:
        raise ConfigError(f"another process runs the sweep in {sweep.folder} ({holder}): stop it first") from None
    has_missing = bool(sweep.missing_groups())
    if has_missing:
        print(f"python train.py -m resume_sweep={shlex.quote(str(sweep.folder))} runs what is missing", flush=True)
    return 128 + signum if signum else int(has_missing)


def _slots(sweep: Sweep, gpus: Sequence[str] | None) -> list[Slot]:
    """The slots of `launcher.gpus`, else one with everything."""
    groups = sweep.missing_groups()
    if not sweep.launcher.gpus or not groups:
        return [Slot()]
    chosen = chosen_gpus(sweep.launcher.gpus, visible_gpus() if gpus is None else gpus)
    runs = [(check_command_line(job.overrides)[0], job.nproc) for group in groups for job in group]
    slots = plan_slots(chosen, own_cores(), runs, len(groups))
    print(f"{len(slots)} jobs at a time, each with {len(slots[0].cores)} CPU cores: {', '.join(s.name for s in slots)}")
    return slots


def _advise_compare_by(sweep: Sweep) -> None:
    """Warn before the start if all jobs have the same value of the compared setting."""
    words = [{*job.overrides, f"nproc={job.nproc}"} for job in sweep.jobs]
    varying = {setting_of(word) for word in words[0].union(*words) - words[0].intersection(*words)}
    is_known = varying <= setting_fields(Config).keys()  # an experiment sets many keys
    if varying and is_known and sweep.compare_by not in varying:
        keys = " or ".join(f"compare_by={key}" for key in sorted(varying))
        print(f"warning: all jobs have the same {sweep.compare_by}, so nothing is compared; use {keys}", flush=True)


# --- Slurm: on the login node -----------------------------------------------------------------------------------------


def _check_slurm(sweep: Sweep) -> None:
    """Warn if the jobs are meant to run on GPUs and none is requested.

    Raises ConfigError: Slurm is missing, or the processes of a job cannot be spread evenly over the nodes.
    """
    if shutil.which("sbatch") is None:
        raise ConfigError("launcher=slurm: this machine has no sbatch; start the sweep on a login node of the cluster")
    nodes = sweep.launcher.nodes
    uneven = [job.nproc for job in sweep.jobs if job.nproc % nodes]
    if uneven:
        raise ConfigError(f"nproc={uneven[0]}: the processes of a job must be a multiple of launcher.nodes={nodes}")
    devices = (check_command_line(job.overrides)[0].device for group in sweep.missing_groups() for job in group)
    if sweep.launcher.gpus_per_node is None and any(device != "cpu" for device in devices):
        print(
            "warning: launcher.gpus_per_node is not set, so no GPU is requested, and most clusters then run the jobs "
            "on the CPU: set launcher.gpus_per_node=N, or device=cpu if this is intended",
            flush=True,
        )


def _job_name(sweep: Sweep) -> str:
    """Slurm's name for the elements of this sweep: nothing else tells them apart after the launcher was killed."""
    return f"cl-train-{hashlib.sha256(str(sweep.folder.resolve()).encode()).hexdigest()[:12]}"


def _check_elements_ended(sweep: Sweep) -> None:
    """Raises ConfigError: Slurm still runs jobs of this sweep, or may do so."""
    if not (sweep.folder / "slurm").exists() or shutil.which("squeue") is None:
        return
    ids = _queued_elements(sweep)
    if ids is None:
        raise ConfigError("squeue does not answer, and Slurm may still run jobs of this sweep: try again later")
    if ids:
        raise ConfigError(f"Slurm still has jobs of this sweep ({', '.join(ids)}): wait for them, or scancel them")


def _queued_elements(sweep: Sweep) -> list[str] | None:
    """Slurm's ids of elements that wait or run; None if squeue does not answer."""
    command = ["squeue", "--noheader", "--format=%i", f"--name={_job_name(sweep)}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.split() if done.returncode == 0 else None


def _submit(sweep: Sweep, groups: Sequence[int]) -> bool:
    """Submit the groups and wait until they have ended; False with launcher.wait=false.

    Raises ConfigError: Slurm refuses them.
    """
    folder = sweep.folder.resolve() / "slurm"
    folder.mkdir(exist_ok=True)
    script = folder / "array.sbatch"
    script.write_text(array_script(sweep, groups), encoding="utf-8")
    wait = ["--wait"] if sweep.launcher.wait else []
    # In its own process group, so that Ctrl-C does not reach it: the jobs continue.
    sbatch = subprocess.Popen(
        ["sbatch", "--parsable", *wait, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert sbatch.stdout is not None and sbatch.stderr is not None
    try:
        if not (array := sbatch.stdout.readline().strip()):
            reason = (sbatch.stderr.read().strip().splitlines() or ["sbatch gives no reason"])[-1]
            raise ConfigError(
                f"launcher=slurm: {reason}; resume_sweep={sweep.folder} with other launcher settings submits the jobs"
            )
        print(f"submitted as Slurm job {array}, logs in {folder}", flush=True)
        sbatch.wait()
        while sweep.launcher.wait and _queued_elements(sweep):  # `sbatch --wait` takes a requeued job for an ended one
            time.sleep(_QUEUE_POLL_S)
    finally:
        sbatch.kill()
        sbatch.communicate()
    return sweep.launcher.wait


def array_script(sweep: Sweep, groups: Sequence[int]) -> str:
    """The script of the array; element N runs group N."""
    launcher, nproc = sweep.launcher, max(job.nproc for job in sweep.jobs)
    # On one node torchrun is one task with the cores of all processes; on several nodes srun starts a task per process.
    tasks, processes_per_task = (1, nproc) if launcher.nodes == 1 else (nproc // launcher.nodes, 1)
    options = {
        "job-name": _job_name(sweep),
        "array": ",".join(map(str, groups)) + (f"%{launcher.max_parallel}" if launcher.max_parallel else ""),
        "output": sweep.folder.resolve() / "slurm" / "%A_%a.log",
        "open-mode": "append",
        "requeue": None,
        # B: the shell receives the signal; by default only the steps of srun do.
        "signal": f"B:{_TIME_LIMIT_SIGNAL.name[3:]}@{_warning_s(launcher.time_min)}",
        "time": launcher.time_min,
        "nodes": launcher.nodes,
        "ntasks-per-node": tasks,
    }
    if launcher.partition:
        options["partition"] = launcher.partition
    if launcher.cpus_per_task:
        options["cpus-per-task"] = launcher.cpus_per_task * processes_per_task
    if launcher.gpus_per_node:
        options["gpus-per-node"] = launcher.gpus_per_node
    words = ["-m", "cl_train", "train", "-m", f"resume_sweep={sweep.folder.resolve()}", "only_group="]
    # exec: the shell of the element, which receives Slurm's signals, becomes the Python process.
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{name}" + ("" if value is None else f"={value}") for name, value in options.items()),
        f"export PYTHONPATH={shlex.quote(str(PACKAGE_ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}",
        *launcher.setup,
        f'exec {shlex.join([sys.executable, *words])}"$SLURM_ARRAY_TASK_ID"',
    ]
    return "\n".join(lines) + "\n"


def _warning_s(time_min: int) -> int:
    """Seconds before the time limit at which the jobs are asked to save a checkpoint."""
    return min(120, 20 * time_min)


# --- Slurm: an element of the array -----------------------------------------------------------------------------------


def _run_element(sweep: Sweep, program: Sequence[str]) -> int:
    """Run what is missing in one group; if interrupted, requeue the element."""
    slot = Slot(nodes=sweep.launcher.nodes, cpus_per_task=sweep.launcher.cpus_per_task)
    folders = [sweep.folder / job.name for job in sweep.jobs if job.group == sweep.only_group]
    before = _progress(folders)
    grace_s = 0.8 * _warning_s(sweep.launcher.time_min)
    try:
        with signals_handled((signal.SIGTERM, _TIME_LIMIT_SIGNAL)):
            LocalJobs(sweep.folder, sweep.missing_groups(), [slot], program, grace_s).run()
    except Stopped as stop:
        if stop.signum == _TIME_LIMIT_SIGNAL and _progress(folders) == before:  # another attempt would get no further
            for folder in folders:
                if (problem_of(folder) or "").startswith("interrupted"):
                    write_end(folder, f"no checkpoint within launcher.time_min={sweep.launcher.time_min}: allow more")
            return 1
        _requeue()
        return 128 + stop.signum
    return int(bool(sweep.missing_groups()))


def _progress(folders: Sequence[Path]) -> set[str]:
    """Checkpoints and outcomes of the jobs."""
    return {
        str(path) for folder in folders for name in ("checkpoints/*.pt", "summary.json") for path in folder.glob(name)
    }


def _requeue() -> None:
    """Requeue this element, unless Slurm is ending it: after scancel it must not run again."""
    element = own_allocation()
    state = subprocess.run(["squeue", "-h", "-j", element, "-o", "%T"], capture_output=True, text=True)
    if state.stdout.strip() == "RUNNING":
        print(f"requeueing Slurm job {element}", flush=True)
        subprocess.run(["scontrol", "requeue", element], check=True)
