"""Run any model on any batch: its inputs, a scalar loss of its outputs, its state restored, its failures explained."""

import random
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from cl_train.config.schema import ConfigError
from cl_train.system.machine import is_out_of_memory

TORCH = f"{Path(torch.__file__).parent}/"
_PACKAGE = f"{Path(__file__).parents[1]}/"


def call_model(model: nn.Module, batch: Any) -> Any:
    """`batch`: the model's input, a tuple or list of its inputs, or a dict of its keyword arguments.

    A list of images [C,H,W], of different sizes, is the one input of a detection model.
    """
    if isinstance(batch, list) and all(isinstance(item, torch.Tensor) and item.dim() == 3 for item in batch):
        return model(batch)
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def output_tensors(output: Any, key: str | int | None = None) -> list[torch.Tensor]:
    """The floating-point (or complex) tensors of a model's output, at any depth; with `key` those of one entry of it: a
    dict's key, an attribute's name, or a tuple's index. Raises ConfigError: no such entry, or no such tensor.
    """
    found = tensors_in(output if key is None else _entry(output, key))
    tensors = [tensor for tensor in found if tensor.is_floating_point() or tensor.is_complex()]
    if not tensors:
        what = "its output" if key is None else f"its entry {key!r}"
        raise ConfigError(
            f"the model returned a {type(output).__name__} and {what} holds no floating-point tensor to differentiate: "
            "select another entry (output=KEY, output_entry=KEY), pass a loss, or run forward only (backward=false)"
        )
    return tensors


def mean_square(tensors: list[torch.Tensor]) -> torch.Tensor:
    """A loss whose gradient has the output's strides; the gradient of a plain mean is expanded (stride 0)."""
    return torch.stack([tensor.abs().float().square().sum() / max(tensor.numel(), 1) for tensor in tensors]).sum()


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors at any depth, also of subclasses of dict and of dataclasses."""
    found = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif isinstance(leaf, Mapping):
            found += tensors_in(list(leaf.values()))
        elif is_dataclass(leaf):
            found += tensors_in(vars(leaf))
    return found


def _entry(output: Any, key: str | int) -> Any:
    try:
        if isinstance(output, Mapping):
            return output[key]
        if isinstance(output, list | tuple) and str(key).lstrip("-").isdigit():
            return output[int(key)]
        return getattr(output, str(key))
    except (LookupError, AttributeError):
        known = ", ".join(map(str, output)) if isinstance(output, Mapping) else f"a {type(output).__name__}"
        raise ConfigError(f"output={key}: the model's output has no such entry (it is {known})") from None


@contextmanager
def random_state_restored(device: torch.device) -> Iterator[None]:
    """Restore the generators of Python, numpy, torch's CPU and `device` at the end."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


class BufferBackup:
    """The last good values of the models' buffers (BatchNorm statistics), on their device.

    A skipped update does not change the weights, but NaN activations have already changed the running statistics.
    """

    def __init__(self, *models: nn.Module) -> None:
        self._models = nn.ModuleList(models)
        self._copy()

    @torch.no_grad()
    def _copy(self) -> None:
        """The values of one dtype and device are one tensor with a view for each buffer: few launches in `settle`."""
        buffers = dict(self._models.named_buffers())
        self._kinds = {name: _kind(buffer) for name, buffer in buffers.items()}
        self._copies = {name: buffer.clone() for name, buffer in buffers.items() if not self._kinds[name][-1]}
        self._groups: list[tuple[list[str], torch.Tensor]] = []
        for kind in {kind[1:] for kind in self._kinds.values() if kind[-1]}:
            names = [name for name, found in self._kinds.items() if found[1:] == kind]
            good = torch.cat([buffers[name].flatten() for name in names])
            self._groups.append((names, good))
            for name, part in zip(names, good.split([buffers[name].numel() for name in names]), strict=True):
                self._copies[name] = part.view(buffers[name].shape)

    @torch.no_grad()
    def settle(self, is_bad: torch.Tensor) -> None:
        """Restore the good values if the bool [] `is_bad`, else the present ones become good.

        The device decides; the host waits for it only if a buffer was replaced by one of another shape or dtype.
        """
        buffers = dict(self._models.named_buffers())
        if {name: _kind(buffer) for name, buffer in buffers.items()} != self._kinds:
            if is_bad:
                self.restore()
            self._copy()
            return
        for names, good in self._groups:
            present = [buffers[name] for name in names]
            torch.where(is_bad, good, torch.cat([buffer.flatten() for buffer in present]), out=good)
            torch._foreach_copy_(present, [self._copies[name] for name in names])

    @torch.no_grad()
    def restore(self) -> None:
        """Copy back what has changed, by name: a forward pass may have replaced a buffer. The host waits."""
        for name, buffer in self._models.named_buffers():
            copy = self._copies.get(name)
            if copy is None or buffer.is_meta:
                continue
            if _kind(buffer) != self._kinds[name]:
                module, _, attribute = name.rpartition(".")
                setattr(self._models.get_submodule(module), attribute, copy.clone())
            elif buffer.layout != torch.strided or not torch.equal(buffer, copy):
                buffer.copy_(copy)


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device, bool]:
    """The last: whether it can be written, as it is not expanded, not sparse, and has values."""
    is_dense = tensor.layout == torch.strided and not tensor.is_meta and 0 not in tensor.stride()
    return tensor.shape, tensor.dtype, tensor.device, is_dense


@contextmanager
def state_restored(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Run the block without gradients from before; restore them, the buffers and the random generators at the end."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = BufferBackup(model)
    model.zero_grad(set_to_none=True)
    try:
        with random_state_restored(device):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        buffers.restore()


@contextmanager
def failure_explained(what: str, remedy: str, *, memory_too: bool = True) -> Iterator[None]:
    """Turn an exception of a model, the user's code, into a ConfigError; one of memory only with `memory_too`."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if is_out_of_memory(error) and not memory_too:
            raise
        raise ConfigError(f"{what}: {explain_failure(error)}; {remedy}") from error


def explain_failure(error: BaseException) -> str:
    """One line about an exception raised while a model ran: its message, the line of the model's code, a remedy."""
    if isinstance(error, ConfigError):
        return str(error)
    message = " ".join(str(error).split())[:600]
    where = ""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((TORCH, _PACKAGE)):
            where = f" at {short_path(frame.filename)}:{frame.lineno} `{frame.line}`"
            break
    if "view size is not compatible" in str(error):
        return f"{where.removeprefix(' at ') or 'a .view'} needs contiguous memory: use .reshape instead of .view"
    if is_out_of_memory(error):
        return f"out of memory{where}: use a smaller batch or image size"
    return f"{type(error).__name__}{where}: {message}" if message else f"{type(error).__name__}{where}"


def short_path(path: str) -> str:
    """A source file relative to site-packages or to the current folder."""
    _, found, tail = path.rpartition("site-packages/")
    if found:
        return tail
    return str(Path(path).relative_to(Path.cwd())) if Path(path).is_relative_to(Path.cwd()) else path
