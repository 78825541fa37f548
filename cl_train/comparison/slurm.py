"""Run a sweep on a Slurm cluster: an array of allocations, one for each group of jobs that are compared.

The jobs of a group run one after the other in one allocation, as they do locally. Before the time limit, and when Slurm
preempts the allocation, the running job saves a checkpoint; the allocation is requeued and the job resumes there.
"""

import importlib.util
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cl_train.comparison.local_jobs import (
    PACKAGE_ROOT,
    LocalJobs,
    Progress,
    Stopped,
    own_allocation,
    raise_stopped,
    signals_handled,
)
from cl_train.comparison.slots import Slot
from cl_train.comparison.sweep_plan import SLURM_FOLDER, Sweep, read_sweep
from cl_train.config.command_line import check_command_line
from cl_train.config.schema import ConfigError, LauncherConfig

_TIME_LIMIT_SIGNAL = signal.SIGUSR2
_POLL_S = 5.0
_ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")


def check_slurm(sweep: Sweep) -> None:
    """Warn if the jobs are meant to run on GPUs and none is requested.

    Raises:
        ConfigError: submitit or Slurm is missing, or the processes of a job cannot be spread evenly over the nodes.
    """
    if importlib.util.find_spec("submitit") is None:
        raise ConfigError("launcher=slurm needs submitit: pip install 'cl-train[slurm]'")
    if shutil.which("sbatch") is None:
        raise ConfigError("launcher=slurm: this machine has no sbatch; start the sweep on a login node of the cluster")
    nodes = sweep.launcher.nodes
    uneven = [job.nproc for job in sweep.jobs if job.nproc % nodes]
    if uneven:
        raise ConfigError(f"nproc={uneven[0]}: the processes of a job must be a multiple of launcher.nodes={nodes}")
    devices = (check_command_line(job.overrides)[0].device for group in sweep.pending_groups() for job in group)
    if sweep.launcher.gpus_per_node is None and any(device != "cpu" for device in devices):
        print(
            "warning: launcher.gpus_per_node is not set, so no GPU is requested, and most clusters then run the jobs "
            "on the CPU: set launcher.gpus_per_node=N, or device=cpu if this is intended",
            flush=True,
        )


def check_allocations_ended(sweep: Sweep) -> None:
    """Before a sweep is resumed.

    Raises:
        ConfigError: Slurm still runs jobs of an earlier submission, or may do so.
    """
    if not sweep.allocations:
        return
    states = allocation_states(sweep)
    if states is None:
        raise ConfigError("squeue does not answer, and Slurm may still run jobs of this sweep: try again later")
    if active := active_allocations(sweep, states):
        raise ConfigError(f"Slurm still has jobs of this sweep ({', '.join(active)}): wait for them, or scancel them")
    sweep.allocations = {}


def submit(sweep: Sweep, program: Sequence[str]) -> None:
    """Submit the pending jobs and record their allocations in `sweep.json`.

    Raises:
        ConfigError: Slurm refuses the allocations.
    """
    import submitit

    folder, groups = sweep.folder.resolve(), sweep.pending_groups()
    # exec: the shell of the allocation, which receives Slurm's signals, becomes the Python process.
    executor = submitit.SlurmExecutor(folder / SLURM_FOLDER, python=f"exec {shlex.quote(sys.executable)}")
    executor.update_parameters(**_parameters(sweep.launcher, max(job.nproc for job in sweep.jobs)))
    try:
        # Without the ids of what it has submitted, the sweep would submit it again.
        with signals_handled(signal.SIG_IGN), executor.batch():
            submitted = [
                executor.submit(run_allocation, str(folder), [job.number for job in group], list(program))
                for group in groups
            ]
    except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise ConfigError(
            f"launcher=slurm: {reason}; resume_sweep={sweep.folder} with other launcher settings submits the jobs"
        ) from None
    sweep.allocations = {
        str(one.job_id): [job.number for job in group] for one, group in zip(submitted, groups, strict=True)
    }
    sweep.save()


def _parameters(launcher: LauncherConfig, nproc: int) -> dict[str, Any]:
    """submitit's names for the options of sbatch."""
    # On one node torchrun is one task with the cores of all processes; on several nodes srun starts a task per process.
    tasks, processes_per_task = (1, nproc) if launcher.nodes == 1 else (nproc // launcher.nodes, 1)
    return {
        "job_name": "cl-train",
        "partition": launcher.partition,
        "time": launcher.time_min,
        "nodes": launcher.nodes,
        "ntasks_per_node": tasks,
        "cpus_per_task": launcher.cpus_per_task and launcher.cpus_per_task * processes_per_task,
        "gpus_per_node": launcher.gpus_per_node,
        "array_parallelism": launcher.max_parallel or 10_000,
        "setup": [f"export PYTHONPATH={shlex.quote(str(PACKAGE_ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}", *launcher.setup],
        "use_srun": False,
        "stderr_to_stdout": True,
        # B: the shell receives the signal; by default only the steps of srun do.
        "additional_parameters": {"requeue": True, "signal": f"B:{_TIME_LIMIT_SIGNAL.name[3:]}@{_warning_s(launcher)}"},
    }


def _warning_s(launcher: LauncherConfig) -> int:
    """Seconds before the time limit at which the jobs are asked to save a checkpoint."""
    return min(120, 20 * launcher.time_min)


# --- inside an allocation ---------------------------------------------------------------------------------------------


def run_allocation(folder: str, numbers: Sequence[int], program: Sequence[str]) -> None:
    """Run the unfinished ones of these jobs of the sweep in `folder`; if interrupted, requeue the allocation."""
    sweep = read_sweep(Path(folder))
    jobs = [sweep.jobs[number] for number in numbers if not sweep.jobs[number].has_outcome]
    for job in jobs:
        job.why = job.exit_code = None
    before = _progress(sweep, numbers)
    slot = Slot(nodes=sweep.launcher.nodes, cpus_per_task=sweep.launcher.cpus_per_task)
    try:
        with signals_handled(raise_stopped, (signal.SIGTERM, _TIME_LIMIT_SIGNAL)):
            LocalJobs(sweep.folder, [jobs], [slot], program, sweep.save_outcome, 0.8 * _warning_s(sweep.launcher)).run()
    except Stopped as stop:
        if stop.signum == _TIME_LIMIT_SIGNAL and _progress(sweep, numbers) == before:
            for job in jobs:
                if job.status == "interrupted":
                    job.status = "failed"
                    job.why = f"no checkpoint within launcher.time_min={sweep.launcher.time_min}: allow more time"
                    sweep.save_outcome(job)
        _requeue()


def _progress(sweep: Sweep, numbers: Sequence[int]) -> set[str]:
    """Checkpoints and outcomes of the jobs: if none is new, another attempt would get no further."""
    folders = [sweep.folder / sweep.jobs[number].name for number in numbers]
    patterns = ("checkpoints/*.pt", "summary.json")
    return {str(path) for folder in folders for pattern in patterns for path in folder.glob(pattern)}


def _requeue() -> None:
    """Requeue this allocation, unless Slurm is ending it: after scancel it must not run again."""
    allocation = own_allocation()
    state = subprocess.run(["squeue", "-h", "-j", allocation, "-o", "%T"], capture_output=True, text=True)
    if state.stdout.strip() == "RUNNING":
        print(f"requeueing Slurm job {allocation}", flush=True)
        subprocess.run(["scontrol", "requeue", allocation], check=True)


# --- on the login node ------------------------------------------------------------------------------------------------


def wait_for_allocations(sweep: Sweep) -> None:
    """Wait until Slurm has ended all allocations; show the state of each job, and print its outcome once."""
    submitted = [number for numbers in sweep.allocations.values() for number in numbers]
    progress = Progress(sweep.folder, len(submitted))
    while True:
        states = allocation_states(sweep)
        outcomes = read_sweep(sweep.folder).jobs
        # Slurm forgets why an allocation ended, so jobs that have ended are not read again.
        sweep.jobs = [job if job.number in progress.ended else outcomes[job.number] for job in sweep.jobs]
        if states is not None:
            record_missing_outcomes(sweep, states)
        waiting = [job for job in sweep.jobs if job.number in submitted and job.number not in progress.ended]
        for job in waiting:
            if job.has_outcome:
                progress.end(job)
        if states is not None and not active_allocations(sweep, states):
            return
        progress.draw([f"{job.name}: {job.why or job.status}" for job in waiting if not job.has_outcome])
        time.sleep(_POLL_S)


def allocation_states(sweep: Sweep) -> dict[str, str] | None:
    """Slurm's state of each allocation that it remembers, such as PENDING; None = squeue did not answer.

    squeue, unlike sacct, works on clusters without accounting. It forgets an allocation minutes after its end.
    """
    ids = ",".join(sweep.slurm_ids)
    command = ["squeue", "--noheader", "--array", "--states=all", "--format=%i %T", f"--jobs={ids}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode and "Invalid job id" not in done.stderr:
        return None
    return dict(line.split() for line in done.stdout.splitlines())


def active_allocations(sweep: Sweep, states: dict[str, str]) -> list[str]:
    """The allocations that are queued or running, or will be again."""
    return [one for one in sweep.allocations if states.get(one, "COMPLETED") not in _ENDED]


def record_missing_outcomes(sweep: Sweep, states: dict[str, str]) -> None:
    """Jobs that have no outcome have failed if their allocation has ended; else `why` gets its state."""
    active = active_allocations(sweep, states)
    for allocation, numbers in sweep.allocations.items():
        state = states.get(allocation, "unknown to Slurm")
        for job in (sweep.jobs[number] for number in numbers if not sweep.jobs[number].has_outcome):
            if allocation in active:
                job.why = f"{job.status}; Slurm job {allocation} is {state}"
            else:
                reason = f"{job.why}, " if job.why else ""
                job.status, job.why = "failed", f"{reason}Slurm job {allocation} ended: {state}"
