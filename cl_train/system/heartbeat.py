"""Which rank is silent? A collective that fails says only that some connection broke, and on most ranks not whose.

A thread of each rank counts up in the store that the ranks met in. A killed or stopped process does not; a rank that
waits in a collective does, as waiting releases the interpreter's lock.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed

from cl_train.system.distributed import Dist

BEAT_S = 0.5
LISTEN_S = 3.0


class RankFault(RuntimeError):
    """Another rank died or hangs; the message names it where that can be known."""


@contextmanager
def watch_ranks(dist: Dist) -> Iterator[None]:
    """Beat in the background, and turn a failed collective into a `RankFault` that names the silent rank."""
    if dist.world_size == 1:
        yield
        return
    store = own_store()
    stop = threading.Event()
    thread = threading.Thread(target=beat, args=(store, dist.rank, stop), name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        raise RankFault(f"{name_silent(dist)} ({str(error).splitlines()[0]})") from error
    finally:
        stop.set()
        thread.join(2 * BEAT_S)


def own_store() -> torch.distributed.Store:
    """A connection of its own to the ranks' store: one that waits would hold up another's calls."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=LISTEN_S)
    store = torch.distributed.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
    return torch.distributed.PrefixStore(f"heartbeat-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def beat(store: torch.distributed.Store, rank: int, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            store.add(str(rank), 1)
        except RuntimeError:  # the process that holds the store is gone; the next collective says so
            return
        stop.wait(BEAT_S)


def is_lost_connection(error: RuntimeError) -> bool:
    """An error of a collective, not of this rank's own work: gloo raises plain RuntimeErrors that name their source."""
    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error)


def name_silent(dist: Dist) -> str:
    """Listen for a few seconds: `rank 1 is dead or hangs`, or what else is known."""
    heard: list[list[int]] = []
    # In a thread, because a stopped process keeps its connections open and a question to it would wait for ever.
    listener = threading.Thread(target=listen, args=(dist.world_size, heard), daemon=True)
    listener.start()
    listener.join(LISTEN_S + 3.0)
    if len(heard) < 2:  # without torchrun it is rank 0 that holds the store
        return "rank 0 is dead or hangs" if dist.rank else "the ranks' store does not answer"
    before, after = heard
    silent = [f"rank {rank}" for rank in range(dist.world_size) if after[rank] == before[rank]]
    if not silent:
        return "a rank hangs at its own work, though its process is alive"
    return f"{', '.join(silent)} {'is dead or hangs' if len(silent) == 1 else 'are dead or hang'}"


def listen(world_size: int, heard: list[list[int]]) -> None:
    try:
        store = own_store()
        heard.append(counts(store, world_size))
        time.sleep(LISTEN_S)
        heard.append(counts(store, world_size))
    except RuntimeError:
        return


def counts(store: torch.distributed.Store, world_size: int) -> list[int]:
    return [store.add(str(rank), 0) for rank in range(world_size)]
