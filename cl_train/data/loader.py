"""The loader of one split: from sample indices to NHWC batches in shared memory.

    order of the epoch -> this rank's share -> requests -> workers -> batches

Batch n of an epoch lies in slot n % slots, where workers fill its rows in place: no pixel is
pickled or copied between processes. It is requested in parts of at least 8 rows; a worker that has
filled one gets the next one, so a slow worker gets fewer. Example: batches of 32 images, 4 workers
and data.prefetch=3 make 4 parts of a batch, and

    on a GPU 5 slots: 1 requested + 3 prefetched + 1 whose copy to the GPU is under way
    on a CPU 6 slots: 1 requested + 5 prefetched
"""

import contextlib
import itertools
import logging
import math
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from cl_train.config.schema import AugmentConfig, DataConfig
from cl_train.data.bad_images import BadImages
from cl_train.data.decode import BadImage
from cl_train.data.device import COPIES_UNDER_WAY, RawBatch
from cl_train.data.images import Indices
from cl_train.data.order import SizeSchedule, order_of_rank
from cl_train.data.transforms import Reader, WorkerTimes
from cl_train.data.workers import Workers, begin_sample, is_ending, shared
from cl_train.errors import BadImageError, ConfigError, WorkerError
from cl_train.system.distributed import Dist
from cl_train.system.machine import available_bytes
from cl_train.system.processes import cores_of_process

log = logging.getLogger(__name__)
_NICE = 5  # of workers beside a GPU, so that the thread that launches kernels never waits for one
_MORE_ON_CPU = 2  # more batches are prefetched on a CPU, where none is kept until it is copied
_MAX_WORKERS = 32
_MIN_ROWS = 8  # of a part: smaller parts cost more in messages than their even distribution gains
_SLOT_POLL_S = 0.002  # how often a worker looks for a free slot if it is ahead by all slots
_SUBSTITUTES = 100  # following samples that are tried instead of a bad one


@dataclass(frozen=True)
class DataSettings:
    """What a run wants of its data. `batch_size` is the number of images of a rank and micro-step.

    Without `training` no training images are read: the validation images take their place.
    """

    data: DataConfig
    augment: AugmentConfig
    batch_size: int
    seed: int
    dist: Dist
    accumulate_steps: int = 1
    training: bool = True

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.dist.world_size * self.accumulate_steps

    @property
    def workers(self) -> int:
        """The loader processes of each split on this rank."""
        if self.data.workers is not None:
            return self.data.workers
        return min(_MAX_WORKERS, cores_of_process(self.dist.world_size))

    def batch_count(self, sample_count: int, *, training: bool) -> int:
        """Returns the number of this rank's batches; training drops the last, incomplete one."""
        if training:
            return sample_count // (self.batch_size * self.dist.world_size)
        return -(-len(range(self.dist.rank, sample_count, self.dist.world_size)) // self.batch_size)


class BatchRequest(NamedTuple):
    """Asks a worker to fill batch `number`, from row `first_row` on, with samples `indices`."""

    iteration: int
    epoch: int
    image_size: int
    number: int
    first_row: int
    indices: Indices


_NO_BATCH, _NO_INDICES = sys.maxsize, np.empty(0, np.int64)  # in a request for nothing


class Filled(NamedTuple):
    """A worker's answer to a request; the pixels and labels are in the slot."""

    number: int  # of the batch
    first_row: int
    bad: list[tuple[str, str, bool]]  # name, reason, whether it was the row's own sample
    missing: list[int]  # rows for which there was no good sample
    times: WorkerTimes = WorkerTimes()
    error: str = ""


class SlotDataset(Dataset[Any]):
    """The memory of the batches, which the workers share: `pixels` [slots, values of the largest
    batch] as NHWC, and `targets` [slots, rows].

    torch's DataLoader takes the items of its batch sampler, here `BatchRequest`s, and calls
    `__getitems__` with each in a worker. That fills the requested rows in place and returns only a
    `Filled`, which DataLoader hands out as soon as it is there.

    `running` holds the number of the iteration (0: none) and the number of its first batch that
    must wait, because its slot still holds an earlier batch. `attempts` is the number of samples
    that are tried for a row; with 1 a bad one is left out.
    """

    def __init__(
        self, reader: Reader, slots: int, rows: int, image_size: int, attempts: int
    ) -> None:
        self.pixels = shared((slots, rows * image_size**2 * 3), reader.dtype)
        self.targets = shared((slots, rows), torch.int64)
        self.running = shared((2,), torch.int64).numpy()
        self._reader, self._attempts = reader, attempts

    def batch(self, number: int, image_size: int) -> tuple[Tensor, Tensor]:
        """Returns batch `number`: images [rows that fit, 3, image_size, image_size] and targets."""
        slot = number % len(self.pixels)
        rows = self.pixels.shape[1] // (image_size**2 * 3)
        shape = (rows, image_size, image_size, 3)
        images = self.pixels[slot, : math.prod(shape)].view(shape).permute(0, 3, 1, 2)
        return images, self.targets[slot]

    def _may_write(self, request: BatchRequest) -> bool:
        """Returns whether the slot is free. A request of an iteration that was left need not wait:
        see `_end_requests`.
        """
        iteration, end = self.running
        return bool(request.iteration != iteration or request.number < end)

    def __getitems__(self, request: BatchRequest) -> Filled:
        images, labels = self.batch(request.number, request.image_size)
        targets = labels.numpy()  # writing a number into a tensor takes ten times as long
        while not (self._may_write(request) or is_ending()):
            time.sleep(_SLOT_POLL_S)
        bad, missing, times = list[tuple[str, str, bool]](), list[int](), WorkerTimes()
        try:
            for row, index in enumerate(request.indices.tolist(), request.first_row):
                for candidate in range(index, index + self._attempts):
                    sample = candidate % len(self._reader)
                    begin_sample(sample)
                    try:
                        targets[row], of_sample = self._reader.read(
                            images[row], sample, request.epoch, random_index=index
                        )
                    except BadImage as error:
                        bad.append((self._reader.name(sample), str(error), candidate == index))
                    else:
                        times = times.plus(of_sample)
                        break
                else:
                    missing.append(row)
        except Exception as error:  # a bug or lack of memory; the exception may not be picklable
            bad, missing, message = [], [], f"{type(error).__name__}: {error}"
            return Filled(request.number, request.first_row, bad, missing, error=message)
        return Filled(request.number, request.first_row, bad, missing, times)


class _Requests:
    """The batch sampler. It never ends, so that workers live on between epochs: without `pending`
    requests it yields requests for nothing, which a worker answers once the iteration is over.
    """

    def __init__(self) -> None:
        self.iteration = 1
        self.pending: Iterator[BatchRequest] = iter(())
        self.under_way = 0  # requests for samples that no worker has answered yet

    def __iter__(self) -> Iterator[BatchRequest]:
        while True:
            request = next(self.pending, None)
            self.under_way += request is not None
            yield request or BatchRequest(self.iteration, 0, 1, _NO_BATCH, 0, _NO_INDICES)


class HostLoader:
    """One rank's batches of one split in shared memory, filled by workers that live until `close`.

    `order_of` returns an epoch's samples of all ranks: the last incomplete batch is dropped, and
    bad samples are replaced by the following ones. None: each sample comes once, without bad ones.
    `sample_count` is that of all ranks. Raises ConfigError: lack of memory.
    """

    def __init__(
        self,
        reader: Reader,
        sizes: SizeSchedule,
        settings: DataSettings,
        bad_images: BadImages,
        order_of: Callable[[int], Indices] | None,
    ) -> None:
        self.reader, self.sizes, self.batch_size = reader, sizes, settings.batch_size
        self._settings, self._bad_images, self._order_of = settings, bad_images, order_of
        self._is_training = order_of is not None
        self.sample_count, self.workers = len(reader), settings.workers
        self.times = WorkerTimes()  # of all workers together
        self._copied = COPIES_UNDER_WAY if settings.dist.device.type == "cuda" else 0
        self._parts = max(1, min(self.batch_size // _MIN_ROWS, self.workers))  # of a batch
        more = 0 if self._copied else _MORE_ON_CPU
        prepared = (settings.data.prefetch + more) * self._parts
        self._parts_per_worker = -(-prepared // max(1, self.workers))
        # torch sends the next request just before it returns an item: so many are always under way
        parts_ahead = self._parts_per_worker * self.workers
        self._slot_count = -(-parts_ahead // self._parts) + 1 + self._copied
        self._check_memory()
        self._requests = _Requests()
        self._filled = defaultdict[int, list[Filled]](list)  # parts of each batch
        self._slots: SlotDataset | None = None
        self._pool: Workers | None = None
        self._thread: threading.Thread | None = None  # the one that iterates
        self._pinned: list[Tensor] = []

    def batch_count(self) -> int:
        return self._settings.batch_count(self.sample_count, training=self._is_training)

    def batches(self, epoch: int = 0, first_batch: int = 0) -> Iterator[RawBatch]:
        """Yields batch `first_batch`, `first_batch` + 1, ... of `epoch`.

        A batch may be overwritten once the next one is requested; on CUDA it stays for
        `COPIES_UNDER_WAY` more requests. The call ends an earlier iteration of the same thread.
        Raises BadImageError, WorkerError; RuntimeError: another iteration has begun, or another
        thread has not ended its own.
        """
        thread, other = threading.current_thread(), self._thread
        if other and other is not thread and other.is_alive():
            raise RuntimeError(
                f"{other.name} iterates over this loader: end that iteration, or use a loader per"
                " thread"
            )
        workers, slots = self.start()
        self._pin(slots)
        image_size, indices = self.sizes.image_size_at(epoch), self._indices_of(epoch)
        numbers = range(first_batch, self.batch_count())
        self._thread = thread
        self._end_requests(workers, slots)
        whole = BatchRequest(self._requests.iteration, epoch, image_size, 0, 0, indices)
        requests = _parts_of(whole, numbers, self.batch_size, self._parts)
        self._requests.pending = requests
        try:
            for number in numbers:
                workers.check()  # the others would fill the batch, and hide that one died
                free = number + self._slot_count - self._copied
                slots.running[:] = self._requests.iteration, free
                filled = self._filled_parts(number, workers)
                rows = min(self.batch_size, len(indices) - number * self.batch_size)
                good = self._good_rows(filled, rows)
                images, targets = slots.batch(number, image_size)
                # No copy, unless `good` is a list of rows.
                images = images[good].to(memory_format=torch.channels_last)
                yield RawBatch(images, targets[good], number, epoch)
                if self._requests.pending is not requests:
                    raise RuntimeError("another iteration has begun, or the loader was closed")
        finally:
            if self._requests.pending is requests:
                self._thread = None
                slots.running[0] = 0

    def _filled_parts(self, number: int, workers: Workers) -> list[Filled]:
        """Returns the parts of batch `number` in the order of their rows."""
        while len(self._filled[number]) < self._parts:
            part: Filled = workers.next()
            if part.number != _NO_BATCH:
                self._requests.under_way -= 1
                self._filled[part.number].append(part)
        return sorted(self._filled.pop(number), key=lambda part: part.first_row)

    def _end_requests(self, workers: Workers, slots: SlotDataset) -> None:
        """Waits until nothing more is written into the slots for an iteration that was left."""
        self._requests.pending = iter(())
        slots.running[0] = 0
        while self._requests.under_way:
            self._requests.under_way -= workers.next().number != _NO_BATCH
        self._filled.clear()
        self._requests.iteration += 1

    def start(self) -> tuple[Workers, SlotDataset]:
        """Starts the workers, unless they run."""
        if self._pool is None or self._slots is None or not self._pool.is_running:
            self.close()  # after a failure: new workers, in new memory
            attempts = _SUBSTITUTES if self._is_training else 1
            shape = self._slot_count, self.batch_size, self.sizes.largest
            self._slots, self._requests = SlotDataset(self.reader, *shape, attempts), _Requests()
            self._pool = Workers(
                self._slots,
                self.workers,
                self.reader.name,
                self._settings.data.worker_timeout_s,
                nice=_NICE if self._settings.dist.device.type == "cuda" else 0,
                batch_sampler=self._requests,
                prefetch_factor=self._parts_per_worker if self.workers else None,
                in_order=False,  # a part goes to the worker that is free
            )
        return self._pool, self._slots

    def close(self) -> None:
        """Ends the workers and frees the memory. A later iteration starts new ones."""
        if self._pool is not None:
            self._pool.close()
        while self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.pop().data_ptr())
        self._pool = self._slots = None
        self._requests.pending = iter(())

    def _indices_of(self, epoch: int) -> Indices:
        """Returns the indices of this rank's samples in their order."""
        rank, ranks = self._settings.dist.rank, self._settings.dist.world_size
        if self._order_of is None:
            return np.arange(rank, self.sample_count, ranks)
        return order_of_rank(self._order_of(epoch), self.batch_size, rank, ranks)

    def _good_rows(self, filled: list[Filled], rows: int) -> slice | list[int]:
        """Returns which of a batch's rows hold a sample; a list makes a copy of them.

        Raises BadImageError, WorkerError.
        """
        if error := next((part.error for part in filled if part.error), ""):
            self.close()
            raise WorkerError(f"a loader worker failed: {error}")
        for name, reason, skipped in itertools.chain(*(part.bad for part in filled)):
            self._bad_images.add(name, reason, skipped=skipped)
        self.times = reduce(WorkerTimes.plus, (part.times for part in filled), self.times)
        missing = {row for part in filled for row in part.missing}
        if not missing:
            return slice(rows)
        if self._is_training:
            raise BadImageError(f"{_SUBSTITUTES} images in sequence cannot be used")
        return [row for row in range(rows) if row not in missing]

    def _pin(self, slots: SlotDataset) -> None:
        """Page-locks the slots, so that copies to the GPU overlap with computation. It must follow
        the fork: a driver may withhold registered memory from later children (MADV_DONTFORK), and
        workers that write to it would crash.
        """
        if self._pinned or self._settings.dist.device.type != "cuda":
            return
        for memory in (slots.pixels, slots.targets):
            if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
                self._pinned.append(memory)
                continue
            log.warning("the loader's memory cannot be page-locked: copies to the GPU are slower")
            # CUDA reports the error again at the next kernel, which clears it.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self._settings.dist.device)

    def _check_memory(self) -> None:
        pixels = self._slot_count * self.batch_size * self.sizes.largest**2 * 3
        needed_gib = (pixels * self.reader.dtype.itemsize + 16 * self.sample_count) / 2**30
        free = available_bytes(torch.device("cpu"))  # the size of /dev/shm does not matter
        if free is not None and needed_gib > free / 2**30:
            raise ConfigError(
                f"the loader's batches and the order of {self.sample_count} samples need"
                f" {needed_gib:.1f} GiB of memory, and {free / 2**30:.1f} GiB are free: lower"
                f" batch_size or data.prefetch={self._settings.data.prefetch}"
            )


def _parts_of(
    whole: BatchRequest, numbers: range, batch_size: int, parts: int
) -> Iterator[BatchRequest]:
    """Yields `parts` requests for each batch in `numbers`; `whole` requests the whole epoch."""
    for number in numbers:
        share = whole.indices[number * batch_size : (number + 1) * batch_size]
        bounds = [len(share) * part // parts for part in range(parts + 1)]
        for first_row, end_row in itertools.pairwise(bounds):
            rows = share[first_row:end_row]
            yield BatchRequest(*whole[:3], number, first_row, rows)
