"""What Slurm says about the allocations of a sweep, and what became of their jobs."""

from __future__ import annotations

import os
import subprocess

from cl_train.comparison.sweep_plan import Sweep

_ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")


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


def own_allocation() -> str:
    """The allocation of this process. In an array SLURM_JOB_ID of one element is the id of the whole array."""
    array, element = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{element}" if array and element else os.environ["SLURM_JOB_ID"]


def active_allocations(sweep: Sweep, states: dict[str, str]) -> list[str]:
    """The allocations that are queued or running, or will be again."""
    return [one for one in sweep.allocations if states.get(one, "COMPLETED") not in _ENDED]


def record_missing_outcomes(sweep: Sweep, states: dict[str, str]) -> None:
    """Jobs that have no outcome have failed if their allocation has ended; else `why` gets its state."""
    active = active_allocations(sweep, states)
    for allocation, numbers in sweep.allocations.items():
        for job in (sweep.jobs[number] for number in numbers):
            if job.has_outcome:
                continue
            state = states.get(allocation, "unknown to Slurm")
            if allocation in active:
                job.why = f"{job.status}; Slurm job {allocation} is {state}"
            else:
                reason = f"{job.why}, " if job.why else ""
                job.status, job.why = "failed", f"{reason}Slurm job {allocation} ended: {state}"
