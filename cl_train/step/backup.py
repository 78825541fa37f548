"""What running a model changes besides its weights, and how it is brought back: buffers, gradients,
the random state.
"""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn


class BufferBackup:
    """The last good values of the models' buffers: a skipped update changes no weights, but NaN
    activations have already changed the running statistics.
    """

    def __init__(self, **models: nn.Module) -> None:
        self._models = nn.ModuleDict(models)  # a buffer's name begins with the name of its model
        self._copy()

    @torch.no_grad()
    def _copy(self) -> None:
        self.good = {name: buffer.clone() for name, buffer in self._models.named_buffers()}

    @torch.no_grad()
    def keep_or_restore(self, is_bad: torch.Tensor) -> None:
        """Restores the good values if `is_bad`, a bool []; otherwise the present ones become good.
        Elements that are not finite are always restored: a variance may overflow while the loss is
        finite. The host waits only if a buffer was replaced by one of another shape or dtype.
        """
        buffers = dict(self._models.named_buffers())
        pairs = [(buffer, self.good.get(name)) for name, buffer in buffers.items()]
        if any(good is None or _kind(buffer) != _kind(good) for buffer, good in pairs):
            if is_bad:
                self.restore()
            self._copy()
            return
        alike: dict[object, list[str]] = {}  # in few launches
        for name, buffer in buffers.items():
            if _can_change(buffer):
                alike.setdefault((buffer.dtype, buffer.device), []).append(name)
        for names in alike.values():
            present = [buffers[name] for name in names]
            values = torch.cat([buffer.flatten() for buffer in present])
            good = torch.cat([self.good[name].flatten() for name in names])
            kept = torch.where(is_bad | ~values.isfinite(), good, values)
            parts = kept.split([buffer.numel() for buffer in present])
            shaped = [part.view(b.shape) for part, b in zip(parts, present, strict=True)]
            torch._foreach_copy_(present, shaped)
            self.good.update(zip(names, shaped, strict=True))

    @torch.no_grad()
    def mend(self) -> None:
        for name, buffer in self._models.named_buffers():
            good = self.good.get(name, buffer)
            if _kind(buffer) == _kind(good) and _can_change(buffer):
                buffer.copy_(torch.where(buffer.isfinite(), buffer, good))

    @torch.no_grad()
    def set_good(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, value in values.items():
            if name in self.good and self.good[name].shape == value.shape:
                self.good[name].copy_(value)

    @torch.no_grad()
    def restore(self) -> None:
        """Copies back what has changed, by name: a forward pass may have replaced a buffer. The
        host waits.
        """
        for name, buffer in self._models.named_buffers():
            good = self.good.get(name)
            if good is None or buffer.is_meta:
                continue
            if _kind(buffer) != _kind(good):
                set_buffer(self._models, name, good.clone())
            elif buffer.layout != torch.strided or not torch.equal(buffer, good):
                buffer.copy_(good)


def set_buffer(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Copies `value` into a buffer, or replaces one of another shape, dtype or device."""
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    present = getattr(module, attribute, None)
    if isinstance(present, torch.Tensor) and _kind(present) == _kind(value):
        present.copy_(value)
    else:
        setattr(module, attribute, value)


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _can_change(buffer: torch.Tensor) -> bool:
    """Whether `buffer` is neither expanded nor sparse, and has values."""
    return buffer.layout == torch.strided and not buffer.is_meta and 0 not in buffer.stride()


def random_state(device: torch.device) -> dict[str, Any]:
    """Returns the states of Python's and NumPy's generators, and torch's for CPU and `device`."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    state = {"cpu": torch.get_rng_state(), "python": random.getstate()}
    # int64: torch 2.15 pickles a tensor of uint32 that it cannot read again.
    state["numpy"] = (kind, torch.from_numpy(np.asarray(keys, np.int64)), *rest)
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Sets the generators to `state`; one that an older checkpoint lacks stays as it is."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    if "python" in state:
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))


@contextmanager
def random_state_restored(device: torch.device) -> Iterator[None]:
    state = random_state(device)
    try:
        yield
    finally:
        set_random_state(state, device)


@contextmanager
def module_restored(model: nn.Module) -> Iterator[None]:
    """Restores, after the block, which parameters train and the mode of each module."""
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for parameter, is_trained in trained:
            parameter.requires_grad_(is_trained)
        for module, mode in modes:
            vars(module).pop("train", None)  # of `freeze`
            module.training = mode


@contextmanager
def state_restored(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Begins without gradients; at the end restores them, buffers and random generators."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = BufferBackup(model=model)
    model.zero_grad(set_to_none=True)
    try:
        with random_state_restored(device):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        buffers.restore()
