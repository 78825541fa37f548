"""The loader of one split, from sample indices to NHWC batches in shared memory; another one for IterableDatasets."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from cl_train.config.schema import ConfigError, DataConfig
from cl_train.data.bad_images import BadImageError, BadImages
from cl_train.data.collate import channels_last_collate
from cl_train.data.decode import BadImage
from cl_train.data.device import HostBatch
from cl_train.data.image_reader import ImageReader, WorkerTimes
from cl_train.data.order import SizeSchedule, rank_share
from cl_train.data.slots import Slots
from cl_train.data.source import Indices
from cl_train.data.user_dataset import BySize, DatasetReader, samples_of
from cl_train.data.workers import BEGUN, SAMPLE, WorkerError, Workers
from cl_train.system.distributed import Dist
from cl_train.system.launcher import cores_of_process
from cl_train.system.memory import available_bytes

log = logging.getLogger(__name__)
Reader = ImageReader | DatasetReader  # of the samples of one split; each worker has a copy
_MAX_WORKERS = 16
_MIN_ROWS = 8  # images per task: smaller tasks cost more in messages than the even distribution gains
# Batches that have not been released when the next one is requested: on CUDA `to_device` has up to two copies under
# way; the other consumers release each batch first.
_BATCHES_IN_USE = 2
_SUBSTITUTES = 100  # following samples that are tried instead of a bad one


class _Task(NamedTuple):
    """Rows `first_row`, `first_row + 1`, ... of a slot, to be filled with the samples `indices`."""

    iteration: int
    slot: int
    first_row: int
    epoch: int
    image_size: int
    indices: list[int]


@dataclass
class _TaskResult:
    """The result of a task."""

    bad: list[tuple[str, str]] = field(default_factory=list)  # name, reason
    empty_rows: list[int] = field(default_factory=list)
    times: WorkerTimes = field(default_factory=WorkerTimes)
    error: str | None = None


def _fill(reader: Reader, slots: Slots, attempts: int, task: _Task) -> _TaskResult:
    """Read the samples of a task into their rows, in a worker."""
    done = _TaskResult()
    reader.times = done.times
    worker = get_worker_info()
    progress = slots.progress[worker.id if worker else 0]
    images = slots.images(task.slot, task.image_size)
    targets = slots.targets[task.slot].numpy()  # writing a number into a tensor takes ten times as long
    try:
        for row, index in enumerate(task.indices, task.first_row):
            if slots.iteration[0] != task.iteration:  # the iteration was abandoned
                break
            for used in range(index, index + attempts):  # the sample, or the first of the following ones that is good
                used %= len(reader)
                progress[SAMPLE] = used
                progress[BEGUN] += 1
                try:
                    targets[row] = reader.read(images[row], used, task.epoch, random_index=index)
                    break
                except BadImage as bad:
                    done.bad.append((reader.name(used), str(bad)))
            else:
                done.empty_rows.append(row)
    except Exception as error:  # a bug, or lack of memory: raised again in the parent
        done.error = f"{type(error).__name__}: {error}"
    return done


class _Batch(NamedTuple):
    """A batch that workers are filling."""

    iteration: int
    tasks: int
    host: HostBatch


class HostLoader:
    """One rank's batches of one split in shared memory, filled by workers that live until `close`.

    Attributes:
        samples: number of samples of all ranks together.
        workers: number of worker processes; 0 = samples are read in this process.
        times: seconds that the workers have spent so far.
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
            sizes: of the images of each epoch. batch_size: per rank.
            order: epoch -> the order of the training samples of all ranks, whose last incomplete batch is dropped and
                whose bad samples are replaced by the following ones; None = evaluation: each sample once, bad ones are
                left out.

        Raises ConfigError if the memory is too small.
        """
        self.reader, self._sizes, self._batch_size, self._cfg, self._dist = reader, sizes, batch_size, cfg, dist
        self._bad_images, self._order = bad_images, order
        self.samples, self.workers, self.times = len(reader), worker_count(cfg, dist), WorkerTimes()
        self._slot_count = cfg.prefetch + _BATCHES_IN_USE + 1
        self._slots: Slots | None = None
        self._workers: Workers[_Task, _TaskResult] | None = None
        self._free: deque[int] = deque()
        self._submitted: deque[_Batch] = deque()
        need = self._slot_count * batch_size * sizes.image_sizes[-1] ** 2 * 3 * reader.dtype.itemsize
        free = available_bytes(torch.device("cpu"))
        if free is not None and need > free:  # the size of /dev/shm does not matter
            raise ConfigError(
                f"the loader's batches need {need / 2**30:.1f} GiB of shared memory, and {free / 2**30:.1f} GiB are"
                f" free: lower batch_size or data.prefetch={cfg.prefetch}"
            )

    def batch_count(self, epoch: int = 0) -> int:
        batch_size, ranks = self._batch_size, self._dist.world_size
        if self._order is None:
            return -(-len(range(self._dist.rank, self.samples, ranks)) // batch_size)
        return self.samples // (batch_size * ranks)

    def batches(self, epoch: int = 0, first_batch: int = 0) -> Iterator[HostBatch]:
        """Batch `first_batch`, `first_batch + 1`, ... of `epoch`. Ends an earlier iteration that is not exhausted.

        Raises BadImageError, WorkerError.
        """
        slots, workers = self._start()
        slots.iteration[0] += 1
        iteration = int(slots.iteration[0])
        shares = self._shares(epoch, first_batch)
        while True:
            while self._free and (share := next(shares, None)) is not None:
                self._submit(slots, workers, iteration, epoch, *share)
            if not self._submitted:
                assert self._free, "the consumer has released no batch"
                return
            batch = self._submitted.popleft()
            empty_rows = self._wait_for(workers, batch, wanted=batch.iteration == iteration)
            if batch.iteration != iteration:
                batch.host.release()
                continue
            yield _without(batch.host, empty_rows) if empty_rows else batch.host
            assert iteration == slots.iteration[0], "another iteration over this loader has begun"

    def validation_sample(self, index: int) -> Tensor:
        """Sample `index` as in `batches`, [size, size, 3]. Raises BadImage."""
        size = self._sizes.image_size_at(0)
        sample = torch.empty(size, size, 3, dtype=self.reader.dtype)
        self.reader.read(sample.permute(2, 0, 1), index, epoch=0, random_index=index)
        return sample

    def close(self) -> None:
        """End the workers and free the memory. A later iteration starts new ones."""
        self._stop_workers()
        if self._slots is not None:
            self._slots.unpin()
            self._slots = None

    def _shares(self, epoch: int, first_batch: int) -> Iterator[tuple[int, Indices]]:
        """Number and samples of each of this rank's batches."""
        batch_size, rank, ranks = self._batch_size, self._dist.rank, self._dist.world_size
        if self._order is None:
            indices = np.arange(rank, self.samples, ranks)
            rank, ranks = 0, 1
        else:
            indices = self._order(epoch)
        for number in range(first_batch, self.batch_count(epoch)):
            yield number, rank_share(indices, number, batch_size, rank, ranks)

    def _start(self) -> tuple[Slots, Workers[_Task, _TaskResult]]:
        if self._slots is None:
            largest = self._sizes.image_sizes[-1]
            self._slots = Slots(self._slot_count, self._batch_size, largest, self.reader.dtype, self.workers)
            self._free = deque(range(self._slot_count))
        if self._workers is None:
            tasks = self._slot_count * -(-self._batch_size // self._rows_per_task(self._batch_size))
            self._workers = Workers(
                partial(_fill, self.reader, self._slots, _SUBSTITUTES if self._order else 1),
                count=self.workers,
                queued=max(2, -(-tasks // max(1, self.workers))),  # all: a long task does not delay the other workers
                progress=self._slots.progress,
                timeout_s=self._cfg.worker_timeout_s,
                name_of=self.reader.name,
            )
        if self._dist.device.type == "cuda":
            self._slots.pin()
        return self._slots, self._workers

    def _stop_workers(self) -> None:
        if self._slots is not None:
            self._slots.iteration[0] += 1
        if self._workers is not None:
            self._workers.close()
            self._workers = None
        while self._submitted:
            self._submitted.popleft().host.release()

    def _rows_per_task(self, batch_size: int) -> int:
        return max(_MIN_ROWS, -(-batch_size // max(1, self.workers)))

    def _submit(
        self,
        slots: Slots,
        workers: Workers[_Task, _TaskResult],
        iteration: int,
        epoch: int,
        number: int,
        indices: Indices,
    ) -> None:
        slot, size, image_size = self._free.popleft(), len(indices), self._sizes.image_size_at(epoch)
        rows = self._rows_per_task(size)
        firsts = range(0, size, rows)
        for first in firsts:
            workers.submit(_Task(iteration, slot, first, epoch, image_size, indices[first : first + rows].tolist()))
        images, targets = slots.images(slot, image_size)[:size], slots.targets[slot][:size]
        host = HostBatch(images, targets, number, partial(self._free.append, slot), epoch)
        self._submitted.append(_Batch(iteration, len(firsts), host))

    def _wait_for(self, workers: Workers[_Task, _TaskResult], batch: _Batch, *, wanted: bool) -> list[int]:
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
            batch.host.release()
            self._stop_workers()
            raise
        return empty_rows


def _without(batch: HostBatch, rows: list[int]) -> HostBatch:
    """A copy of the batch without these rows. It has the same `release`."""
    kept = [row for row in range(len(batch.targets)) if row not in rows]
    return batch._replace(images=batch.images[kept].to(memory_format=torch.channels_last), targets=batch.targets[kept])


class StreamLoader:
    """One rank's batches of an IterableDataset.

    The data set itself controls order and random numbers, and divides its samples among ranks and workers.

    It has the public members of `HostLoader`, except for `reader` and `validation_sample`.
    """

    def __init__(
        self,
        datasets: BySize,
        sizes: SizeSchedule,
        batch_size: int,
        cfg: DataConfig,
        dist: Dist,
        seed: int,
        *,
        training: bool,
    ) -> None:
        self._datasets, self._sizes, self._dist, self._seed, self._training = datasets, sizes, dist, seed, training
        self._batch_size = batch_size
        self.samples = samples_of(datasets)
        self.workers, self.times = worker_count(cfg, dist), WorkerTimes()
        log.warning(
            "data.dataset is an IterableDataset: it controls order and random numbers, which depend on data.workers; a"
            " resumed epoch reads the skipped batches again; it must divide its samples among ranks and workers itself"
        )

    def batch_count(self, epoch: int = 0) -> int:
        total = self._batch_size * self._dist.world_size
        return self.samples // total if self._training else -(-self.samples // total)

    def batches(self, epoch: int = 0, first_batch: int = 0) -> Iterator[HostBatch]:
        dataset = self._datasets[self._sizes.image_size_at(epoch)]
        size = self._batch_size
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        loader = DataLoader(
            dataset,
            size,
            num_workers=self.workers,
            collate_fn=channels_last_collate,
            pin_memory=self._dist.device.type == "cuda",
            generator=torch.Generator().manual_seed(self._seed + epoch),
        )
        count, delivered = self.batch_count(epoch), 0
        # An epoch of training ends without waiting for a batch that it does not use.
        batches = islice(_whole_batches(loader, size), count) if self._training else ((x, y) for x, y, *_ in loader)
        for delivered, (images, targets) in enumerate(batches, 1):
            if delivered > first_batch:
                yield HostBatch(images, targets, delivered - 1, lambda: None, epoch)
        if self._training and delivered < count:
            raise WorkerError(
                f"data.dataset ended after {delivered} of {count} batches of {size} samples on rank "
                f"{self._dist.rank}: its length is {self.samples}, of all ranks and workers together"
            )

    def close(self) -> None:
        """Nothing to do: the workers end with the iteration."""


def _whole_batches(batches: Iterable[Any], size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Join the incomplete batches with which each worker ends; less than one batch in all is dropped."""
    parts: list[tuple[Tensor, Tensor]] = []
    for images, targets, *_ in batches:
        if len(targets) == size:
            yield images, targets
            continue
        parts.append((images, targets))
        if sum(len(labels) for _, labels in parts) >= size:
            images, targets = (torch.cat(column) for column in zip(*parts, strict=True))
            yield images[:size], targets[:size]
            parts = [(images[size:], targets[size:])]


def worker_count(cfg: DataConfig, dist: Dist) -> int:
    """`data.workers`; by default the usable cores / ranks of this machine, at most 16 and at least 1."""
    return min(_MAX_WORKERS, cores_of_process(dist.world_size)) if cfg.workers is None else cfg.workers


Loader = HostLoader | StreamLoader
