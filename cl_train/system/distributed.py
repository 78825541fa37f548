"""The processes of one run: device, process group, and collectives."""

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed

from cl_train.errors import ConfigError, RankFault
from cl_train.system.processes import end_with_parent, read_launch

log = logging.getLogger(__name__)
T = TypeVar("T")

GPU_FILE = Path("/dev/nvidia0")
_groups = 0  # process groups that this process has joined
# Parts of gloo's messages.
_LOST = ("gloo", "pair closure", "Connection closed by peer", "Connection reset by peer")


@dataclass(frozen=True)
class Dist:
    rank: int
    world_size: int
    device: torch.device
    hosts: Any = None  # the process group that exchanges flags; None: the only one

    @property
    def is_main(self) -> bool:
        """Rank 0 writes the files and the console."""
        return self.rank == 0


def choose_device(name: str, local_rank: int = 0, *, warn: bool = True) -> torch.device:
    """Returns the device that `device=` names: `cuda` is the GPU of this rank; `auto` is the same,
    or the CPU where torch can use no GPU, with a warning if there is one. Raises ConfigError: there
    is no such GPU.
    """
    if name != "cpu" and torch.cuda.is_available():
        _, is_named, index = name.partition(":")
        device, count = torch.device("cuda", int(index or local_rank)), torch.cuda.device_count()
        if device.index >= count and is_named:
            raise ConfigError(f"device={name}: there are {count} GPUs, the first is cuda:0")
        if device.index >= count:
            advice = f"use --nproc-per-node={count}"
            raise ConfigError(f"device=cuda: no GPU for local rank {local_rank}; {advice}")
        return device
    cuda = torch.version.cuda
    why = f"its driver is too old for CUDA {cuda}, or CUDA_VISIBLE_DEVICES hides it"
    why = why if cuda else "it is a build without CUDA"
    problem = f"torch {torch.__version__} can use no GPU here: {why}"
    if name.startswith("cuda"):
        raise ConfigError(f"device={name}: {problem}; use device=cpu or device=auto")
    if name == "auto" and warn and GPU_FILE.exists():
        log.warning("device=auto uses the CPU: %s", problem)
    return torch.device("cpu")


def as_current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU current in the block, for code that names none: compiled kernels, events,
    libraries.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def processes(device: str) -> Iterator[Dist]:
    """Joins the process group of torchrun, if there is one: NCCL on CUDA, gloo on a CPU.

    Raises ConfigError as `read_launch` and `choose_device`; RankFault: a collective failed.
    """
    launch = read_launch()
    if launch is None:
        chosen = choose_device(device)
        with as_current(chosen):
            yield Dist(0, 1, chosen)
        return
    if ":" in device and launch.world_size > 1:
        raise ConfigError(f"device={device} is one GPU for {launch.world_size} ranks: use cuda")
    end_with_parent(signal.SIGTERM)  # a rank whose launcher was killed saves and ends
    chosen = choose_device(device, launch.local_rank)
    is_cuda = chosen.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(chosen)
    with rank_faults():
        store, rank, world_size = next(torch.distributed.rendezvous("env://"))
        global _groups
        _groups += 1
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
            store=torch.distributed.PrefixStore(_store_prefix(), store),
            rank=rank,
            world_size=world_size,
            device_id=chosen if is_cuda else None,
        )
        group = torch.distributed.group.WORLD
        assert group is not None
        # The hosts exchange flags without waiting for a device.
        hosts = torch.distributed.new_group(backend="gloo") if is_cuda else None
        try:
            yield Dist(rank, world_size, chosen, hosts)
        except BaseException:
            if is_cuda:  # else the end would wait for collectives that a dead rank never joins
                with suppress(RuntimeError):
                    group.abort()
            raise
        finally:
            torch.distributed.destroy_process_group()


@contextmanager
def rank_faults() -> Iterator[None]:
    """Turns the error of a collective in the block into a RankFault."""
    try:
        yield
    except RuntimeError as error:  # gloo's errors have no type of their own
        is_gloos = any(words in str(error) for words in _LOST)
        if not is_gloos and not isinstance(error, torch.distributed.DistError):
            raise
        what = "another rank died or hangs; torchrun names one that died"
        raise RankFault(f"{what} ({str(error).splitlines()[0]})") from error


def _store_prefix() -> str:
    """Returns a prefix that no earlier attempt has used; a node that joins is no restart to
    torchrun.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"attempt-{restarts}-{os.environ['WORLD_SIZE']}-{_groups}"


def sum_over_ranks(values: torch.Tensor, dist: Dist) -> torch.Tensor:
    """Sums `values` in place. The host waits for the device only when it reads them."""
    if dist.world_size > 1:
        torch.distributed.all_reduce(values)
    return values


def max_over_ranks(flags: list[int], dist: Dist) -> list[int]:
    """Returns the maximum of each flag over the ranks, without waiting for a device."""
    if dist.world_size == 1:
        return flags
    maxima = torch.tensor(flags)
    torch.distributed.all_reduce(maxima, op=torch.distributed.ReduceOp.MAX, group=dist.hosts)
    return [int(flag) for flag in maxima.tolist()]


def on_main(work: Callable[[], T], dist: Dist) -> T:
    """Does `work` on rank 0; every rank returns its result or raises its exception, pickled."""
    if dist.world_size == 1:
        return work()
    outcome: list[Any] = [None, None]  # the result, the exception
    if dist.is_main:
        try:
            outcome[0] = work()
        except Exception as error:  # any exception, because the other ranks wait for the result
            outcome[1] = error
    torch.distributed.broadcast_object_list(
        outcome, src=0, group=dist.hosts, device=torch.device("cpu")
    )
    if outcome[1] is not None:
        raise outcome[1]
    return cast(T, outcome[0])


def gather_objects(value: Any, dist: Dist) -> list[Any]:
    """Returns the values of all ranks, in their order, on every rank. They are pickled."""
    values: list[Any] = [value] * dist.world_size
    if dist.world_size > 1:
        torch.distributed.all_gather_object(values, value, group=dist.hosts)
    return values


def check_ranks_agree(facts: dict[str, Any], dist: Dist) -> None:
    """Raises ConfigError on every rank if `facts` differ. DDP's own check fails only on the ranks
    other than 0, and its broadcast permutes weights of another layout (NVIDIA/physicsnemo#1614).
    """
    ranks = gather_objects({name: repr(value) for name, value in facts.items()}, dist)
    for rank, other in enumerate(ranks):
        for name in ranks[0] | other:
            ours, theirs = ranks[0].get(name), other.get(name)
            if ours != theirs:
                what = f"the ranks disagree: {name} is {ours} on rank 0 and {theirs} on rank {rank}"
                advice = "start every node with the same command, code and data"
                raise ConfigError(f"{what}; {advice}")
