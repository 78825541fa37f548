"""The loader of one split: from sample indices to NHWC batches in shared memory, which workers fill in place.

Batch `number` lies in slot `number % slots`: no pixel is pickled or copied between processes. The workers of an
IterableDataset fill rows from their own streams; whole batches are then made from what they found.
"""

import contextlib
import itertools
import math
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from cl_train.config.schema import ConfigError, DataConfig
from cl_train.data.bottleneck import WorkerTimes
from cl_train.data.decode import BadImage
from cl_train.data.device import COPIES_UNDER_WAY, HostBatch
from cl_train.data.image_reader import ImageReader
from cl_train.data.order import SizeSchedule, rank_share
from cl_train.data.source import Indices
from cl_train.data.user_dataset import DatasetReader, StreamEnd, StreamReader
from cl_train.data.workers import BEGUN, SAMPLE, WorkerError, Workers, check_resources, shared
from cl_train.system.distributed import Dist
from cl_train.system.launcher import cores_of_process
from cl_train.system.machine import available_bytes

Reader = ImageReader | DatasetReader  # of the samples of one split; each worker has a copy
_MAX_WORKERS = 16
_MIN_ROWS = 8  # images per task: smaller tasks cost more in messages than the even distribution gains
_SUBSTITUTES = 100  # following samples that are tried instead of a bad one


class BadImageError(RuntimeError):
    """A sample cannot be read (on_bad_image=error), or more than data.max_bad_images cannot (on_bad_image=skip)."""


class BadImages:
    """The bad samples of a run, of both splits.

    Attributes:
        reasons: name -> why it cannot be read, each sample once, in the order in which they were found.
        skipped: how often a sample was replaced or left out, over all epochs.
    """

    def __init__(self, *, skip: bool, limit: int) -> None:
        self._skip, self._limit = skip, limit
        self.reasons: dict[str, str] = {}
        self.skipped = 0

    def add(self, name: str, reason: str, *, skipped: bool) -> None:
        """`skipped`: the sample was read for its own row, not in the place of another one.

        Raises BadImageError unless bad samples are skipped and at most `limit` different ones have been found.
        """
        self.skipped += skipped
        self.reasons[name] = reason
        if not self._skip:
            advice = "Repair or remove it, or use data.on_bad_image=skip"
            raise BadImageError(f"'{name}' cannot be decoded: {reason}. {advice}")
        if len(self.reasons) > self._limit:
            raise BadImageError(
                f"{len(self.reasons)} images cannot be decoded, more than data.max_bad_images={self._limit};"
                f" the last one: '{name}': {reason}"
            )


def first_reasons(reasons: Mapping[str, str]) -> str:
    """The first names of `BadImages.reasons` with their reasons, in one line."""
    first = "; ".join(f"{name} ({reason})" for name, reason in list(reasons.items())[:3])
    return first + " ..." * (len(reasons) > 3)


# --- in the workers ---------------------------------------------------------------------------------------------------


class _Task(NamedTuple):
    """Rows `first_row`, `first_row + 1`, ... of a slot, to be filled with the samples `indices`."""

    iteration: int
    slot: int
    first_row: int
    epoch: int
    image_size: int
    indices: Sequence[int]


@dataclass
class _TaskResult:
    """The result of a task."""

    worker: int
    bad: list[tuple[str, str, bool]] = field(default_factory=list)  # name, reason, whether it was the row's own sample
    empty_rows: list[int] = field(default_factory=list)  # no good sample was found for them
    rows_after_end: list[int] = field(default_factory=list)  # of the worker's stream
    times: WorkerTimes = field(default_factory=WorkerTimes)
    error: str | None = None


class _SharedMemory:
    """`count` batches, stored NHWC, with their targets. Each has room for the largest images.

    Attributes:
        targets: int64 [count, batch size], or float32 [count, batch size, classes].
        iteration: int64 [1]: the number of the iteration that is running; workers skip the tasks of other ones.
        progress: int64 [workers, 3], see `Workers`.
    """

    def __init__(self, count: int, batch_size: int, image_size: int, reader: Reader, workers: int) -> None:
        self._pixels = shared((count, batch_size * image_size**2 * 3), reader.dtype)
        self.targets = shared(
            (count, batch_size, *reader.label_shape), torch.float32 if reader.label_shape else torch.int64
        )
        words = shared((1 + 3 * max(1, workers),), torch.int64).numpy()
        self.iteration, self.progress = words[:1], words[1:].reshape(-1, 3)
        self._pinned: list[Tensor] = []

    def images(self, slot: int, image_size: int) -> Tensor:
        """The slot as images [rows that fit, 3, image_size, image_size] in channels_last."""
        pixels = self._pixels[slot]
        shape = (len(pixels) // (image_size**2 * 3), image_size, image_size, 3)
        return pixels[: math.prod(shape)].view(shape).permute(0, 3, 1, 2)

    def pin(self) -> None:
        """Page-lock the memory, so that copies to the GPU overlap with computation."""
        for memory in () if self._pinned else (self._pixels, self.targets):
            if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
                self._pinned.append(memory)
            else:  # copies still work, only slower; CUDA reports the error again at the next kernel: clear it
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device="cuda")

    def unpin(self) -> None:
        while self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.pop().data_ptr())


def _fill(reader: Reader, memory: _SharedMemory, attempts: int, task: _Task) -> _TaskResult:
    """Read the samples of a task into their rows, in a worker."""
    worker = get_worker_info()
    done = _TaskResult(worker.id if worker else 0)
    reader.times = done.times
    progress, images = memory.progress[done.worker], memory.images(task.slot, task.image_size)
    targets = memory.targets[task.slot].numpy()  # writing a number into a tensor takes ten times as long
    try:
        if memory.iteration[0] != task.iteration:  # the iteration was abandoned
            return done
        indices, count = task.indices, len(reader)
        if isinstance(reader, StreamReader):
            indices, count = reader.begin(task.iteration, task.epoch, len(indices)), sys.maxsize
        for row, index in enumerate(indices, task.first_row):
            if memory.iteration[0] != task.iteration:
                break
            for used in range(index, index + attempts):  # the sample, or the first of the following ones that is good
                used %= count
                progress[SAMPLE] = used
                progress[BEGUN] += 1
                try:
                    targets[row] = reader.read(images[row], used, task.epoch, random_index=index)
                    break
                except BadImage as bad:
                    done.bad.append((reader.name(used), str(bad), used == index % count))
            else:
                done.empty_rows.append(row)
    except StreamEnd:
        if used > index and row > task.first_row:  # the last samples were bad: the one before takes their place
            images[row], targets[row], row = images[row - 1], targets[row - 1], row + 1
        done.rows_after_end = list(range(row, task.first_row + len(indices)))
    except Exception as error:  # a bug, or lack of memory: raised again in the parent
        done.error = f"{type(error).__name__}: {error}"
    return done


# --- in the training process ------------------------------------------------------------------------------------------


class HostLoader:
    """One rank's batches of one split in shared memory, filled by workers that live until `close`.

    Attributes:
        samples: number of samples of all ranks together.
        batch_size: samples of a batch of this rank.
        workers: number of worker processes; 0 = samples are read in this process.
        times: seconds that the workers have spent so far.
        is_stream: the samples are those of an IterableDataset, which controls their order itself.
    """

    def __init__(
        self,
        reader: Reader,
        sizes: SizeSchedule,
        batch_size: int,
        cfg: DataConfig,
        dist: Dist,
        bad_images: BadImages,
        order: Callable[[int], Indices] | None,
    ) -> None:
        """Args:
            sizes: of the images of each epoch.
            batch_size: per rank.
            order: epoch -> the order of the training samples of all ranks, whose last incomplete batch is dropped and
                whose bad samples are replaced by the following ones; None = evaluation: each sample once, bad ones are
                left out.

        Raises ConfigError if the memory, or the limit of open files, is too small.
        """
        self.reader, self._sizes, self.batch_size, self._cfg, self._dist = reader, sizes, batch_size, cfg, dist
        self._bad_images, self._order = bad_images, order
        self.samples, self.workers, self.times = len(reader), worker_count(cfg, dist), WorkerTimes()
        self.is_stream = isinstance(reader, StreamReader)
        rows = 1 if self.is_stream else _MIN_ROWS  # all workers fill each batch of a stream: each has its own samples
        self._parts = max(1, min(batch_size // rows, self.workers))  # tasks of a batch
        in_use = COPIES_UNDER_WAY if dist.device.type == "cuda" else 0  # batches that are read when one is requested
        ahead = cfg.prefetch + COPIES_UNDER_WAY - in_use  # batches that the workers may be filling
        self._queued = max(1, ahead * self._parts // max(1, self.workers))  # tasks of a worker
        self._slot_count = -(-self._queued * self.workers // self._parts) + in_use + 1
        self._memory: _SharedMemory | None = None
        self._workers: Workers[_Task, _TaskResult] | None = None
        self._iterating: tuple[threading.Thread, int] | None = None  # thread and process
        self._lock, self._serial = threading.Lock(), itertools.count(1)
        check_resources(self.workers)
        batches = self._slot_count * batch_size * sizes.image_sizes[-1] ** 2 * 3 * reader.dtype.itemsize
        order_bytes = 0 if self.is_stream else 16 * self.samples
        free = available_bytes(torch.device("cpu"))
        if free is not None and batches + order_bytes > free:  # the size of /dev/shm does not matter
            remedy = f"lower batch_size or data.prefetch={cfg.prefetch}"
            if order_bytes > batches:
                remedy = "is the length of the data set right?"
            raise ConfigError(
                f"the loader's batches need {batches / 2**30:.1f} GiB of memory, the order of {self.samples} samples"
                f" {order_bytes / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free: {remedy}"
            )

    def batch_count(self) -> int:
        batch_size, ranks = self.batch_size, self._dist.world_size
        if self._order is None:
            return -(-len(range(self._dist.rank, self.samples, ranks)) // batch_size)
        return self.samples // (batch_size * ranks)

    def batches(self, epoch: int = 0, first_batch: int = 0) -> Iterator[HostBatch]:
        """Batch `first_batch`, `first_batch + 1`, ... of `epoch`. Ends an earlier iteration that is not exhausted.

        A batch is valid until the next one is requested, on CUDA until the third. Raises BadImageError, WorkerError;
        RuntimeError: another thread is iterating.
        """
        with self._begun() as iteration:
            batches = self._filled(iteration, epoch, 0 if self.is_stream else first_batch)
            if self.is_stream:
                batches = self._evaluated(batches) if self._order is None else self._trained(batches, first_batch)
            for batch in batches:
                yield batch
                if iteration != self._iteration:
                    raise RuntimeError("another iteration over this loader has begun")

    def validation_sample(self, index: int) -> Tensor:
        """Sample `index` as in `batches`, [size, size, 3]. Raises BadImage."""
        size = self._sizes.image_size_at(0)
        sample = torch.empty(size, size, 3, dtype=self.reader.dtype)
        self.reader.read(sample.permute(2, 0, 1), index, epoch=0, random_index=index)
        return sample

    def close(self) -> None:
        """End the workers and free the memory. A later iteration starts new ones."""
        if self._memory is not None:
            self._memory.iteration[0] = 0
        if self._workers is not None:
            self._workers.close()
            self._workers = None
        if self._memory is not None:
            self._memory.unpin()
            self._memory = None

    @contextlib.contextmanager
    def _begun(self) -> Iterator[int]:
        """A new iteration, with its number."""
        mine = threading.current_thread(), os.getpid()
        with self._lock:
            other = self._iterating
            if other not in (None, mine) and other[0].is_alive():
                raise RuntimeError("another thread or process is iterating over this loader: give each one its own")
            self._iterating = mine
        memory, iteration = self._start(), next(self._serial)
        memory.iteration[0] = iteration
        try:
            yield iteration
        finally:
            if iteration == self._iteration:
                self._iterating = None
                memory.iteration[0] = 0  # workers leave what they prepared in advance

    @property
    def _iteration(self) -> int:
        return int(self._memory.iteration[0]) if self._memory is not None else 0

    def _start(self) -> _SharedMemory:
        if self._memory is None:
            largest = self._sizes.image_sizes[-1]
            self._memory = _SharedMemory(self._slot_count, self.batch_size, largest, self.reader, self.workers)
            self._workers = Workers(
                partial(_fill, self.reader, self._memory, _SUBSTITUTES if self._order else 1),
                count=self.workers,
                progress=self._memory.progress,
                timeout_s=self._cfg.worker_timeout_s,
                name_of=self.reader.name,
                queued=self._queued,
            )
        if self._dist.device.type == "cuda":
            self._memory.pin()
        return self._memory

    def _shares(self, epoch: int, first_batch: int) -> Iterator[tuple[int, Indices]]:
        """Number and samples of each of this rank's batches; of an endless stream only their count matters."""
        batch_size, rank, ranks = self.batch_size, self._dist.rank, self._dist.world_size
        if self.is_stream:
            yield from ((number, np.arange(batch_size)) for number in itertools.count())
        if self._order is None:
            indices = np.arange(rank, self.samples, ranks)
            rank, ranks = 0, 1
        else:
            indices = self._order(epoch)
        for number in range(first_batch, self.batch_count()):
            yield number, rank_share(indices, number, batch_size, rank, ranks)

    def _tasks(
        self, iteration: int, epoch: int, first_batch: int, submitted: deque[tuple[int, int, int]]
    ) -> Iterator[_Task]:
        """The tasks of the batches, which are `submitted` as (number, slot, rows)."""
        image_size = self._sizes.image_size_at(epoch)
        for number, indices in self._shares(epoch, first_batch):
            slot, first_row = next(self._serial) % self._slot_count, 0
            submitted.append((number, slot, len(indices)))
            for part in np.array_split(indices, self._parts):
                if iteration != self._iteration:  # the iteration was abandoned
                    return
                yield _Task(iteration, slot, first_row, epoch, image_size, part.tolist())
                first_row += len(part)

    def _filled(self, iteration: int, epoch: int, first_batch: int) -> Iterator[HostBatch]:
        """The batches, without rows for which there is no sample."""
        memory, workers, ended = self._memory, self._workers, set[int]()
        assert memory is not None and workers is not None
        submitted: deque[tuple[int, int, int]] = deque()
        results = workers.results(self._tasks(iteration, epoch, first_batch, submitted))
        while parts := list(itertools.islice(results, self._parts)):
            number, slot, rows = submitted.popleft()
            missing: list[int] = []
            for done in parts:
                self.times.add(done.times)
                if done.error:
                    raise WorkerError(f"a loader worker failed: {done.error}")
                for name, reason, skipped in done.bad:
                    self._bad_images.add(name, reason, skipped=skipped)
                if done.empty_rows and self._order:
                    raise BadImageError(f"{_SUBSTITUTES} images in sequence cannot be decoded")
                if done.rows_after_end:
                    ended.add(done.worker)
                missing += done.empty_rows + done.rows_after_end
            images = memory.images(slot, self._sizes.image_size_at(epoch))[:rows]
            batch = HostBatch(images, memory.targets[slot][:rows], number, epoch)
            yield _without(batch, missing) if missing else batch
            if len(ended) == max(1, self.workers):
                return

    def _trained(self, batches: Iterable[HostBatch], first_batch: int) -> Iterator[HostBatch]:
        """The whole batches of a stream's epoch; those before `first_batch` are read again."""
        count, number = self.batch_count(), 0
        for number, batch in zip(range(1, count + 1), _joined(batches, self.batch_size), strict=False):
            if number > first_batch:
                yield batch._replace(number=number - 1)
        if number < count:
            bad = "".join(f"; {name}: {reason}" for name, reason in list(self._bad_images.reasons.items())[-1:])
            raise WorkerError(
                f"data.dataset ended after {number} of {count} batches of {self.batch_size} samples on rank "
                f"{self._dist.rank}: its length is {self.samples}, of all ranks and workers together{bad}"
            )

    def _evaluated(self, batches: Iterable[HostBatch]) -> Iterator[HostBatch]:
        """All samples of a stream, as many as its length says at most."""
        rows = 0
        for batch in batches:
            rows += len(batch.targets)
            if rows > self.samples:
                raise WorkerError(
                    f"data.dataset: the val dataset yields more than the {self.samples} samples of its length. It must"
                    " end, and divide its samples among ranks and workers (torch.utils.data.get_worker_info)"
                )
            yield batch


def _without(batch: HostBatch, rows: list[int]) -> HostBatch:
    """A copy of the batch without these rows."""
    kept = [row for row in range(len(batch.targets)) if row not in rows]
    return batch._replace(images=batch.images[kept].to(memory_format=torch.channels_last), targets=batch.targets[kept])


def _joined(batches: Iterable[HostBatch], size: int) -> Iterator[HostBatch]:
    """Batches of `size` samples, from incomplete copies too; less than one batch in all is dropped."""
    parts: list[HostBatch] = []
    for batch in batches:
        if len(batch.targets) == size:
            yield batch
            continue
        parts.append(batch)
        if sum(len(part.targets) for part in parts) >= size:
            images = torch.cat([part.images for part in parts])
            targets = torch.cat([part.targets for part in parts])
            yield batch._replace(images=images[:size], targets=targets[:size])
            parts = [batch._replace(images=images[size:], targets=targets[size:])]


def worker_count(cfg: DataConfig, dist: Dist) -> int:
    """`data.workers`; by default the usable cores / ranks of this machine, at most 16 and at least 1."""
    return min(_MAX_WORKERS, cores_of_process(dist.world_size)) if cfg.workers is None else cfg.workers
