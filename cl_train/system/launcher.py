"""What the launcher (`torchrun`) says about this process, from the environment. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from cl_train.config.schema import ConfigError

_ADVICE = "start it with torchrun, or unset RANK, WORLD_SIZE and LOCAL_RANK to train in one process"


@dataclass(frozen=True)
class Launch:
    """The place of a process among the `world_size` processes of a run, and on its machine."""

    rank: int
    local_rank: int
    world_size: int


def read_launch(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """What RANK, LOCAL_RANK and WORLD_SIZE say; None for a single process without a launcher.

    Raises:
        ConfigError: only some of the variables are set, or one has a value that makes no sense.
    """
    ranks = [name for name in ("RANK", "WORLD_SIZE") if name in environment]
    if not ranks:
        return None
    if environment.get("RANK") == "0" and environment.get("WORLD_SIZE") == "1" and "MASTER_ADDR" not in environment:
        return None
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if not environment.get(name)]
    if missing:
        raise ConfigError(f"{' and '.join(ranks)} in the environment, but not {' and '.join(missing)}: {_ADVICE}")
    numbers = {name: _count(name, environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    launch = Launch(numbers["RANK"], numbers["LOCAL_RANK"], numbers["WORLD_SIZE"])
    if launch.rank >= launch.world_size or launch.local_rank > launch.rank:
        raise ConfigError(
            f"RANK={launch.rank}, LOCAL_RANK={launch.local_rank} and WORLD_SIZE={launch.world_size} in the environment "
            f"do not fit together: {_ADVICE}"
        )
    return launch


def _count(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise ConfigError(f"{name}={value!r} in the environment is not a whole number: {_ADVICE}")
    return int(value)
