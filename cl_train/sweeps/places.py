"""Where the jobs of a sweep run at the same time: GPUs and CPU cores."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from cl_train.errors import ConfigError
from cl_train.sweeps.plan import Job
from cl_train.system.processes import usable_cores


@dataclass(frozen=True)
class Place:
    """Where one job at a time runs."""

    gpus: tuple[str, ...] = ()  # as in CUDA_VISIBLE_DEVICES; () = all that are visible
    cores: tuple[int, ...] = ()  # () = all that this process may use


def visible_gpus() -> list[str]:
    """Returns the GPUs by their names in CUDA_VISIBLE_DEVICES; torch counts them in a process of
    its own.
    """
    program = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    count = int(done.stdout or 0)
    names = re.findall(r"[^,\s]+", os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    return (names or list(map(str, range(count))))[:count]


def plan_places(
    names: Sequence[str], visible: Sequence[str], groups: Sequence[Sequence[Job]]
) -> list[Place]:
    """Divides the GPUs of `launcher.gpus` and the CPU cores among the jobs that run at the same
    time, one per group. A job chooses its loader workers and threads by the cores of its place.

    Raises ConfigError: too few GPUs or cores, or GPUs that do not exist.
    """
    gpus = list(visible if list(names) == ["all"] else names)
    cores = usable_cores()
    jobs = [job for group in groups for job in group]
    size = max(job.nproc for job in jobs)
    on_cpu = any(job.on_cpu for job in jobs)
    if on_cpu or len(set(gpus) & set(visible)) < max(len(gpus), size):
        choice = f"nproc={size} or more of the GPUs {','.join(visible) or '(none)'}, each once"
        asked_for = f"launcher.gpus={','.join(names)}"
        raise ConfigError(f"{asked_for}: name {choice}, for jobs without device=cpu")

    count = min(len(gpus) // size, len(groups))
    share = len(cores) // count
    needed = 2 * size if any(job.has_loader for job in jobs) else size  # processes and loaders
    if share < needed:
        why = f"{count} jobs at a time have {share} CPU cores each and need {needed}"
        advice = f"use GPUs for {len(cores) // needed} jobs at most"
        raise ConfigError(f"{why}, or the loader would limit the speed: {advice}")
    return [
        Place(tuple(gpus[size * i :][:size]), tuple(cores[share * i :][:share]))
        for i in range(count)
    ]
