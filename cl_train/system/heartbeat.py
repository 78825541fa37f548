"""Detect which rank died or hangs. The error of a failed collective says only that a connection broke.

A thread of every rank increments a counter in the ranks' rendezvous store. The counter of a killed or stopped process
no longer changes; that of a rank that waits in a collective does, because waiting releases the interpreter lock.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed

from cl_train.system.distributed import Dist, store_prefix

BEAT_S = 0.5
LISTEN_S = 3.0
ANSWER_S = 3.0  # the ranks' store may take this long to respond
_LOST = ("gloo", "pair closure", "Connection closed by peer", "Connection reset by peer")  # gloo's messages


class RankFault(RuntimeError):
    """Another rank died or hangs; the message names it if it is known."""


@contextmanager
def watch_ranks(dist: Dist) -> Iterator[None]:
    """Send heartbeats in the background, and raise a `RankFault` that names the missing rank if a collective fails."""
    if dist.world_size == 1:
        yield
        return
    store = connect_to_store()
    stop = threading.Event()
    thread = threading.Thread(target=beat, args=(store, dist.rank, stop), name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        raise RankFault(f"{find_silent_ranks(dist)} ({str(error).splitlines()[0]})") from error
    finally:
        stop.set()
        thread.join(2 * BEAT_S)


def connect_to_store() -> torch.distributed.Store:
    """A separate connection to the ranks' store, because a call that waits blocks the others on its connection."""
    address, timeout = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timedelta(seconds=LISTEN_S)
    store = torch.distributed.TCPStore(*address, is_master=False, timeout=timeout, wait_for_workers=False)
    return torch.distributed.PrefixStore(store_prefix("heartbeat"), store)


def beat(store: torch.distributed.Store, rank: int, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            store.add(str(rank), 1)
        except RuntimeError:  # the process that holds the store has ended; the next collective fails
            return
        stop.wait(BEAT_S)


def is_lost_connection(error: RuntimeError) -> bool:
    """Whether a collective failed, rather than this rank's own work; gloo raises plain RuntimeErrors."""
    return isinstance(error, torch.distributed.DistError) or any(words in str(error) for words in _LOST)


def find_silent_ranks(dist: Dist) -> str:
    """Compare the counters over a few seconds; returns for example `rank 1 is dead or hangs`."""
    readings: list[list[int]] = []
    # In a thread, because a stopped process never responds.
    reader = threading.Thread(target=read_counters, args=(dist.world_size, readings), daemon=True)
    reader.start()
    reader.join(LISTEN_S + ANSWER_S)
    if len(readings) < 2:  # without torchrun, rank 0 holds the store
        return "rank 0 is dead or hangs" if dist.rank else "the ranks' store does not respond"
    before, after = readings
    others = (rank for rank in range(dist.world_size) if rank != dist.rank)
    silent = [f"rank {rank}" for rank in others if after[rank] == before[rank]]
    if not silent:
        return "a rank hangs although its process is alive"
    return f"{', '.join(silent)} {'is dead or hangs' if len(silent) == 1 else 'are dead or hang'}"


def read_counters(world_size: int, readings: list[list[int]]) -> None:
    """Append the counters of all ranks to `readings` twice, `LISTEN_S` apart."""
    try:
        store = connect_to_store()
        for pause_s in (LISTEN_S, 0.0):
            readings.append([store.add(str(rank), 0) for rank in range(world_size)])
            time.sleep(pause_s)
    except RuntimeError:
        return
