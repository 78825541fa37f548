"""The loader of one split: from sample indices to NHWC batches in shared memory.

    order of the epoch -> this rank's share -> batches -> tasks -> workers -> batches

Batch n of an epoch lies in slot n % slots, where workers fill its rows in place: no pixel is
pickled or copied between processes. A batch is divided into tasks of at least 8 rows. Example:
batches of 32 images, 4 workers and data.prefetch=3 make 4 tasks of a batch, and 6 slots:

    on a GPU: 1 requested + 3 prefetched + 2 whose copies to the GPU are under way
    on a CPU: 1 requested + 5 prefetched
"""

import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cl_train.config.schema import AugmentConfig, DataConfig
from cl_train.data.decode import BadImage
from cl_train.data.device import COPIES_UNDER_WAY, RawBatch
from cl_train.data.images import Indices
from cl_train.data.order import SizeSchedule, order_of_rank
from cl_train.data.transforms import ImageReader
from cl_train.data.user_dataset import DatasetReader
from cl_train.data.workers import Workers, shared
from cl_train.errors import BadImageError, ConfigError
from cl_train.system.distributed import Dist
from cl_train.system.machine import available_bytes
from cl_train.system.processes import cores_of_process

Reader = ImageReader | DatasetReader  # of the samples of one split; each worker has a copy
_MAX_WORKERS = 32
_MIN_ROWS = 8  # per task: smaller ones cost more in messages than the even distribution gains
_MAX_TASKS = 512  # submitted at once: their pipe holds about 900
_SUBSTITUTES = 100  # following samples that are tried instead of a bad one


@dataclass(frozen=True)
class DataSettings:
    """What a run wants of its data; `batch_size`: of a rank and micro-step.

    Without `training` no training images are read: those of the validation take their place.
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
        """The batches of this rank; training drops the last one, which is incomplete."""
        if training:
            return sample_count // (self.batch_size * self.dist.world_size)
        return -(-len(range(self.dist.rank, sample_count, self.dist.world_size)) // self.batch_size)


class WorkerTimes(NamedTuple):
    """Seconds that workers spent on each part of loading."""

    read_s: float = 0.0
    decode_s: float = 0.0
    resize_s: float = 0.0
    images: float = 0
    dataset_s: float = 0.0  # in the user's Dataset


@dataclass
class BadImages:
    """The bad samples of both splits: `reasons` by name, each once.

    `skipped` counts how often one was replaced or left out.
    """

    skip: bool
    limit: int
    reasons: dict[str, str] = field(default_factory=dict)
    skipped: int = 0

    def add(self, name: str, reason: str, *, skipped: bool) -> None:
        """Notes a sample; `skipped`: it was read for its own row, not in the place of another.

        Raises BadImageError.
        """
        self.skipped += skipped
        self.reasons[name] = reason
        if not self.skip:
            raise BadImageError(
                f"'{name}' cannot be used: {reason}. Repair or remove it, or use"
                " data.on_bad_image=skip"
            )
        if len(self.reasons) > self.limit:
            raise BadImageError(
                f"{len(self.reasons)} images cannot be used, more than"
                f" data.max_bad_images={self.limit}; the last one: '{name}': {reason}"
            )


class Slots:
    """Memory that the workers share: `pixels` [slots, values of the largest batch] as NHWC,
    `targets` and `indices` of the samples, int64 [slots, rows].
    """

    def __init__(self, reader: Reader, slots: int, rows: int, image_size: int) -> None:
        self.pixels = shared((slots, rows * image_size**2 * 3), reader.dtype)
        self.targets = shared((slots, rows), torch.int64)
        self.indices: Indices = shared((slots, rows), torch.int64).numpy()

    def batch(self, number: int, image_size: int) -> tuple[Tensor, Tensor]:
        """Returns batch `number`: images [rows that fit, 3, image_size, image_size], targets."""
        slot = number % len(self.indices)
        rows = self.pixels.shape[1] // (image_size**2 * 3)
        shape = (rows, image_size, image_size, 3)
        images = self.pixels[slot, : math.prod(shape)].view(shape).permute(0, 3, 1, 2)
        return images, self.targets[slot]


class Task(NamedTuple):
    """Rows `first_row` to `end_row` of batch `number`, which a worker fills."""

    number: int
    epoch: int
    image_size: int
    first_row: int
    end_row: int


class Done(NamedTuple):
    """What a worker reports of a task; pixels and labels are in the slot."""

    number: int  # of the batch
    bad: list[tuple[str, str, bool]]  # name, reason, whether it was the row's own sample
    missing: list[int]  # rows for which there was no good sample


def fill(
    slots: Slots,
    reader: Reader,
    times: npt.NDArray[np.float64],
    attempts: int,
    task: Task,
    worker: int,
    begin: Callable[[int], bool],
) -> Done | None:
    """Reads the samples of a task into their rows; the next good sample replaces a bad one. None:
    the task is no longer wanted.

    `attempts`: samples that are tried for a row; 1: a bad one is left out. `times`: [workers, parts
    of `WorkerTimes`].
    """
    images, labels = slots.batch(task.number, task.image_size)
    targets = labels.numpy()  # writing a number into a tensor takes ten times as long
    indices = slots.indices[task.number % len(slots.indices)]
    reader.times = times[worker]
    done = Done(task.number, [], [])
    for row in range(task.first_row, task.end_row):
        index = int(indices[row])
        for candidate in range(index, index + attempts):
            sample = candidate % len(reader)
            if not begin(sample):
                return None
            try:
                targets[row] = reader.read(images[row], sample, task.epoch, random_index=index)
                break
            except BadImage as bad:
                done.bad.append((reader.name(sample), str(bad), candidate == index))
        else:
            done.missing.append(row)
    return done


class HostLoader:
    """One rank's batches of one split in shared memory, filled by workers that live until `close`.

    `order_of`: an epoch's samples of all ranks; the last incomplete batch is dropped, and bad
    samples are replaced by the following ones. None: each sample once, without bad ones.
    `sample_count`: of all ranks. Raises ConfigError: lack of memory.
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
        self.sample_count = len(reader)
        self.workers = settings.workers
        self._times = shared((max(1, self.workers), len(WorkerTimes())), torch.float64).numpy()

        most_tasks = _MAX_TASKS // (settings.data.prefetch + COPIES_UNDER_WAY + 1)
        self._tasks_per_batch = max(1, min(self.batch_size // _MIN_ROWS, self.workers, most_tasks))
        copied = COPIES_UNDER_WAY if settings.dist.device.type == "cuda" else 0
        busy = -(-self.workers // self._tasks_per_batch)  # batches that give each worker a task
        prepared = max(settings.data.prefetch + COPIES_UNDER_WAY - copied, busy)
        self._ahead = prepared if self.workers else 0  # batches beyond the one that is requested
        self._slot_count = self._ahead + 1 + copied
        self._check_memory()

        self._slots: Slots | None = None
        self._pool: Workers | None = None
        self._iteration: tuple[threading.Thread, object] | None = None  # that has not ended
        self._pinned: list[Tensor] = []

    def batch_count(self) -> int:
        return self._settings.batch_count(self.sample_count, training=self._is_training)

    @property
    def times(self) -> WorkerTimes:
        """Of all workers together."""
        return WorkerTimes(*self._times.sum(0).tolist())

    def batches(self, epoch: int = 0, first_batch: int = 0) -> Iterator[RawBatch]:
        """Yields batch `first_batch`, `first_batch` + 1, ... of `epoch`.

        A batch may be overwritten once the next one is requested; on CUDA once `COPIES_UNDER_WAY`
        more were. Ends an earlier iteration of the same thread. Raises BadImageError, WorkerError;
        RuntimeError: another iteration has begun, or another thread has not ended its own.
        """
        thread = threading.current_thread()
        iteration = thread, object()
        other = self._iteration[0] if self._iteration else thread
        if other is not thread and other.is_alive():
            raise RuntimeError(
                f"{other.name} iterates over this loader: end that iteration, or use a loader per"
                " thread"
            )
        self._iteration = iteration
        try:
            for batch in self._batches(epoch, first_batch):
                yield batch
                if self._iteration is not iteration:
                    raise RuntimeError("another iteration over this loader has begun")
        finally:  # left early, the workers would go on with what is prepared in advance
            if self._iteration is iteration:
                self._iteration = None
                if self._pool is not None:
                    self._pool.skip()

    def _batches(self, epoch: int, first_batch: int) -> Iterator[RawBatch]:
        image_size = self.sizes.image_size_at(epoch)
        indices = self._indices_of(epoch)
        count = self.batch_count()
        workers, slots = self.start()
        self._pin(slots)
        workers.drain()  # what an earlier iteration prepared in advance
        finished: dict[int, list[Done]] = {number: [] for number in range(first_batch, count)}
        submitted = first_batch
        for number in range(first_batch, count):
            while submitted < min(number + self._ahead + 1, count):
                # into memory that is released by now
                share = indices[submitted * self.batch_size : (submitted + 1) * self.batch_size]
                for task in self._tasks(submitted, epoch, share):
                    workers.submit(task)
                submitted += 1
            while len(finished[number]) < self._tasks_per_batch:
                done = workers.result()
                finished[done.number].append(done)
            rows = min(self.batch_size, len(indices) - number * self.batch_size)
            good = self._good_rows(finished.pop(number), rows)
            images, targets = slots.batch(number, image_size)
            # No copy, unless `good` is a list of rows.
            images = images[good].to(memory_format=torch.channels_last)
            yield RawBatch(images, targets[good], number, epoch)

    def start(self) -> tuple[Workers, Slots]:
        """Starts the workers, unless they run."""
        if self._pool is not None and not self._pool.is_running:
            self.close()  # after a failure: new workers, in new memory
        if self._pool is None or self._slots is None:
            largest = self.sizes.largest
            slots = Slots(self.reader, self._slot_count, self.batch_size, largest)
            attempts = _SUBSTITUTES if self._is_training else 1
            work = partial(fill, slots, self.reader, self._times, attempts)
            timeout_s = self._settings.data.worker_timeout_s
            self._pool = Workers(work, self.workers, timeout_s, self.reader.name)
            self._slots = slots
        return self._pool, self._slots

    def close(self) -> None:
        """Ends the workers and frees the memory. A later iteration starts new ones."""
        if self._pool is not None:
            self._pool.close()
        while self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.pop().data_ptr())
        self._pool = self._slots = None

    def _indices_of(self, epoch: int) -> Indices:
        """Returns the indices of this rank's samples in their order."""
        rank, ranks = self._settings.dist.rank, self._settings.dist.world_size
        if self._order_of is None:
            return np.arange(rank, self.sample_count, ranks)
        return order_of_rank(self._order_of(epoch), self.batch_size, rank, ranks)

    def _tasks(self, number: int, epoch: int, share: Indices) -> Iterator[Task]:
        """Writes the samples of batch `number` into its slot; yields the tasks of their rows."""
        assert self._slots is not None
        self._slots.indices[number % self._slot_count, : len(share)] = share
        image_size, parts = self.sizes.image_size_at(epoch), self._tasks_per_batch
        bounds = [len(share) * part // parts for part in range(parts + 1)]
        for first_row, end_row in itertools.pairwise(bounds):
            yield Task(number, epoch, image_size, first_row, end_row)

    def _good_rows(self, done: list[Done], rows: int) -> slice | list[int]:
        """Returns which of a batch's rows hold a sample; a list makes a copy of them.

        Raises BadImageError.
        """
        for name, reason, skipped in itertools.chain(*(task.bad for task in done)):
            self._bad_images.add(name, reason, skipped=skipped)
        missing = {row for task in done for row in task.missing}
        if not missing:
            return slice(rows)
        if self._is_training:
            raise BadImageError(f"{_SUBSTITUTES} images in sequence cannot be used")
        return [row for row in range(rows) if row not in missing]

    def _pin(self, slots: Slots) -> None:
        """Page-locks the slots: copies to the GPU overlap with computation. Only after the fork: a
        driver may withhold registered memory from later children (MADV_DONTFORK), and workers that
        write to it would crash.
        """
        if self._pinned or self._settings.dist.device.type != "cuda":
            return
        for memory in (slots.pixels, slots.targets):
            if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
                self._pinned.append(memory)
                continue
            # Copies still work, only slower. CUDA reports the error again at the next kernel, which
            # clears it.
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
