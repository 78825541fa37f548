"""The processes of one run: rank, device and process group, and the collectives that a run uses."""

import logging
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed

from cl_train.config.schema import ConfigError
from cl_train.system.child_process import end_with_parent
from cl_train.system.launcher import adopt_srun, is_srun_task, read_launch

T = TypeVar("T")
_groups = 0  # process groups that this process has joined

log = logging.getLogger(__name__)

GPU_FILE = Path("/dev/nvidia0")


@dataclass(frozen=True)
class Dist:
    """Rank and device of this process."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Rank 0 writes the files and the console."""
        return self.rank == 0


def choose_device(name: str, local_rank: int = 0, *, warn: bool = True) -> torch.device:
    """The device of a setting `device=`: `auto` is CUDA if there is a device, else the CPU.

    With `warn`, `auto` logs a warning if there is a GPU that torch cannot use.

    Raises ConfigError: there is no CUDA device for this rank, or torch has no kernels for it.
    """
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        problem = _unusable_gpu() if GPU_FILE.exists() else "this machine has no usable CUDA device"
        if name == "cuda":
            raise ConfigError(f"device=cuda: {problem}; use device=cpu or device=auto")
        if warn and GPU_FILE.exists():
            log.warning("device=auto uses the CPU: %s", problem)
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(f"device=cuda: local rank {local_rank} has no GPU of {count}; use --nproc-per-node={count}")
    device = torch.device("cuda", local_rank)
    check_kernels(device)
    return device


def _unusable_gpu() -> str:
    if torch.version.cuda is None:
        return f"this machine has a GPU, but torch {torch.__version__} is a build without CUDA"
    return (
        f"this machine has a GPU that torch {torch.__version__} cannot use: its driver is too old for CUDA "
        f"{torch.version.cuda} (nvidia-smi shows the version), or CUDA_VISIBLE_DEVICES hides it"
    )


def check_kernels(device: torch.device) -> None:
    """Raises ConfigError: torch has no kernels for this GPU, and the first one would fail.

    Kernels for 8.0 run on 8.6, but not on 7.5 or 9.0; `compute_90` is compiled for any later GPU when it is needed.
    """
    own = torch.cuda.get_device_capability(device)
    names = torch.cuda.get_arch_list()  # such as sm_90 and compute_90
    matches = [match for name in names if (match := re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", name))]
    built = [(match[1], (int(match[2]), int(match[3]))) for match in matches]
    runs = any(version <= own and (kind == "compute" or version[0] == own[0]) for kind, version in built)
    if runs or not built:  # not built for NVIDIA's GPUs: torch knows what it supports
        return
    is_later = own > max(version for _, version in built)
    remedy = "a newer torch" if is_later else "torch's build for CUDA 12.6, which still supports Volta"
    raise ConfigError(
        f"{torch.cuda.get_device_name(device)} has compute capability {own[0]}.{own[1]}, and torch {torch.__version__} "
        f"has kernels for {', '.join(names)} only: install {remedy}, or use device=cpu"
    )


@contextmanager
def processes(device: str, timeout_s: float) -> Iterator[Dist]:
    """Join the process group of torchrun or srun (NCCL on CUDA, gloo on a CPU), and leave it at the end.

    A single process creates no group. A collective that waits longer than `timeout_s` for a dead or hung rank raises
    RuntimeError.

    Raises:
        ConfigError: see `read_launch` and `choose_device`.
        ConnectionError: the other ranks do not respond.
    """
    adopt_srun()
    launch = read_launch()
    if launch is None:
        yield Dist(0, 1, choose_device(device))
        return
    end_with_parent(signal.SIGTERM)  # a rank whose launcher was killed saves and ends
    # `srun --gpus-per-task=1` shows each task its own GPU only; NCCL refuses two ranks on one GPU.
    has_own_gpu = is_srun_task() and torch.cuda.device_count() == 1
    chosen = choose_device(device, 0 if has_own_gpu else launch.local_rank)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    timeout = timedelta(seconds=timeout_s)
    try:
        store, rank, world_size = next(torch.distributed.rendezvous("env://", timeout=timeout))
    except torch.distributed.DistError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ConnectionError(
            f"rank {launch.rank} did not meet the other {launch.world_size - 1} ranks at {address} within "
            f"{timeout_s:g} s: start all ranks, and check MASTER_ADDR and MASTER_PORT ({str(error).splitlines()[0]})"
        ) from error
    global _groups
    _groups += 1
    store = torch.distributed.PrefixStore(store_prefix("attempt"), store)
    torch.distributed.init_process_group(
        # gloo on CUDA too: the hosts exchange flags without waiting for a device
        "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=chosen if chosen.type == "cuda" else None,
    )
    dist = Dist(rank, world_size, chosen)
    try:
        yield dist
    except BaseException:
        if chosen.type == "cuda":  # else the end would wait for collectives that a dead rank never joins
            assert torch.distributed.group.WORLD is not None
            with suppress(RuntimeError):
                torch.distributed.group.WORLD.abort()
        raise
    finally:
        torch.distributed.destroy_process_group()


def store_prefix(name: str) -> str:
    """A prefix of the keys in the ranks' store: a restarted rank must not find those of the previous attempt, nor the
    second run of a program those of its first.

    torchrun does not count a restart after a node has joined, but then the number of processes changes.
    """
    return f"{name}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{os.environ['WORLD_SIZE']}-{_groups}"


def sum_over_ranks(values: torch.Tensor, dist: Dist) -> torch.Tensor:
    """Sum in place over the ranks. The host waits for the device only when it reads the result."""
    if dist.world_size > 1:
        torch.distributed.all_reduce(values)
    return values


def max_over_ranks(flags: list[int], dist: Dist) -> list[int]:
    """The maximum of each flag over the ranks. It runs on the hosts and does not wait for a device."""
    if dist.world_size == 1:
        return flags
    maxima = torch.tensor(flags)
    torch.distributed.all_reduce(maxima, op=torch.distributed.ReduceOp.MAX)
    return [int(flag) for flag in maxima.tolist()]


def broadcast_buffers(model: torch.nn.Module, dist: Dist) -> None:
    """Copy rank 0's BatchNorm statistics to every rank, so that the ranks evaluate what rank 0 saves."""
    if dist.world_size > 1:
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, src=0)


def broadcast_object(value: Any, dist: Dist) -> Any:
    """Rank 0's `value` on every rank; it is pickled."""
    if dist.world_size == 1:
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def on_main(work: Callable[[], T], dist: Dist) -> T:
    """Do `work` on rank 0, and return its result or raise its exception on every rank. Both are pickled."""
    if dist.world_size == 1:
        return work()
    outcome: Any = None
    failure: Exception | None = None
    if dist.is_main:
        try:
            outcome = work()
        except Exception as error:  # any exception, because the other ranks wait for the result
            failure = error
    outcome, failure = broadcast_object((outcome, failure), dist)
    if failure is not None:
        raise failure
    return cast(T, outcome)


def gather_objects(value: Any, dist: Dist) -> list[Any]:
    """The values of all ranks, in rank order, on every rank; they are pickled."""
    if dist.world_size == 1:
        return [value]
    values: list[Any] = [None] * dist.world_size
    torch.distributed.all_gather_object(values, value)
    return values
