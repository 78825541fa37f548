"""The loader of one split: sample indices in, NHWC batches in shared memory out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from cl_train.config.schema import ConfigError
from cl_train.data.bad_images import BadImageError, BadImages
from cl_train.data.decode import BadImage
from cl_train.data.device import HostBatch
from cl_train.data.image_reader import WorkerTimes
from cl_train.data.order import rank_share, repeated
from cl_train.data.size_schedule import SizeSchedule
from cl_train.data.slots import Slots, slot_bytes
from cl_train.data.source import Indices
from cl_train.data.workers import WorkerError, Workers
from cl_train.system.memory import available_bytes

_LEAST_ROWS = 8  # images per task: smaller tasks cost more in messages than the even distribution gains
_HELD = 2  # batches that the consumer holds at once: one being copied, one used by the step
_SUBSTITUTES = 100  # following samples that are tried instead of a bad one


class SampleReader(Protocol):
    """Reads samples of one split into rows of a batch, uint8 or (already normalised) float32. Workers have copies."""

    dtype: torch.dtype
    times: WorkerTimes  # what `read` spent; set by the loader

    def __len__(self) -> int: ...

    def name(self, index: int) -> str: ...

    def read(self, row: Tensor, index: int, epoch: int, random_index: int) -> int:
        """Write sample `index` into `row` [3, size, size], with the random numbers of `random_index`; return its label.

        Raises BadImage.
        """
        ...


class Loader(Protocol):
    """One rank's batches of one split in host memory."""

    samples: int  # of all ranks
    times: WorkerTimes

    def batch_count(self, epoch: int = 0) -> int: ...
    def batches(self, epoch: int = 0, first_batch: int = 0) -> Iterator[HostBatch]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class LoaderSettings:
    sizes: SizeSchedule  # of images and batches
    workers: int
    prefetch: int = 3  # batches that the workers together prepare in advance
    worker_timeout_s: float = 60.0
    pin_memory: bool = False
    rank: int = 0
    world_size: int = 1
    repeats: int = 1  # repeated augmentation: copies of a training image in a global batch


class _Task(NamedTuple):
    """Rows `first_row`, `first_row + 1`, ... of a slot, to be filled with `indices`."""

    stream: int
    slot: int
    first_row: int
    epoch: int
    image_size: int
    indices: tuple[int, ...]


@dataclass
class _Done:
    bad: list[tuple[str, str]] = field(default_factory=list)  # name, reason
    empty_rows: list[int] = field(default_factory=list)
    times: WorkerTimes = field(default_factory=WorkerTimes)
    error: str | None = None


class _Filler:
    """The function that workers run: reads the samples of a task into their rows."""

    def __init__(self, reader: SampleReader, slots: Slots, attempts: int) -> None:
        self._reader, self._slots, self._attempts = reader, slots, attempts

    def __call__(self, task: _Task) -> _Done:
        done = _Done()
        self._reader.times = done.times
        worker = get_worker_info()
        progress = self._slots.progress[worker.id if worker else 0]
        images = self._slots.images(task.slot, task.image_size)
        targets = self._slots.targets[task.slot].numpy()  # writing a number into a tensor takes ten times as long
        try:
            for row, index in enumerate(task.indices, task.first_row):
                if self._slots.stream[0] != task.stream:  # the iteration was abandoned
                    break
                label = self._read(images[row], index, task.epoch, progress, done)
                if label is None:
                    done.empty_rows.append(row)
                else:
                    targets[row] = label
        except Exception as error:  # a bug, or lack of memory: raised again in the parent
            done.error = f"{type(error).__name__}: {error}"
        return done

    def _read(self, row: Tensor, index: int, epoch: int, progress: Indices, done: _Done) -> int | None:
        """Write sample `index`, or the first of the following ones that can be read, into `row`; return its label."""
        for used in range(index, index + self._attempts):
            used %= len(self._reader)
            progress[1] = used
            progress[0] += 1
            try:
                return self._reader.read(row, used, epoch, random_index=index)
            except BadImage as bad:
                done.bad.append((self._reader.name(used), str(bad)))
        return None


@dataclass(frozen=True)
class _Batch:
    """A batch that workers are filling."""

    stream: int
    slot: int
    number: int
    size: int  # images
    image_size: int
    tasks: int


class HostLoader:
    """One rank's batches of one split in shared memory, filled by workers that live until `close`."""

    def __init__(
        self,
        reader: SampleReader,
        settings: LoaderSettings,
        bad_images: BadImages,
        order: Callable[[int], Indices] | None,
    ) -> None:
        """`order`: epoch -> the order of the training samples, whose last incomplete batch is dropped and whose bad
        samples are replaced by the following ones; None = evaluation: each sample once, bad ones are left out.

        Raises ConfigError if the memory is too small.
        """
        self.reader, self._settings, self._bad_images, self._order = reader, settings, bad_images, order
        self.samples, self.times = len(reader), WorkerTimes()
        self._slot_count = settings.prefetch + _HELD + 1
        self._slots: Slots | None = None
        self._workers: Workers[_Task, _Done] | None = None
        self._free: deque[int] = deque()
        self._submitted: deque[_Batch] = deque()
        need = self._slot_count * slot_bytes(settings.sizes, reader.dtype)
        free = available_bytes(torch.device("cpu"))
        if free is not None and need > free:  # the size of /dev/shm does not matter
            raise ConfigError(
                f"the loader's batches need {need / 2**30:.1f} GiB of shared memory, and {free / 2**30:.1f} GiB are"
                f" free: lower batch_size or data.prefetch={settings.prefetch}"
            )

    def batch_count(self, epoch: int = 0) -> int:
        s = self._settings
        batch_size = s.sizes.batch_size_at(epoch)
        if self._order is None:
            return -(-len(range(s.rank, self.samples, s.world_size)) // batch_size)
        return self.samples // (batch_size * s.world_size)

    def batches(self, epoch: int = 0, first_batch: int = 0) -> Iterator[HostBatch]:
        """Batch `first_batch`, `first_batch + 1`, ... of `epoch`. Ends an earlier iteration that is not exhausted.

        Raises BadImageError, WorkerError.
        """
        slots, workers = self._start()
        slots.stream[0] += 1
        stream = int(slots.stream[0])
        shares = enumerate(self._shares(epoch, first_batch), first_batch)
        while True:
            while self._free and (share := next(shares, None)) is not None:
                self._submit(workers, stream, epoch, *share)
            if not self._submitted:
                assert self._free, "the consumer has released no batch"
                return
            batch = self._submitted.popleft()
            empty_rows = self._wait_for(workers, batch, wanted=batch.stream == stream)
            if batch.stream != stream:
                self._free.append(batch.slot)
                continue
            yield self._host_batch(slots, batch, empty_rows)
            assert stream == slots.stream[0], "another iteration over this loader has begun"

    def validation_sample(self, index: int) -> Tensor:
        """Sample `index` as in `batches`, [size, size, 3]. Raises BadImage."""
        size = self._settings.sizes.image_size_at(0)
        sample = torch.empty(size, size, 3, dtype=self.reader.dtype)
        self.reader.read(sample.permute(2, 0, 1), index, epoch=0, random_index=index)
        return sample

    def close(self) -> None:
        """End the workers and free the memory. A later iteration starts new ones."""
        self._stop_workers()
        if self._slots is not None:
            self._slots.unpin()
            self._slots = None

    def _shares(self, epoch: int, first_batch: int) -> Iterator[Indices]:
        """The samples of each of this rank's batches."""
        s = self._settings
        batch_size = s.sizes.batch_size_at(epoch)
        if self._order is None:
            mine = np.arange(s.rank, self.samples, s.world_size)
        else:
            mine = repeated(self._order(epoch), s.repeats, batch_size * s.world_size)
        for number in range(first_batch, self.batch_count(epoch)):
            if self._order is None:
                yield mine[number * batch_size : (number + 1) * batch_size]
            else:
                yield rank_share(mine, number, batch_size, s.rank, s.world_size)

    def _start(self) -> tuple[Slots, Workers[_Task, _Done]]:
        s = self._settings
        if self._slots is None:
            self._slots = Slots(self._slot_count, s.sizes, self.reader.dtype, s.workers)
            self._free = deque(range(self._slot_count))
        if self._workers is None:
            batch_size = s.sizes.batch_size_of(s.sizes.image_sizes[0])  # the largest
            tasks = self._slot_count * -(-batch_size // self._rows_per_task(batch_size))
            self._workers = Workers(
                _Filler(self.reader, self._slots, _SUBSTITUTES if self._order else 1),
                count=s.workers,
                queued=max(2, -(-tasks // max(1, s.workers))),  # all: a long task of one worker stops no other one
                progress=self._slots.progress,
                timeout_s=s.worker_timeout_s,
                name_of=self.reader.name,
            )
        if s.pin_memory:
            self._slots.pin()
        return self._slots, self._workers

    def _stop_workers(self) -> None:
        if self._slots is not None:
            self._slots.stream[0] += 1
        if self._workers is not None:
            self._workers.close()
            self._workers = None
        self._free += [batch.slot for batch in self._submitted]
        self._submitted.clear()

    def _rows_per_task(self, batch_size: int) -> int:
        return max(_LEAST_ROWS, -(-batch_size // max(1, self._settings.workers)))

    def _submit(self, workers: Workers[_Task, _Done], stream: int, epoch: int, number: int, indices: Indices) -> None:
        slot, size, image_size = self._free.popleft(), len(indices), self._settings.sizes.image_size_at(epoch)
        rows = self._rows_per_task(size)
        firsts = range(0, size, rows)
        for first in firsts:
            part = tuple(indices[first : first + rows].tolist())
            workers.submit(_Task(stream, slot, first, epoch, image_size, part))
        self._submitted.append(_Batch(stream, slot, number, size, image_size, len(firsts)))

    def _wait_for(self, workers: Workers[_Task, _Done], batch: _Batch, *, wanted: bool) -> list[int]:
        """Wait until the workers have finished the batch; return its empty rows."""
        empty_rows: list[int] = []
        try:
            for _ in range(batch.tasks):
                done = workers.next_result()
                self.times.add(done.times)
                if done.error:
                    raise WorkerError(f"a loader worker failed: {done.error}")
                for name, reason in done.bad if wanted else ():
                    self._bad_images.add(name, reason)
                empty_rows += done.empty_rows
            if wanted and empty_rows and self._order:
                raise BadImageError(f"{_SUBSTITUTES} images in sequence cannot be decoded")
        except BaseException:  # results would no longer match their batches
            self._free.append(batch.slot)
            self._stop_workers()
            raise
        return empty_rows

    def _host_batch(self, slots: Slots, batch: _Batch, empty_rows: list[int]) -> HostBatch:
        images = slots.images(batch.slot, batch.image_size)[: batch.size]
        targets = slots.targets[batch.slot][: batch.size]
        if empty_rows:
            kept = [row for row in range(batch.size) if row not in empty_rows]
            images, targets = images[kept].to(memory_format=torch.channels_last), targets[kept]
        free = self._free
        return HostBatch(images, targets, batch.number, lambda: free.append(batch.slot))
