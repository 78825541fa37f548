"""The slots of a sweep: the GPUs and CPU cores of each job that runs at the same time as others."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cl_train.config.schema import Config, ConfigError


@dataclass(frozen=True)
class Slot:
    """Where one job at a time runs."""

    gpus: tuple[str, ...] = ()  # as in CUDA_VISIBLE_DEVICES; () = all that are visible
    cores: tuple[int, ...] = ()  # () = all that this process may use
    nodes: int = 1  # of a Slurm allocation; above 1, srun starts the processes
    cpus_per_task: int | None = None  # of srun

    @property
    def name(self) -> str:
        return f"GPU {','.join(self.gpus)}" if self.gpus else ""


def plan_slots(
    gpus: Sequence[str], cores: Sequence[int], runs: Sequence[tuple[Config, int]], groups: int
) -> list[Slot]:
    """Divide GPUs and cores among the jobs that run at the same time, at most one per group of jobs.

    Cores are not shared between slots: a job chooses its loader workers and threads by the cores that it may use, and
    the load of a slot does not count as load of other processes in another one. `cores` are ordered as by `own_cores`;
    `runs` are the settings and the number of processes of each job.

    Raises:
        ConfigError: too few GPUs for a job, or too few cores for its processes and loader workers.
    """
    if any(cfg.device == "cpu" for cfg, _ in runs):
        raise ConfigError("launcher.gpus needs jobs on GPUs, and device=cpu is set: leave out launcher.gpus")
    size = max(nproc for _, nproc in runs)
    count = min(len(gpus) // size, groups)
    if not count:
        raise ConfigError(f"nproc={size} needs {size} GPUs per job, and launcher.gpus has {len(gpus)}")
    share = len(cores) // count
    needed = max(_cores_needed(cfg, nproc) for cfg, nproc in runs)
    if share < needed:
        raise ConfigError(
            f"{count} jobs at a time have {share} of {len(cores)} CPU cores each, and a job needs {needed}, or its "
            f"loader would limit the speed: use GPUs for {len(cores) // needed} jobs at most, or fewer data.workers"
        )
    return [
        Slot(tuple(gpus[size * i : size * (i + 1)]), tuple(cores[share * i : share * (i + 1)])) for i in range(count)
    ]


def _cores_needed(cfg: Config, nproc: int) -> int:
    """One core for each process and one for loading, or the loader workers that the user asked for."""
    return nproc if cfg.data.name == "synthetic" else nproc * max(2, cfg.data.workers or 0)


def chosen_gpus(asked: Sequence[str], visible: Sequence[str]) -> list[str]:
    """The GPUs of `launcher.gpus`. Raises ConfigError: there is no GPU, or not the one that was asked for."""
    if not visible:
        raise ConfigError("launcher.gpus needs CUDA devices, and this machine has none: leave it out")
    chosen = list(visible if list(asked) == ["all"] else asked)
    if len(set(chosen) & set(visible)) < len(chosen):
        raise ConfigError(f"launcher.gpus={','.join(asked)}: must be all, or some of {','.join(visible)}, each once")
    return chosen


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, by their names in CUDA_VISIBLE_DEVICES."""
    import torch

    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return (names or [str(number) for number in range(torch.cuda.device_count())])[: torch.cuda.device_count()]


def own_cores() -> list[int]:
    """The cores of this process, those of one socket adjacent, and those that share a physical core too."""

    def place(core: int) -> tuple[int, int, int]:
        topology = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
        try:
            package, physical = (int((topology / name).read_text()) for name in ("physical_package_id", "core_id"))
        except (OSError, ValueError):  # unknown in some virtual machines
            package, physical = 0, core
        return package, physical, core

    return sorted(os.sched_getaffinity(0), key=place)
