"""The rank of this process, from the environment variables of `torchrun` or Slurm's `srun`. Imports no torch."""

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from cl_train.config.schema import ConfigError


class Launch(NamedTuple):
    """The rank of a process among the `world_size` processes of a run, and on its machine."""

    rank: int
    local_rank: int
    world_size: int


def read_launch(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Read RANK, LOCAL_RANK and WORLD_SIZE; None for a single process without a launcher. See `adopt_srun`.

    Raises ConfigError if only some of the variables are set, or a value is invalid.
    """
    is_single_process = (
        environment.get("RANK") == "0" and environment.get("WORLD_SIZE") == "1" and "MASTER_ADDR" not in environment
    )
    if is_single_process or not {"RANK", "WORLD_SIZE"} & environment.keys():
        return None
    numbers = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
    wrong = [name for name in numbers if not environment.get(name, "").isdecimal()]
    wrong += [] if environment.get("MASTER_ADDR") else ["MASTER_ADDR"]
    if not wrong:
        launch = Launch(*(int(environment[name]) for name in numbers[:3]))
        if launch.local_rank <= launch.rank < launch.world_size:
            return launch
    found = ", ".join(f"{name}={environment.get(name, 'unset')!r}" for name in wrong or numbers[:3])
    raise ConfigError(
        f"the environment has {found}: start with torchrun or srun, or unset RANK, WORLD_SIZE and LOCAL_RANK to train "
        "in one process"
    )


def is_srun_task(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether `srun` started this process as one of several tasks.

    SLURM_STEP_NUM_TASKS counts the tasks of this `srun`. SLURM_NTASKS is also set where one process is started: in a
    shell of `salloc` and in an `sbatch` script.
    """
    return environment.get("SLURM_STEP_NUM_TASKS", "1") != "1" and "TORCHELASTIC_RUN_ID" not in environment


def adopt_srun() -> None:
    """In a task of `srun`, set the variables that torchrun would set: torch.distributed and `read_launch` read them."""
    os.environ.update(srun_variables(os.environ))


def srun_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables for one of several tasks of `srun`; empty for any other process, or where they are set.

    MASTER_ADDR and MASTER_PORT are respected. By default rank 0 is on the first node of the step, and the port follows
    from the job and the step, so that jobs on one node do not collide: 20000-29999, below Linux's ephemeral ports.
    """
    if not is_srun_task(environment) or {"RANK", "WORLD_SIZE"} & environment.keys():
        return {}
    tasks = environment["SLURM_STEP_NUM_TASKS"]
    job, step, node = (int(environment.get(f"SLURM_{name}", "0")) for name in ("JOB_ID", "STEP_ID", "NODEID"))
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", tasks))
    per_node = [count for count, repeats in counts for _ in range(int(repeats or 1))]  # 2(x3),1 is 2, 2, 2, 1
    return {
        "RANK": environment.get("SLURM_PROCID", ""),
        "LOCAL_RANK": environment.get("SLURM_LOCALID", ""),
        "WORLD_SIZE": tasks,
        "LOCAL_WORLD_SIZE": per_node[min(node, len(per_node) - 1)],
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(nodes),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(20000 + (job + 1009 * step) % 10000),
    }


def first_host(nodelist: str) -> str:
    """The first node of Slurm's compressed list: `gpu003` of `gpu[003-007,010],other1`. `scontrol` may be absent."""
    found = re.match(r"(?:[^,\[]|\[[^]]*\])*", nodelist)
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", found[0]) if found else ""


def cores_of_process(world_size: int, environment: Mapping[str, str] = os.environ) -> int:
    """The CPU cores for one process: the usable ones, divided by the ranks on this machine.

    `srun` may have bound each task to its own cores; these are not divided again.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if is_srun_task(environment) and "_cpu" in environment.get("SLURM_CPU_BIND_TYPE", ""):
        return cores
    return max(1, cores // int(environment.get("LOCAL_WORLD_SIZE", world_size)))
