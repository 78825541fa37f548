"""The loader of one split: from sample indices to NHWC batches in shared memory, which workers fill in place.

Batch `number` lies in slot `number % slots`: no pixel is pickled or copied between processes. A batch is divided into
tasks, each of at least 8 rows, which a worker fills. Example: batches of 32 images, 4 workers, data.prefetch=3. A batch
is 4 tasks, and 3 slots are being filled or wait. 2 more are read by copies under way to the GPU (on a CPU they are
filled in advance too), and 1 is the batch that was requested: 6 slots. The workers of an IterableDataset fill rows from
their own streams; whole batches are then made from what they found.
"""

import contextlib
import itertools
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from cl_train.config.schema import ConfigError, DataConfig
from cl_train.data.device import COPIES_UNDER_WAY, RawBatch
from cl_train.data.images import BadImage, Indices
from cl_train.data.order import SizeSchedule, order_of_rank
from cl_train.data.transforms import ImageReader
from cl_train.data.user_dataset import DatasetReader, StreamEnd, StreamReader
from cl_train.data.workers import BEGUN, SAMPLE, WorkerError, Workers, shared
from cl_train.system.distributed import Dist
from cl_train.system.machine import available_bytes
from cl_train.system.processes import cores_of_process

Reader = ImageReader | DatasetReader  # of the samples of one split; each worker has a copy
_MAX_WORKERS = 16
_MIN_ROWS = 8  # images per task: smaller tasks cost more in messages than the even distribution gains
_SUBSTITUTES = 100  # following samples that are tried instead of a bad one


class WorkerTimes(NamedTuple):
    """Seconds that workers spent on each part of loading."""

    read_s: float = 0.0
    decode_s: float = 0.0
    resize_s: float = 0.0
    images: float = 0
    dataset_s: float = 0.0  # in the user's Dataset


class BadImageError(RuntimeError):
    """A sample cannot be read, or with on_bad_image=skip more than data.max_bad_images."""


@dataclass
class BadImages:
    """Bad samples of both splits: `reasons` by name, each once; `skipped`: how often one was replaced or left out."""

    skip: bool
    limit: int
    reasons: dict[str, str] = field(default_factory=dict)
    skipped: int = 0

    def add(self, name: str, reason: str, *, skipped: bool) -> None:
        """`skipped`: it was read for its own row, not in the place of another one. Raises BadImageError."""
        self.skipped += skipped
        self.reasons[name] = reason
        if not self.skip:
            what = f"'{name}' cannot be decoded: {reason}"
            raise BadImageError(f"{what}. Repair or remove it, or use data.on_bad_image=skip")
        if len(self.reasons) > self.limit:
            count = f"{len(self.reasons)} images cannot be decoded, more than data.max_bad_images={self.limit}"
            raise BadImageError(f"{count}; the last one: '{name}': {reason}")


def first_reasons(reasons: Mapping[str, str]) -> str:
    """The first names of `BadImages.reasons` with their reasons, in one line."""
    return "; ".join(f"{name} ({reason})" for name, reason in [*reasons.items()][:3]) + " ..." * (len(reasons) > 3)


class _Task(NamedTuple):
    """Rows `first_row`, `first_row + 1`, ... of batch `number`, to be filled with the samples `indices`."""

    number: int
    first_row: int
    epoch: int
    image_size: int
    indices: Sequence[int]


class _Done(NamedTuple):
    """What a worker found for a task; the pixels and labels are in the slot."""

    number: int
    rows: int
    worker: int
    bad: list[tuple[str, str, bool]]  # name, reason, whether it was the row's own sample
    missing: list[int]  # rows for which there was no good sample
    is_end: bool  # of the worker's stream


class HostLoader:
    """One rank's batches of one split in shared memory, filled by workers that live until `close`. `samples`: of all
    ranks; `is_stream`: of an IterableDataset, which controls their order; `times`: as `WorkerTimes`, of each worker."""

    def __init__(
        self,
        reader: Reader,
        sizes: SizeSchedule,
        batch_size: int,
        cfg: DataConfig,
        dist: Dist,
        bad_images: BadImages,
        order_of: Callable[[int], Indices] | None,
    ) -> None:
        """`order_of`: an epoch's samples of all ranks; the last incomplete batch is dropped, and bad samples are
        replaced by the following ones. None: each sample once, without bad ones. Raises ConfigError: lack of memory."""
        self.reader, self.sizes, self.batch_size, self._cfg, self._dist = reader, sizes, batch_size, cfg, dist
        self._bad_images, self._order_of, self.samples = bad_images, order_of, len(reader)
        most = min(_MAX_WORKERS, cores_of_process(dist.world_size))
        self.workers = most if cfg.workers is None else cfg.workers
        self.is_stream, processes = isinstance(reader, StreamReader), max(1, self.workers)
        least = 1 if self.is_stream else _MIN_ROWS  # all workers fill each batch of a stream: each has its own samples
        self._tasks_per_batch = max(1, min(batch_size // least, self.workers))
        copied = COPIES_UNDER_WAY if dist.device.type == "cuda" else 0
        ahead = cfg.prefetch + COPIES_UNDER_WAY - copied
        self._queued = max(1, ahead * self._tasks_per_batch // processes)  # tasks of a worker
        self._slot_count = -(-self._queued * self.workers // self._tasks_per_batch) + copied + 1
        self._slots: tuple[Tensor, Tensor] | None = None  # pixels, NHWC, with room for the largest; targets
        self._pinned: list[Tensor] = []
        self.times = shared((processes, len(WorkerTimes._fields)), torch.float64).numpy()
        self._pool: Workers | None = None
        self._user: tuple[threading.Thread, int] | None = None  # thread and process
        batches_gib = self._slot_count * batch_size * sizes.image_sizes[-1] ** 2 * 3 * reader.dtype.itemsize / 2**30
        order_gib, free = 0 if self.is_stream else 16 * self.samples / 2**30, available_bytes(torch.device("cpu"))
        if free is not None and batches_gib + order_gib > free / 2**30:  # the size of /dev/shm does not matter
            raise ConfigError(
                f"the loader's batches need {batches_gib:.1f} GiB of memory, the order of {self.samples} samples"
                f" {order_gib:.1f} GiB, and {free / 2**30:.1f} GiB are free: lower batch_size or"
                f" data.prefetch={cfg.prefetch}, or is the length of the data set wrong?"
            )

    def batch_count(self) -> int:
        rank, ranks = self._dist.rank, self._dist.world_size
        if self._order_of is None:
            return -(-len(range(rank, self.samples, ranks)) // self.batch_size)
        return self.samples // (self.batch_size * ranks)

    def batches(self, epoch: int = 0, first_batch: int = 0) -> Iterator[RawBatch]:
        """Batch `first_batch`, ... of `epoch`, each valid until the next is requested, on CUDA until the third. Ends an
        earlier iteration. Raises BadImageError, WorkerError; RuntimeError: another thread is iterating."""
        user = threading.current_thread(), os.getpid()
        if self._user is not None and self._user != user and self._user[0].is_alive():
            raise RuntimeError("another thread or process is iterating over this loader: give each one its own")
        self._user = user
        try:
            yield from self._of_stream(epoch, first_batch) if self.is_stream else self._finished(epoch, first_batch)
        finally:
            self._user = None

    def close(self) -> None:
        """End the workers and free the memory. A later iteration starts new ones."""
        if self._pool is not None:
            self._pool.close()
        while self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.pop().data_ptr())
        self._pool = self._slots = None

    def _open_pool(self) -> Workers:
        """The workers, which fork when the first result is requested."""
        if self._pool is not None and not self._pool.is_running:  # after a failure: new ones, in new memory
            self.close()
        if self._pool is None:
            reader, slots, size = self.reader, self._slot_count, self.batch_size
            label_type = torch.float32 if reader.label_shape else torch.int64
            pixels = shared((slots, size * self.sizes.image_sizes[-1] ** 2 * 3), reader.dtype)
            self._slots = pixels, shared((slots, size, *reader.label_shape), label_type)
            self._pool = Workers(self._fill, self.workers, self._cfg.worker_timeout_s, reader.name, self._queued)
        return self._pool

    def _pin(self) -> None:
        """Page-lock the slots: copies to the GPU overlap with computation. Only after the fork: a driver may withhold
        registered memory from later children (MADV_DONTFORK), and workers that write to it would crash."""
        assert self._slots is not None
        for memory in self._slots:
            if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
                self._pinned.append(memory)
            else:  # copies still work, only slower; CUDA reports the error again at the next kernel: clear it
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device="cuda")

    def _slot(self, number: int, image_size: int) -> tuple[Tensor, Tensor]:
        """Of batch `number`: images [rows that fit, 3, image_size, image_size] in channels_last, targets."""
        assert self._slots is not None
        pixels, targets = (memory[number % self._slot_count] for memory in self._slots)
        shape = (len(pixels) // (image_size**2 * 3), image_size, image_size, 3)
        return pixels[: math.prod(shape)].view(shape).permute(0, 3, 1, 2), targets

    def _fill(self, iteration: int, task: _Task) -> _Done:
        """In a worker: read the samples of a task into their rows."""
        info, reader, workers = get_worker_info(), self.reader, self._pool
        assert workers is not None
        done = _Done(task.number, len(task.indices), info.id if info else 0, [], [], is_end=False)
        reader.times, progress = self.times[done.worker], workers.progress[done.worker]
        images, labels = self._slot(task.number, task.image_size)
        targets = labels.numpy()  # writing a number into a tensor takes ten times as long
        indices, count, attempts = task.indices, len(reader), _SUBSTITUTES if self._order_of else 1
        if isinstance(reader, StreamReader):
            indices, count = reader.begin(iteration, task.epoch, len(indices)), sys.maxsize  # it has no length
        try:
            for row, index in enumerate(indices, task.first_row):
                if workers.iteration[0] != iteration:  # it was abandoned
                    break
                for used in range(index, index + attempts):  # the sample, or the first of the following that is good
                    used %= count
                    progress[SAMPLE] = used
                    progress[BEGUN] += 1
                    try:
                        targets[row] = reader.read(images[row], used, task.epoch, random_index=index)
                        break
                    except BadImage as bad:
                        done.bad.append((reader.name(used), str(bad), used == index % count))
                else:
                    done.missing.append(row)
        except StreamEnd:
            is_substitute, has_row_before = used != index, row > task.first_row
            if is_substitute and has_row_before:  # the last samples were bad: the one before takes their place
                images[row], targets[row], row = images[row - 1], targets[row - 1], row + 1
            done.missing.extend(range(row, task.first_row + len(indices)))
            return done._replace(is_end=True)
        return done

    def _tasks(self, epoch: int, first_batch: int) -> Iterator[_Task]:
        """The tasks of this rank's batches; those of a stream have no end, and only their number of samples matters."""
        size, rank, ranks = self.batch_size, self._dist.rank, self._dist.world_size
        image_size = self.sizes.image_size_at(epoch)
        if self.is_stream:
            shares: Iterable[Indices] = itertools.repeat(np.arange(size))
        else:
            if self._order_of is None:
                order = np.arange(rank, self.samples, ranks)
            else:
                order = order_of_rank(self._order_of(epoch), size, rank, ranks)
            shares = (order[first : first + size] for first in range(first_batch * size, len(order), size))
        for number, share in enumerate(shares, first_batch):
            first_row = 0
            for indices in np.array_split(share, self._tasks_per_batch):
                yield _Task(number, first_row, epoch, image_size, indices.tolist())
                first_row += len(indices)

    def _finished(self, epoch: int, first_batch: int) -> Iterator[RawBatch]:
        """The batches whose tasks are done, without rows for which there is no sample."""
        ended = set[int]()
        results = self._open_pool().results(self._tasks(epoch, first_batch))
        must_pin = self._dist.device.type == "cuda" and not self._pinned
        while done := list(itertools.islice(results, self._tasks_per_batch)):
            if must_pin:
                self._pin()
                must_pin = False
            for name, reason, skipped in (bad for task in done for bad in task.bad):
                self._bad_images.add(name, reason, skipped=skipped)
            ended |= {task.worker for task in done if task.is_end}
            number, rows = done[0].number, sum(task.rows for task in done)
            images, targets = self._slot(number, self.sizes.image_size_at(epoch))
            if missing := {row for task in done for row in task.missing}:
                if self._order_of and not self.is_stream:
                    raise BadImageError(f"{_SUBSTITUTES} images in sequence cannot be decoded")
                kept = [row for row in range(rows) if row not in missing]
                yield RawBatch(images[kept].to(memory_format=torch.channels_last), targets[kept], number, epoch)
            else:
                yield RawBatch(images[:rows], targets[:rows], number, epoch)
            if len(ended) == max(1, self.workers):
                return

    def _of_stream(self, epoch: int, first_batch: int) -> Iterator[RawBatch]:
        """In training whole batches; those before `first_batch` are read again. Otherwise all samples of the length."""
        size, count, number, seen, rest = self.batch_size, self.batch_count(), 0, 0, list[RawBatch]()
        for batch in self._finished(epoch, 0):
            if self._order_of is None:
                seen += len(batch.targets)
                if seen > self.samples:
                    raise WorkerError(
                        f"data.dataset: the val dataset yields more than the {self.samples} samples of its length. It"
                        " must end, and divide its samples among ranks and workers (torch.utils.data.get_worker_info)"
                    )
                yield batch
                continue
            if len(batch.targets) < size:
                rest.append(batch)
                images, targets = torch.cat([part.images for part in rest]), torch.cat([part.targets for part in rest])
                if len(targets) < size:
                    continue
                rest = [batch._replace(images=images[size:], targets=targets[size:])]
                batch = batch._replace(images=images[:size], targets=targets[:size])
            number += 1
            if number > first_batch:
                yield batch._replace(number=number - 1)
            if number == count:
                return
        if self._order_of is not None:
            bad = "".join(f"; {name}: {reason}" for name, reason in list(self._bad_images.reasons.items())[-1:])
            ended = f"data.dataset ended after {number} of {count} batches of {size} samples on rank {self._dist.rank}"
            raise WorkerError(f"{ended}: its length is {self.samples}, of all ranks and workers together{bad}")


def bottleneck_advice(
    times: WorkerTimes, *, workers: int, cores: int, seconds: float, data_wait_pct: float
) -> str | None:
    """One sentence that names the bottleneck of a window of `seconds` and what to change, or None."""
    if data_wait_pct <= 10 or seconds <= 0:
        return None
    waits = f"the step waits for data {data_wait_pct:.0f} % of its time"
    if times.images == 0:
        return f"{waits}; data.workers={workers}, and this process has {cores} cores"
    busy_s = times.read_s + times.decode_s + times.resize_s + times.dataset_s
    idle_pct = 100 * (1 - busy_s / (seconds * max(1, workers)))
    rate = f"{times.images / busy_s:.0f} images/s per worker"
    if times.read_s > 0.4 * busy_s:
        file_ms = f"{1e3 * times.read_s / times.images:.1f} ms"
        cause = f"storage: reading a file takes {file_ms}; use a local disk or a smaller copy of the data"
    elif workers > 0 and idle_pct > 15:
        cause = f"the number of prepared batches: workers are idle {idle_pct:.0f} % of the time; raise data.prefetch"
    elif workers < cores:
        cause = f"too few workers: {max(1, workers)} of {cores} cores ({rate}); use data.workers={cores}"
    elif times.dataset_s > busy_s / 2:
        cause = f"your Dataset: __getitem__ takes {1e3 * times.dataset_s / times.images:.1f} ms"
    else:
        decode_pct = 100 * times.decode_s / busy_s
        cause = f"decoding, {decode_pct:.0f} % ({rate}); use smaller images (prepare_imagenet resize)"
    return f"{waits}; the bottleneck is {cause}"
