"""`python train.py -m ...`: run every job of a sweep in its own process, here or on a Slurm cluster, then compare."""

import shlex
from collections.abc import Sequence

from cl_train.comparison import slurm
from cl_train.comparison.local_jobs import LOG_NAME, LocalJobs, Stopped, raise_stopped, signals_handled
from cl_train.comparison.report import compare_folders
from cl_train.comparison.slots import Slot, chosen_gpus, own_cores, plan_slots, visible_gpus
from cl_train.comparison.sweep_plan import Sweep, plan_sweep, setting_of
from cl_train.config.command_line import check_command_line
from cl_train.config.schema import Config, ConfigError
from cl_train.config.validation import setting_fields
from cl_train.system.launcher import read_launch
from cl_train.system.locks import LockHeld, lock_file


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
        The exit code: 0, 1 if a job failed, 128 + n after signal n (the comparison is written too).

    Raises:
        ConfigError: as `plan_sweep` and `plan_slots`, started by torchrun or srun, or another process runs this sweep.
    """
    if read_launch() is not None:
        raise ConfigError(
            "torchrun and srun cannot start a sweep; python train.py -m nproc=N starts each job under torchrun"
        )
    sweep = plan_sweep(arguments, runs)
    is_local = sweep.launcher.name == "local"
    slurm.check_allocations_ended(sweep)
    if not is_local:
        slurm.check_slurm(sweep)
    slots = _slots(sweep, gpus)
    _advise_compare_by(sweep)
    sweep.folder.mkdir(parents=True, exist_ok=True)
    signum = None
    try:
        with lock_file(sweep.folder / ".sweep.lock"):
            sweep.save()
            sweep.remove_outcomes()
            try:
                with signals_handled(raise_stopped):
                    if is_local:
                        _run_locally(sweep, slots, program)
                    elif not _run_on_slurm(sweep, program):
                        return 0
            except Stopped as stop:
                signum = stop.signum
                if not is_local:
                    print(f"the Slurm jobs continue. {_later(sweep)}", flush=True)
                    return 128 + signum
            compare_folders([sweep.folder])
    except LockHeld as holder:
        raise ConfigError(f"another process runs the sweep in {sweep.folder} ({holder}): stop it first") from None
    if signum is not None:
        return 128 + signum
    return 0 if all(job.status == "completed" for job in sweep.jobs) else 1


def _slots(sweep: Sweep, gpus: Sequence[str] | None) -> list[Slot]:
    """The slots of `launcher.gpus`, else one with everything."""
    groups = sweep.pending_groups()
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


def _run_locally(sweep: Sweep, slots: Sequence[Slot], program: Sequence[str]) -> None:
    groups = sweep.pending_groups()
    count = sum(map(len, groups))
    print(f"sweep of {len(sweep.jobs)} jobs, {count} to run, in {sweep.folder}/<job>/{LOG_NAME}", flush=True)
    LocalJobs(sweep.folder, groups, slots, program, lambda job: sweep.save()).run()


def _run_on_slurm(sweep: Sweep, program: Sequence[str]) -> bool:
    """Submit the jobs and wait for them, unless launcher.wait=false; whether they have ended."""
    if not sweep.pending_groups():
        return True
    slurm.submit(sweep, program)
    ids = ", ".join(sweep.slurm_ids)
    print(f"sweep of {len(sweep.jobs)} jobs, submitted as Slurm job {ids}, logs in {sweep.folder}/slurm", flush=True)
    if not sweep.launcher.wait:
        print(_later(sweep), flush=True)
        return False
    slurm.wait_for_allocations(sweep)
    sweep.allocations = {}  # they have ended, and Slurm reuses ids
    sweep.save()
    sweep.remove_outcomes()
    return True


def _later(sweep: Sweep) -> str:
    return f"cl-train compare {shlex.quote(str(sweep.folder))} reports what has ended; scancel ends the jobs."
