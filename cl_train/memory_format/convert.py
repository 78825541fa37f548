"""A `Layout`, and the conversion of a model's parameters and buffers to it, in place."""

import fnmatch
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cl_train.config.schema import CONVERSIONS
from cl_train.config.validation import suggest
from cl_train.errors import ConfigError
from cl_train.memory_format.layout import (
    CHANNELS_LAST_BY_DIM,
    CONVOLUTIONS,
    MEMORY_FORMAT_NAMES,
    MEMORY_FORMATS,
    memory_format_of,
    model_memory_format,
    named_tensors,
    refuse_lazy,
    to_memory_format,
    uncompiled,
)
from cl_train.system.torch_state import own_torch_state

Predicate = Callable[[str, nn.Module], bool]
_DISTRIBUTED = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
# The original of a parametrised tensor counts as the parametrised module's own.
_WITHIN_MODULE = re.compile(r"(^|\.)parametrizations\..*|\.?[^.]*$")


@dataclass(frozen=True)
class Layout:
    """The memory format of the input and, with the arguments of `convert`, of the model."""

    memory_format: torch.memory_format = torch.channels_last
    conversion: str = "full"
    select: tuple[str, ...] = ()

    @property
    def is_channels_last(self) -> bool:
        return self.memory_format != torch.contiguous_format

    @property
    def name(self) -> str:
        suffix = "" if self.conversion == "full" else f"_{self.conversion}"
        return MEMORY_FORMAT_NAMES[self.memory_format] + suffix


CONTIGUOUS = Layout(torch.contiguous_format)
CHANNELS_LAST = Layout()
CHANNELS_LAST_CONV = Layout(conversion="conv")
LAYOUTS = {layout.name: layout for layout in (CONTIGUOUS, CHANNELS_LAST, CHANNELS_LAST_CONV)}


def layout_of(model: nn.Module) -> Layout:
    """Returns the layout of `model`; if it is partly converted, one that selects these modules."""
    if (name := model_memory_format(model)) != "mixed":
        return LAYOUTS[name]
    formats = [(n, memory_format_of(m.parameters(False))) for n, m in model.named_modules()]
    names = (name for name, found in formats if found == "channels_last")
    return Layout(conversion="select", select=tuple(names))


@dataclass
class ConversionReport:
    """Names the tensors of 4 or 5 dimensions that were changed, and those left, with the reason."""

    mode: str
    memory_format: torch.memory_format
    tensors: int  # parameters, and buffers of 4 or 5 dimensions
    changed: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "memory_format": MEMORY_FORMAT_NAMES[self.memory_format]}

    def __str__(self) -> str:
        mode = "" if self.mode == "full" else f" (conversion={self.mode})"
        name = MEMORY_FORMAT_NAMES[self.memory_format]
        first = f"{name}{mode}: {len(self.changed)} of {self.tensors} tensors changed"
        if self.unchanged:
            first += f", {len(self.unchanged)} had the format already"
        lines = [first]
        for reason in dict.fromkeys(self.left.values()):
            names = [name for name, why in self.left.items() if why == reason]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines.append(f"  left unchanged, {reason}: {', '.join(names[:3])}{more}")
        return "\n".join(lines)


@own_torch_state
def convert(
    model: Any,
    mode: str | Layout = "full",
    select: Iterable[str] | Predicate | None = None,
    memory_format: torch.memory_format | str = torch.channels_last,
) -> ConversionReport:
    """Convert the parameters and buffers of `model` in place; their values do not change.

    Parameters stay the same objects, with hooks, ties and `requires_grad`; gradients are converted,
    too. Convert after building and loading the model, before DDP, EMA and the first compiled call.

    Args:
        model: an `nn.Module` (eager, `torch.fx`, scripted, traced, compiled) or a `torch.export`
            program.
        mode: "full", every tensor with 4 or 5 dimensions, as `model.to(memory_format=...)`;
            "conv", those of convolutions, as `torch.nn.utils.convert_conv2d_weight_memory_format`;
            "select", those of the selected modules. Exported programs: full only. A `Layout`
            stands for all three arguments.
        select: for mode "select": shell patterns of module names (a pattern includes the module's
            children), or a predicate of (name, module).
        memory_format: `channels_last` or `channels_last_3d`, which are the same here, or
            `contiguous_format`; or its name.

    Raises ConfigError: unknown mode; a pattern that matches no module; a lazy module; a model that
    is, contains or is inside DDP or FSDP; sharded parameters.
    """
    if isinstance(mode, Layout):
        return convert(model, mode.conversion, mode.select, mode.memory_format)
    if mode not in CONVERSIONS:
        near = suggest(mode, CONVERSIONS)
        raise ConfigError(f"conversion={mode}: no such mode; use {', '.join(CONVERSIONS)}{near}")
    memory_format = MEMORY_FORMATS.get(memory_format, memory_format)  # type: ignore[arg-type]
    if memory_format not in MEMORY_FORMAT_NAMES:
        choices = f"{', '.join(MEMORY_FORMATS)}{suggest(str(memory_format), MEMORY_FORMATS)}"
        raise ConfigError(f"a model cannot be converted to {memory_format}; use {choices}")
    refuse_lazy(model)
    model = uncompiled(model)
    tensors = named_tensors(model)
    _refuse_distributed(model, tensors)
    selected = set(tensors)
    if mode != "full":
        chosen = _chosen(model, mode, select)
        selected = {name for name in tensors if _WITHIN_MODULE.sub("", name) in chosen}
    images = {name for name, tensor in tensors.items() if tensor.dim() in CHANNELS_LAST_BY_DIM}
    parameters = {name for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}
    report = ConversionReport(mode, memory_format, len(images | parameters))
    _convert_tensors(tensors, selected, memory_format, report)
    return report


@torch.no_grad()
def _convert_tensors(
    tensors: Mapping[str, torch.Tensor],
    selected: set[str],
    memory_format: torch.memory_format,
    report: ConversionReport,
) -> None:
    """Converts the `selected` tensors; tensors that shared memory still share it afterwards."""
    names_of = defaultdict[Any, list[str]](list)  # of the tensors with the same elements
    for name, tensor in tensors.items():
        if tensor.layout == torch.strided:
            names_of[view_of(tensor)].append(name)
    overlapping = _overlapping(names_of)

    for view, names in names_of.items():
        values = tensors[names[0]].detach()
        if values.dim() not in CHANNELS_LAST_BY_DIM:
            continue
        if selected.isdisjoint(names):
            report.left |= dict.fromkeys(names, "not selected")
            continue
        if view in overlapping:
            reason = "expanded, or shares its memory with a tensor of another shape"
            report.left |= dict.fromkeys(names, reason)
            continue
        converted = to_memory_format(values, memory_format)
        if converted is values:
            report.unchanged += names
            continue
        report.changed += names
        for tensor in (tensors[name] for name in names):
            # The object must stay: optimizers, hooks and tied modules refer to it.
            tensor.data = converted
            if tensor.is_leaf and tensor.grad is not None and tensor.grad.layout == torch.strided:
                tensor.grad.data = to_memory_format(tensor.grad, memory_format)


def view_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns a key that is equal for tensors that are the same elements of the same memory."""
    storage = StorageWeakRef(tensor.untyped_storage()).cdata  # data_ptr is 0 on meta and if empty
    return storage, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()


def _overlapping(views: Iterable[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
    """Returns views whose bytes, from the first to the last, overlap another's or their own."""
    overlapping = set[Any]()
    extents: list[tuple[int, int, int, Any]] = []  # storage, first byte, byte after the last, view
    for view in views:
        storage, offset, dtype, shape, stride = view
        elements = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if shape.numel() > elements:  # expanded
            overlapping.add(view)
        if shape.numel() > 0:
            start = offset * dtype.itemsize
            extents.append((storage, start, start + elements * dtype.itemsize, view))

    by_bytes = sorted(extents, key=lambda extent: extent[:3])
    for index, (storage, _, end, view) in enumerate(by_bytes):
        for other_storage, start, _, other in by_bytes[index + 1 :]:
            if other_storage != storage or start >= end:
                break
            overlapping |= {view, other}
    return overlapping


def _refuse_distributed(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises ConfigError: buckets of DDP or shards of FSDP would keep the old strides, or a wrapper
    tensor hides its own.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    kinds: list[type] = [type(module) for module in modules]
    refused = [kind for kind in kinds if _DISTRIBUTED & {base.__name__ for base in kind.__mro__}]
    images = [tensor for tensor in tensors.values() if tensor.dim() in CHANNELS_LAST_BY_DIM]
    refused += [type(tensor) for tensor in images if is_traceable_wrapper_subclass(tensor)]
    if refused:
        what = f"it has {refused[0].__name__}, which keeps the old strides (pytorch/pytorch#47163)"
        raise ConfigError(f"convert the model before it is wrapped or sharded: {what}")


def _is_convolution(name: str, module: nn.Module) -> bool:
    names = {kind.__name__ for kind in CONVOLUTIONS}
    is_scripted = getattr(module, "original_name", "") in names
    return is_scripted or isinstance(module, CONVOLUTIONS)


def _chosen(model: Any, mode: str, select: Iterable[str] | Predicate | None) -> set[str]:
    if isinstance(model, torch.export.ExportedProgram):
        raise ConfigError(f"conversion={mode}: an exported program has no modules; use full")
    modules = dict(model.named_modules(remove_duplicate=False))
    if mode == "conv":
        select = _is_convolution
    if callable(select):
        return {name for name, module in modules.items() if select(name, module)}
    if not (patterns := list(select or ())):
        example = "for instance select='layer1*,layer2*'"
        raise ConfigError(f"conversion={mode} needs select=<module names>, {example}")
    heads = {pattern: fnmatch.filter(modules, pattern) for pattern in patterns}
    unknown = [pattern for pattern in patterns if not heads[pattern]]
    if unknown:
        what = "the model has no such module"
        raise ConfigError([f"select={name}: {what}{suggest(name, modules)}" for name in unknown])
    prefixes = tuple(f"{head}." for names in heads.values() for head in names)
    return {name for name in modules if f"{name}.".startswith(prefixes)}
