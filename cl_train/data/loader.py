"""A folder of images as batches on the device: what to read, who reads it, and where it goes."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from cl_train.data.batch import Batch, DeviceFormat
from cl_train.data.decode import BadImage
from cl_train.data.device import HostBatch, MixBatch, MixLabels, Normalise, to_device
from cl_train.data.folder import Folder
from cl_train.data.images import ImageForm, ImageReader, Times
from cl_train.data.order import Indices, permutation, rank_share
from cl_train.data.workers import (
    Done,
    InlinePool,
    Pool,
    ProcessPool,
    Progress,
    Stalled,
    Task,
    ThreadPool,
    WorkerError,
    shared_memory,
)

_LEAST_ROWS = 8  # images per task: below this the messages cost more than they spread the work
_SUBSTITUTES = 100  # neighbours tried in place of a bad image


class BadImageError(RuntimeError):
    """An image that could not be decoded, with on_bad_image=error, or one too many with skip."""


@dataclass(frozen=True)
class LoaderSettings:
    """Plain values of the settings that the loader itself needs."""

    batch_size: int
    workers: int
    worker_type: str  # process or thread
    prefetch: int
    device_prefetch: int
    pin_memory: bool
    persistent_workers: bool
    channels_last: bool
    skip_bad_images: bool
    max_bad_images: int
    worker_timeout_s: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rank: int
    world_size: int


class Ring:
    """Slots of shared memory, each a batch: targets, then pixels. Training and validation have their own slots."""

    def __init__(self, slots: int, batch_size: int, size: int, channels_last: bool, workers: int) -> None:
        self.slots, self._size, self._channels_last = slots, size, channels_last
        targets, pixels = batch_size * 8, batch_size * size * size * 3
        stride = -(-(targets + pixels) // 4096) * 4096
        header = -(-(max(1, workers) * 16) // 4096) * 4096
        self.bytes = header + 2 * slots * stride
        memory = torch.frombuffer(shared_memory(self.bytes), dtype=torch.uint8)
        self._memory = memory
        self._pinned = False
        self.progress: Progress = memory[:header].view(torch.int64).numpy()[: 2 * max(1, workers)].reshape(-1, 2)
        self._targets, self._images = [], []
        for slot in range(2 * slots):
            start = header + slot * stride
            self._targets.append(memory[start : start + targets].view(torch.int64))
            flat = memory[start + targets : start + targets + pixels]
            shape = (batch_size, size, size, 3) if channels_last else (batch_size, 3, size, size)
            images = flat.view(shape)
            self._images.append(images.permute(0, 3, 1, 2) if channels_last else images)

    def images(self, slot: int) -> Tensor:
        """uint8 [batch_size, 3, H, W]."""
        return self._images[slot]

    def targets(self, slot: int) -> Tensor:
        """int64 [batch_size]."""
        return self._targets[slot]

    def pin(self) -> None:
        """Page-lock the memory, so that copies to the device run beside the computation."""
        if not self._pinned:
            result = torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), self.bytes, 0)
            self._pinned = int(result) == 0  # where the system refuses, copies still work, only slower
            if not self._pinned:
                with contextlib.suppress(RuntimeError):  # the refusal stays behind as the next kernel's error: take it
                    torch.zeros(1, device="cuda")

    def unpin(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
            self._pinned = False


def _slots(settings: LoaderSettings) -> int:
    """Batches in memory: prepared ahead, on their way to the device, in use, and being filled."""
    return settings.prefetch + settings.device_prefetch + 2


def shared_bytes(settings: LoaderSettings, size: int) -> int:
    """Memory of all slots, for training and validation, at `size` pixels a side."""
    return 2 * _slots(settings) * settings.batch_size * size * size * 3


class Fill:
    """Does a worker's tasks: reads the images of a task into their rows."""

    def __init__(self, folder: Folder, form: ImageForm, ring: Ring, skip: bool, worker: int) -> None:
        self._folder, self._ring, self._skip = folder, ring, skip
        self._reader = ImageReader(form)
        self._progress = ring.progress[worker]

    def __call__(self, task: Task) -> Done:
        done = Done(task.ticket)
        self._reader.times = done.times
        rows = self._ring.images(task.slot)
        try:
            for row, index in enumerate(task.indices, task.first_row):
                if task.training:
                    self._train(done, rows[row], row, index, task.epoch)
                else:
                    self._validation(done, rows[row], row, index)
        except Exception as error:  # a fault of ours or a full disk: it must end the run in the parent, by name
            done.error = f"{type(error).__name__}: {error}"
        return done

    def _train(self, done: Done, pixels: Tensor, row: int, index: int, epoch: int) -> None:
        train = self._folder.train
        for step in range(_SUBSTITUTES):
            used = (index + step) % len(train)
            self._begin(used)
            try:
                self._reader.train(pixels, train, used, epoch, numbers_of=index)
            except BadImage as bad:
                done.bad.append((row, os.fsdecode(train.path(used)), str(bad)))
                if not self._skip:
                    return
                continue
            if step:
                done.replaced.append((row, used))
            return

    def _validation(self, done: Done, pixels: Tensor, row: int, index: int) -> None:
        val = self._folder.val
        self._begin(-1 - index)
        try:
            self._reader.validation(pixels, val, index)
        except BadImage as bad:
            done.bad.append((row, os.fsdecode(val.path(index)), str(bad)))

    def _begin(self, index: int) -> None:
        self._progress[1] = index
        self._progress[0] += 1


@dataclass
class _Flight:
    """A batch that workers are filling."""

    slot: int
    indices: Indices
    number: int
    open_tasks: int = 0
    lost_rows: list[int] = field(default_factory=list)


class FolderData:
    """Batches of a folder of images. See `cl_train.data` for the meaning of the public members."""

    def __init__(self, folder: Folder, form: ImageForm, settings: LoaderSettings, mix: MixLabels | None) -> None:
        self._folder, self._form, self._settings, self._mix = folder, form, settings, mix
        self.classes = folder.classes
        self.num_classes = len(folder.classes)
        self.train_images, self.val_images = len(folder.train), len(folder.val)
        self.fingerprint = folder.fingerprint()
        self.batches_per_epoch = self.train_images // (settings.batch_size * settings.world_size)
        self.workers = settings.workers
        self.skipped_images = 0
        self._bad_files: set[str] = set()
        self.times = Times()
        self._seed = form.seed
        self._ring: Ring | None = None
        self._pool: Pool | None = None
        self._tickets = 0
        self._flights: dict[int, _Flight] = {}

    def train(self, epoch: int, form: DeviceFormat, first_batch: int = 0) -> Generator[Batch, None, None]:
        """This rank's share of global batch `first_batch`, `first_batch + 1`, ... of `epoch`."""
        mix = self._mix_of(epoch)
        yield from self._to_device(self.train_host(epoch, first_batch), form, mix)

    def validation(self, form: DeviceFormat) -> Iterator[Batch]:
        """Every rank's images, `rank::world_size`, each once; the last batch is smaller."""
        yield from self._to_device(self.validation_host(), form, None)

    def train_host(self, epoch: int, first_batch: int = 0) -> Iterator[HostBatch]:
        """As `train`, uint8 in the loader's memory."""
        s = self._settings
        order = permutation(self._seed, epoch, self.train_images)
        shares = (
            rank_share(order, batch, s.batch_size, s.rank, s.world_size)
            for batch in range(first_batch, self.batches_per_epoch)
        )
        try:
            yield from self._stream(shares, training=True, epoch=epoch, first_batch=first_batch)
        finally:
            if not s.persistent_workers:
                self._close_pool()

    def validation_host(self) -> Iterator[HostBatch]:
        """As `validation`, uint8 in the loader's memory."""
        s = self._settings
        mine = np.arange(s.rank, self.val_images, s.world_size)
        shares = (mine[start : start + s.batch_size] for start in range(0, len(mine), s.batch_size))
        yield from self._stream(shares, training=False, epoch=0, first_batch=0)

    def close(self) -> None:
        """End the workers and give the memory back. A later iteration starts new ones."""
        self._close_pool()
        if self._ring is not None:
            self._ring.unpin()
            self._ring = None

    # --- below: batches in flight ---

    def _to_device(self, batches: Iterator[HostBatch], form: DeviceFormat, mix: MixBatch | None) -> Iterator[Batch]:
        s = self._settings
        return to_device(batches, Normalise(s.mean, s.std, form), mix, s.device_prefetch)

    def _mix_of(self, epoch: int) -> MixBatch | None:
        if self._mix is None:
            return None
        mix, rank, world_size = self._mix, self._settings.rank, self._settings.world_size
        return lambda images, targets, number: mix(images, targets, epoch, number * world_size + rank)

    def _stream(
        self, shares: Iterator[Indices], *, training: bool, epoch: int, first_batch: int
    ) -> Iterator[HostBatch]:
        ring = self._open()
        free = deque(range(ring.slots) if training else range(ring.slots, 2 * ring.slots))
        flying: deque[int] = deque()
        numbered = enumerate(shares, first_batch)
        try:
            while True:
                while free:
                    number, indices = next(numbered, (-1, None))
                    if indices is None:
                        break
                    flying.append(self._launch(_Flight(free.popleft(), indices, number), training, epoch))
                if not flying:
                    return
                flight = self._land(flying[0])
                flying.popleft()
                yield self._host_batch(flight, free)
        finally:
            self._drain(flying)

    def _launch(self, flight: _Flight, training: bool, epoch: int) -> int:
        assert self._ring is not None and self._pool is not None
        self._tickets += 1
        split = self._folder.train if training else self._folder.val
        self._ring.targets(flight.slot)[: len(flight.indices)] = torch.from_numpy(split.labels[flight.indices])
        rows = max(_LEAST_ROWS, -(-len(flight.indices) // max(1, self._settings.workers)))
        self._flights[self._tickets] = flight
        for first in range(0, len(flight.indices), rows):
            part = tuple(flight.indices[first : first + rows].tolist())
            flight.open_tasks += 1
            self._pool.submit(Task(self._tickets, training, epoch, flight.slot, first, part))
        return self._tickets

    def _land(self, ticket: int) -> _Flight:
        """Wait until every row of the batch is filled."""
        assert self._pool is not None
        flight = self._flights[ticket]
        while flight.open_tasks:
            try:
                answers = self._pool.collect()
            except WorkerError:
                self._close_pool()
                raise
            for done in answers:
                self._account(done)
        del self._flights[ticket]
        return flight

    def _drain(self, flying: deque[int]) -> None:
        """After an early end: wait for the workers, which must not write into slots that are given again."""
        with contextlib.suppress(WorkerError, BadImageError):
            while flying and self._pool is not None:
                self._land(flying.popleft())

    def _account(self, done: Done) -> None:
        flight = self._flights[done.ticket]
        flight.open_tasks -= 1
        self.times.add(done.times)
        if done.error:
            self._close_pool()
            raise WorkerError(f"a loader worker failed: {done.error}")
        if done.bad:
            self._account_bad(done, flight)

    def _account_bad(self, done: Done, flight: _Flight) -> None:
        assert self._ring is not None
        s = self._settings
        _, path, reason = done.bad[0]
        self.skipped_images += len(done.bad)
        if not s.skip_bad_images:
            self._close_pool()
            raise BadImageError(f"'{path}' cannot be decoded: {reason}. Repair it, or use data.on_bad_image=skip")
        self._bad_files |= {path for _, path, _ in done.bad}  # each counts once, however many epochs there are
        if len(self._bad_files) > s.max_bad_images:
            self._close_pool()
            raise BadImageError(
                f"{len(self._bad_files)} images could not be decoded, more than data.max_bad_images={s.max_bad_images};"
                f" the last: '{path}': {reason}"
            )
        replaced = dict(done.replaced)
        for row, used in replaced.items():
            self._ring.targets(flight.slot)[row] = int(self._folder.train.labels[used])
        flight.lost_rows += sorted({row for row, _, _ in done.bad} - set(replaced))

    def _host_batch(self, flight: _Flight, free: deque[int]) -> HostBatch:
        assert self._ring is not None
        count = len(flight.indices)
        images, targets = self._ring.images(flight.slot)[:count], self._ring.targets(flight.slot)[:count]
        if flight.lost_rows:
            kept = [row for row in range(count) if row not in flight.lost_rows]
            images = images[kept].to(memory_format=self._memory_format())
            targets = targets[kept]
        return HostBatch(images, targets, flight.number, lambda: free.append(flight.slot))

    def _memory_format(self) -> torch.memory_format:
        return torch.channels_last if self._settings.channels_last else torch.contiguous_format

    # --- below: workers ---

    def _open(self) -> Ring:
        s = self._settings
        if self._ring is None:
            slots = _slots(s)
            self._ring = Ring(slots, s.batch_size, self._form.size, s.channels_last, s.workers)
        if self._pool is None:
            self._pool = self._start_pool(self._ring)
        if s.pin_memory:
            self._ring.pin()
        return self._ring

    def _start_pool(self, ring: Ring) -> Pool:
        s = self._settings

        def make_fill(worker: int) -> Callable[[Task], Done]:
            return Fill(self._folder, self._form, ring, s.skip_bad_images, worker)

        if s.workers == 0:
            return InlinePool(make_fill)
        stalled = Stalled(ring.progress, s.worker_timeout_s, self._path_of)
        kind = ProcessPool if s.worker_type == "process" else ThreadPool
        return kind(s.workers, make_fill, stalled)

    def _path_of(self, index: int) -> str:
        split = self._folder.train if index >= 0 else self._folder.val
        return os.fsdecode(split.path(index if index >= 0 else -1 - index))

    def _close_pool(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        self._flights.clear()
