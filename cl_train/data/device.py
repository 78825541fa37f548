"""From uint8 batches on the host to normalised batches on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cl_train.data.batch import Batch, DeviceFormat

MixLabels = Callable[[Tensor, Tensor, int, int], tuple[Tensor, Tensor]]  # (images, targets, epoch, batch)
MixBatch = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]  # (images, targets, batch)
_CPU_PIECE = 8  # images: 5 MB of float32 at 224 px


@dataclass
class HostBatch:
    """A prepared batch in the loader's memory, valid until `release` is called.

    images: uint8 [N, 3, H, W], strides (H*W*3, 1, W*3, 3) with data.memory_format=channels_last. targets: int64 [N].
    """

    images: Tensor
    targets: Tensor
    number: int
    release: Callable[[], None]


class Normalise:
    """(x / 255 - mean) / std in float32, written in the wanted dtype and memory format."""

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], form: DeviceFormat, pad_channels: bool = False
    ) -> None:
        self._form, self._channels = form, 4 if pad_channels else 3
        # Of four channels, the fourth with zeros: whatever is read there becomes zero.
        scale = [*(1 / (255 * s) for s in std), 0.0]
        offset = [*(-m / s for m, s in zip(mean, std, strict=True)), 0.0]
        self._scale = torch.tensor(scale, dtype=torch.float32, device=form.device)
        self._offset = torch.tensor(offset, dtype=torch.float32, device=form.device)

    def to_device(self, images: Tensor) -> Tensor:
        """uint8 [N, 3, H, W] from the host's memory in a copy on the device, asynchronously.

        A byte of slack lies behind a copy that is to have four channels: see `four_channel_view`.
        """
        if self._channels == 3:
            return images.to(self._form.device, non_blocking=True)
        memory = torch.empty(images.numel() + 1, dtype=torch.uint8, device=self._form.device)
        return memory.as_strided(images.shape, images.stride()).copy_(images, non_blocking=True)

    def __call__(self, images: Tensor) -> Tensor:
        """uint8 [N, 3, H, W] on the device -> float [N, 3 or 4, H, W]; a fourth channel is zero."""
        count, _, height, width = images.shape
        form = self._form
        out = torch.empty(
            (count, self._channels, height, width),
            dtype=form.dtype,
            device=form.device,
            memory_format=form.memory_format,
        )
        is_cpu = form.device.type == "cpu"
        wide = four_channel_view(images) if self._channels == 4 and not is_cpu else None
        if wide is not None:
            self.in_one_kernel(wide, out)
            return out
        if is_cpu:
            self._on_cpu(images, out[:, :3])
        else:
            self.in_one_kernel(images, out[:, :3])
        if self._channels == 4:
            out[:, 3].zero_()
        return out

    def in_one_kernel(self, images: Tensor, out: Tensor) -> None:
        """uint8 in, `out`'s dtype and layout out, float32 between: on CUDA without any intermediate tensor."""
        shape = (images.shape[1], 1, 1)
        offset, scale = (values[: images.shape[1]].view(shape) for values in (self._offset, self._scale))
        torch.addcmul(offset, images, scale, out=out)

    def _on_cpu(self, images: Tensor, out: Tensor) -> None:
        """The same in pieces that fit the cache, over rows of W*3 numbers: a broadcast over 3 channels would leave the
        vector units idle, at seven times the price."""
        count, width = images.shape[0], images.shape[3]
        scale, offset = self._scale[:3].repeat(width), self._offset[:3].repeat(width)
        for first in range(0, count, _CPU_PIECE):
            piece = images[first : first + _CPU_PIECE].permute(0, 2, 3, 1)
            rows = piece.reshape(-1, width * 3).to(torch.float32)
            torch.addcmul(offset, rows, scale, out=rows)
            out[first : first + _CPU_PIECE].copy_(rows.view(piece.shape).permute(0, 3, 1, 2))


def four_channel_view(images: Tensor) -> Tensor | None:
    """uint8 [N, 3, H, W] in channels_last as [N, 4, H, W] over the same bytes: the fourth is the next pixel's first.

    So one kernel can read three channels and write four. None where the layout is another, or where the last pixel has
    no byte behind it.
    """
    count, channels, height, width = images.shape
    end = images.storage_offset() + images.numel()
    if images.stride() != (height * width * channels, 1, width * channels, channels):
        return None
    if images.untyped_storage().nbytes() <= end:
        return None
    return images.as_strided((count, channels + 1, height, width), images.stride())


def on_cpu(batches: Iterator[HostBatch], normalise: Normalise, mix: MixBatch | None) -> Iterator[Batch]:
    """Normalise in the calling thread; the loader's memory is free again before the batch is handed out."""
    for host in batches:
        images, targets = normalise(host.images), host.targets.clone()
        host.release()
        yield Batch(*(mix(images, targets, host.number) if mix else (images, targets)))


def on_cuda(
    batches: Iterator[HostBatch], normalise: Normalise, mix: MixBatch | None, device: torch.device, ahead: int
) -> Iterator[Batch]:
    """Copy and normalise on a side stream, `ahead` batches before they are asked for."""
    side = torch.cuda.Stream(device)
    queue: deque[tuple[Batch, torch.cuda.Event]] = deque()
    copied: deque[tuple[torch.cuda.Event, Callable[[], None]]] = deque()

    def start(host: HostBatch) -> None:
        with torch.cuda.stream(side):
            raw = normalise.to_device(host.images)
            targets = host.targets.to(device, non_blocking=True)
            after_copy = torch.cuda.Event()
            after_copy.record(side)
            images = normalise(raw)
            if mix:
                images, targets = mix(images, targets, host.number)
            done = torch.cuda.Event()
            done.record(side)
        queue.append((Batch(images, targets), done))
        copied.append((after_copy, host.release))

    def take() -> Batch:
        batch, done = queue.popleft()
        current = torch.cuda.current_stream(device)
        current.wait_event(done)
        batch.images.record_stream(current)  # else the allocator would reuse the memory on the side stream
        batch.targets.record_stream(current)
        return batch

    try:
        for host in batches:
            start(host)
            while copied and copied[0][0].query():
                copied.popleft()[1]()
            if len(copied) > ahead + 1:  # the host waits for the oldest copy: its memory is needed for the next batch
                event, release = copied.popleft()
                event.synchronize()
                release()
            if len(queue) > ahead:
                yield take()
        while queue:
            yield take()
    finally:
        for event, release in copied:  # the host waits: the copies still read the loader's memory
            event.synchronize()
            release()
