"""Process many files in several processes, which end with their parent even if it is killed."""

import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

import torch
from tqdm import tqdm

from cl_train.system.child_process import end_with_parent

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_processes(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    workers: int | None,
    *,
    description: str,
    unit: str = "file",
) -> Iterator[Result]:
    """`function` of each item, in order, in `workers` forked processes (None: as many as cores), with a progress bar.

    With one worker, or one item, it runs in this process. `function` must be picklable: of a module, or a `partial` of
    one. Raises RuntimeError with the first item without a result if a process died, as for lack of memory.
    """
    count, fork = min(workers or len(os.sched_getaffinity(0)), len(items)), multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(count, fork, initializer=_start_worker) if count > 1 else None
    chunk = min(32, 1 + len(items) // (100 * max(1, count)))  # many small items are sent to a process at once
    seconds = 0.1 if sys.stderr.isatty() else 30.0
    bar = tqdm(desc=description, total=len(items), unit=unit, mininterval=seconds)
    done = 0
    with bar, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork of a threaded process; the workers start no threads
        try:
            for result in pool.map(function, items, chunksize=chunk) if pool else map(function, items):
                yield result
                bar.update()
                done += 1
        except BrokenProcessPool:
            advice = "; if memory is short, use fewer workers"
            raise RuntimeError(f"{description}: a worker died at {str(items[done])[:200]} or later{advice}") from None
        finally:
            if pool:
                pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent ends the workers
    torch.set_num_threads(1)
