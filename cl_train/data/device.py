"""From uint8 batches on the host to normalised batches on the device."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cl_train.system.tensors import map_tensors, tensors_in
from cl_train.system.torch_state import own_torch_state

# (images, targets, epoch, number of the batch) -> (images, targets)
MixLabels = Callable[[Tensor, Tensor, int, int], tuple[Tensor, Tensor]]
COPIES_UNDER_WAY = 1  # the most that run to a GPU when the next batch of the loader is requested
_CHUNK_IMAGES = 8  # 5 MB of float32 at 224 px
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class DeviceFormat:
    """Device, dtype and memory format of the model's input."""

    device: torch.device
    dtype: torch.dtype
    memory_format: torch.memory_format

    def place(self, images: Tensor) -> Tensor:
        """Returns images [N, C, H, W] in this format, without a copy if they have it."""
        return images.to(self.device, self.dtype, memory_format=self.memory_format)


@dataclass(frozen=True)
class Batch:
    """Normalised images, float [N, 3, H, W], and labels on the device: int64 [N], or float [N,
    classes] after MixUp.
    """

    images: Tensor
    targets: Tensor


class RawBatch(NamedTuple):
    """Batch `number` of `epoch`, not normalised: images uint8 [N, 3, H, W] in channels_last and
    targets int64 [N], in the loader's memory (see `HostLoader.batches`) or copied to the device.
    """

    images: Tensor
    targets: Tensor
    number: int
    epoch: int


class Normalise:
    """Computes (x / 255 - mean) / std in float32, for the dtype and memory format of `form`. Raises
    ValueError.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], form: DeviceFormat) -> None:
        are_numbers = all(map(math.isfinite, [*mean, *std]))
        if not len(mean) == len(std) > 0 or not are_numbers or min(std) <= 0:
            raise ValueError(
                f"mean {list(mean)} and std {list(std)}: one number per channel each, std above 0"
            )
        if not form.dtype.is_floating_point or form.dtype.itemsize == 1:
            raise ValueError(
                f"dtype={form.dtype}: normalised images need float32, float16, bfloat16 or float64"
            )
        if form.memory_format not in (torch.channels_last, torch.contiguous_format):
            raise ValueError(
                f"memory_format={form.memory_format}: use torch.channels_last or"
                " torch.contiguous_format"
            )
        self.format = form
        scale = [1 / (255 * s) for s in std]
        offset = [-m / s for m, s in zip(mean, std, strict=True)]
        self._scale = torch.tensor(scale, dtype=torch.float32, device=form.device)
        self._offset = torch.tensor(offset, dtype=torch.float32, device=form.device)

    def __call__(self, images: Tensor) -> Tensor:
        """Normalises uint8 [N, C, H, W] on the device, of any layout; floats are only cast."""
        form = self.format
        if images.is_floating_point():
            on_host = form.device.type == "cpu"  # in the loader's memory, which is filled again
            return images.to(form.dtype, memory_format=form.memory_format, copy=on_host)
        layout: dict[str, Any] = {"dtype": form.dtype, "memory_format": form.memory_format}
        out = torch.empty(images.shape, device=form.device, **layout)
        if form.device.type != "cpu":
            self.in_one_kernel(images, out)
            return out
        # Chunks that fit the cache, as rows of W*C numbers: broadcasting over C is not vectorised,
        # seven times slower.
        count, channels, _, width = images.shape
        scale, offset = self._scale.repeat(width), self._offset.repeat(width)
        for first in range(0, count, _CHUNK_IMAGES):
            chunk = images[first : first + _CHUNK_IMAGES].permute(0, 2, 3, 1)
            rows = chunk.reshape(-1, width * channels).to(torch.float32)
            torch.addcmul(offset, rows, scale, out=rows)
            out[first : first + _CHUNK_IMAGES].copy_(rows.view(chunk.shape).permute(0, 3, 1, 2))
        return out

    def in_one_kernel(self, images: Tensor, out: Tensor) -> None:
        """Writes the normalised images, computed in float32, into `out`: on CUDA without an
        intermediate tensor.
        """
        torch.addcmul(self._offset.view(-1, 1, 1), images, self._scale.view(-1, 1, 1), out=out)


def to_device(
    batches: Iterable[RawBatch], normalise: Normalise, mix: MixLabels | None = None
) -> Iterator[Batch]:
    """Returns the loader's batches on the device, normalised, then mixed; on CUDA one is ready in
    advance.
    """
    device = normalise.format.device

    def prepare(moved: RawBatch) -> tuple[Tensor, Tensor]:
        images, targets = normalise(moved.images), moved.targets
        if device.type == "cpu":  # nothing was moved, and the loader's memory is filled again soon
            targets = targets.clone()
        return mix(images, targets, moved.epoch, moved.number) if mix else (images, targets)

    return (Batch(*pair) for pair in _prepared(batches, prepare, device, ahead=1))


@cache  # memory is cached per stream: a stream per epoch would keep that of every epoch
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _prepared(
    batches: Iterable[Any], prepare: Callable[[Any], Any], device: torch.device, ahead: int
) -> Iterator[Any]:
    """Yields what `prepare` makes of each batch on the device; on CUDA it works on a side stream,
    `ahead` batches in advance.
    """
    if device.type != "cuda":
        for host in batches:
            yield prepare(map_tensors(lambda tensor: tensor.to(device), host))
        return
    side = _side_stream(device)
    move = partial(Tensor.to, device=device, non_blocking=True)
    ready = deque[tuple[Any, torch.cuda.Event]]()

    def take() -> Any:
        batch, prepared = ready.popleft()
        # The host waits for a copy that began a step ago: the loader fills its memory again.
        prepared.synchronize()
        current = torch.cuda.current_stream(device)
        for tensor in tensors_in(batch):
            if tensor.is_cuda:
                # else the allocator would reuse the memory on the side stream
                tensor.record_stream(current)
        return batch

    try:
        for host in batches:
            with torch.cuda.stream(side):
                ready.append((prepare(map_tensors(move, host)), side.record_event()))
            if len(ready) > ahead:
                yield take()
        while ready:
            yield take()
    finally:
        side.record_event().synchronize()  # the copies still read the loader's memory


class DevicePrefetcher:
    """For a training loop of your own: iterates over a DataLoader's batches on the device, copied
    and normalised in advance: `for images, targets in DevicePrefetcher(loader, "cuda"): ...`.

    On CUDA, copies and kernels run on a side stream; copies overlap with the computation if the
    loader pins its memory. On a CPU, nothing is prepared in advance.

    Batches are tensors, or tuples, lists and dicts of them, at any depth. Tensors uint8 [N, C, H,
    W] with a channel for each entry of `mean` are images: they become (x / 255 - mean) / std in
    `dtype` and `memory_format`. If there are none, the first floating-point tensor [N, C, H, W] is
    assumed to be normalised images, and is converted too. Other tensors are only moved, everything
    else is passed on.

    Args:
        loader: iterable over batches, such as a `torch.utils.data.DataLoader`.
        mean, std: a number per channel, on the 0-1 scale. Default: ImageNet's.
        ahead: the number of batches that are prepared in advance on CUDA.

    Raises:
        ValueError: `mean` and `std` of different length, a `std` that is not positive, or a dtype
            or layout that normalised images cannot have.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: str | torch.device,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.channels_last,
        ahead: int = 1,
    ) -> None:
        self._loader, self._ahead, self._channels = loader, ahead, len(mean)
        form = DeviceFormat(torch.device(device), dtype, memory_format)
        self._normalise = Normalise(mean, std, form)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return _prepared(self._loader, self._prepare, self._normalise.format.device, self._ahead)

    @own_torch_state
    def _prepare(self, batch: Any) -> Any:
        form = self._normalise.format
        tensors = [x for x in tensors_in(batch) if x.ndim == 4]
        raw = {id(x) for x in tensors if x.dtype == torch.uint8 and x.shape[1] == self._channels}
        if raw:
            return map_tensors(lambda x: self._normalise(x) if id(x) in raw else x, batch)
        images = next((x for x in tensors if x.is_floating_point()), None)
        if images is None:
            return batch
        return map_tensors(lambda x: form.place(x) if x is images else x, batch)
