"""The rank of this process, from the environment variables of the launcher (`torchrun`). Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from cl_train.config.schema import ConfigError


class Launch(NamedTuple):
    """The rank of a process among the `world_size` processes of a run, and on its machine."""

    rank: int
    local_rank: int
    world_size: int


def read_launch(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Read RANK, LOCAL_RANK and WORLD_SIZE; None for a single process without a launcher.

    Raises:
        ConfigError: only some of the variables are set, or a value is invalid.
    """
    alone = environment.get("RANK") == "0" and environment.get("WORLD_SIZE") == "1" and "MASTER_ADDR" not in environment
    if alone or not {"RANK", "WORLD_SIZE"} & environment.keys():
        return None
    numbers = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
    wrong = [name for name in numbers if not environment.get(name, "").isdecimal()]
    wrong += [] if environment.get("MASTER_ADDR") else ["MASTER_ADDR"]
    if not wrong:
        launch = Launch(*(int(environment[name]) for name in numbers[:3]))
        if launch.local_rank <= launch.rank < launch.world_size:
            return launch
        wrong = list(numbers[:3])
    found = ", ".join(f"{name}={environment[name]!r}" if name in environment else f"no {name}" for name in wrong)
    raise ConfigError(
        f"the environment has {found}: start with torchrun, or unset RANK, WORLD_SIZE and LOCAL_RANK to train in one "
        "process"
    )
