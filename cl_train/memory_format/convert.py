"""Converting the parameters and buffers of a model from one memory format to another, in place."""

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cl_train.config.schema import CONVERSIONS, ConfigError
from cl_train.config.validation import suggest
from cl_train.memory_format.layout import (
    CHANNELS_LAST,
    CONVOLUTIONS,
    MEMORY_FORMAT_NAMES,
    MEMORY_FORMATS,
    Layout,
    classify,
    named_tensors,
    refuse_lazy,
    to_memory_format,
)

Predicate = Callable[[str, nn.Module], bool]
MODES = (*CONVERSIONS, "none")
_DISTRIBUTED = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
# The original of a parametrised tensor belongs to the parametrised module.
_WITHIN_MODULE = re.compile(r"(^|\.)parametrizations\..*|\.?[^.]*$")


@dataclass
class ConversionReport:
    """Names of the tensors of 4 or 5 dimensions: those changed, and those left with the reason."""

    mode: str
    memory_format: torch.memory_format
    changed: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    ambiguous: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    tensors: int = 0  # parameters, and buffers of 4 or 5 dimensions
    moved_bytes: int = (
        0  # of tensors that were reordered; of ambiguous ones only the strides change
    )

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
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def convert(
    model: Any,
    mode: str | Layout = "full",
    select: Iterable[str] | Predicate | None = None,
    memory_format: torch.memory_format | str = torch.channels_last,
) -> ConversionReport:
    """Convert the parameters and buffers of `model` in place; their values do not change.

    Each Parameter stays the same object, so optimizers, hooks, tied weights and `requires_grad` are
    unaffected; gradients are converted too. Convert after building and loading the model, and
    before DDP, EMA and the first compiled call. `memory_format=torch.contiguous_format` converts
    back.

    Args:
        model: an `nn.Module` (eager, `torch.fx`, scripted, traced, compiled) or a `torch.export`
            program.
        mode: "full", every tensor with 4 or 5 dimensions, as `model.to(memory_format=...)`;
            "conv", those of modules that are convolutions, as
            `torch.nn.utils.convert_conv2d_weight_memory_format`; "select", those of the selected
            modules; "none", nothing. Exported programs: full and none only. A `Layout` stands for
            all three arguments.
        select: for mode "select": shell patterns of module names (a pattern includes the module's
            children), or a predicate of (name, module).
        memory_format: `channels_last` or `channels_last_3d`, which are equivalent here: tensors of
            4 dimensions become channels_last, tensors of 5 channels_last_3d; or
            `contiguous_format`. Or its name.

    Raises ConfigError: unknown mode; a pattern that matches no module; a lazy module; a model that
    is, contains or is inside DDP or FSDP; sharded parameters.
    """
    if isinstance(mode, Layout):
        return convert(model, mode.conversion, mode.select, mode.memory_format)
    if mode not in MODES:
        raise ConfigError(
            f"conversion={mode}: no such mode; use {', '.join(MODES)}{suggest(mode, MODES)}"
        )
    memory_format = MEMORY_FORMATS.get(memory_format, memory_format)  # type: ignore[arg-type]
    if memory_format not in MEMORY_FORMAT_NAMES:
        known = f"{', '.join(MEMORY_FORMATS)}{suggest(str(memory_format), MEMORY_FORMATS)}"
        raise ConfigError(f"a model cannot be converted to {memory_format}; use {known}")
    refuse_lazy(model)
    report = ConversionReport(mode, memory_format)
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    if isinstance(model, nn.DataParallel):
        report.notes.append(
            "DataParallel loses the format when it replicates (pytorch/pytorch#37484): use torchrun"
        )
    tensors = named_tensors(model)
    _refuse_distributed(model, tensors)
    report.tensors = sum(
        isinstance(tensor, nn.Parameter) or tensor.dim() in CHANNELS_LAST
        for tensor in tensors.values()
    )
    selected = set(tensors) if mode == "full" else set()
    if mode in ("conv", "select"):
        chosen = _chosen(model, mode, select)
        selected = {name for name in tensors if _WITHIN_MODULE.sub("", name) in chosen}
        if not chosen:
            report.notes.append(f"conversion={mode} takes modules, and finds none: use full")
    for group in _groups_sharing_memory(tensors):
        _convert_group(group, selected, memory_format, report)
    return report


def _refuse_distributed(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Buckets of DDP and shards of FSDP have the old strides; a wrapper tensor hides its own."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    kinds: list[type] = [type(module) for module in modules]
    refused = [kind for kind in kinds if _DISTRIBUTED & {base.__name__ for base in kind.__mro__}]
    images = [tensor for tensor in tensors.values() if tensor.dim() in CHANNELS_LAST]
    refused += [type(tensor) for tensor in images if is_traceable_wrapper_subclass(tensor)]
    if refused:
        what = f"it has {refused[0].__name__}, which keeps the old strides (pytorch/pytorch#47163)"
        raise ConfigError(f"convert the model before it is wrapped or sharded: {what}")


def _chosen(model: Any, mode: str, select: Iterable[str] | Predicate | None) -> set[str]:
    """Names of the convolutions, or of the modules that `select` takes; a pattern's with
    children.
    """
    if isinstance(model, torch.export.ExportedProgram):
        raise ConfigError(f"conversion={mode}: an exported program has no modules; use full")
    modules = dict(model.named_modules(remove_duplicate=False))
    if mode == "conv":
        names = {kind.__name__ for kind in CONVOLUTIONS}  # the `original_name` of scripted modules
        return {
            name
            for name, module in modules.items()
            if isinstance(module, CONVOLUTIONS) or getattr(module, "original_name", "") in names
        }
    if callable(select):
        return {name for name, module in modules.items() if select(name, module)}
    if not (patterns := list(select or ())):
        raise ConfigError(
            f"conversion={mode} needs select=<module names>, for instance select='layer1*,layer2*'"
        )
    heads = {pattern: fnmatch.filter(modules, pattern) for pattern in patterns}
    unknown = [pattern for pattern in patterns if not heads[pattern]]
    if unknown:
        what = "the model has no such module"
        raise ConfigError([f"select={name}: {what}{suggest(name, modules)}" for name in unknown])
    prefixes = tuple(f"{head}." for names in heads.values() for head in names)
    return {name for name in modules if f"{name}.".startswith(prefixes)}


def _groups_sharing_memory(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Strided tensors grouped by overlapping memory; most groups hold one tensor."""
    strided = [item for item in tensors.items() if item[1].layout == torch.strided]
    groups: list[dict[str, torch.Tensor]] = []
    device, end = None, 0
    for name, tensor in sorted(strided, key=lambda item: (str(item[1].device), item[1].data_ptr())):
        start = tensor.data_ptr()
        # Meta tensors are all at address 0.
        if tensor.device != device or start >= end or start == 0:
            groups.append({})
            device, end = tensor.device, start
        groups[-1][name] = tensor
        dimensions = zip(tensor.shape, tensor.stride(), strict=True)
        extent = 1 + sum((size - 1) * stride for size, stride in dimensions)
        end = max(end, start + extent * tensor.element_size() if tensor.numel() else start)
    position = {name: index for index, name in enumerate(tensors)}
    return sorted(groups, key=lambda group: min(position[name] for name in group))


@torch.no_grad()
def _convert_group(
    group: Mapping[str, torch.Tensor],
    selected: set[str],
    memory_format: torch.memory_format,
    report: ConversionReport,
) -> None:
    """Convert the tensors of one memory block; they still share memory afterwards."""
    candidates = {name: tensor for name, tensor in group.items() if tensor.dim() in CHANNELS_LAST}
    if not candidates:
        return
    first = next(iter(candidates.values()))
    report.ambiguous += [name for name in candidates if classify(candidates[name]) == "ambiguous"]
    views = {(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in group.values()}
    dimensions = zip(first.shape, first.stride(), strict=True)
    reason = ""
    if not selected & candidates.keys():
        reason = "not selected"
    elif len(views) > 1:
        reason = "shares its memory with a tensor of another shape"
    elif any(size > 1 and stride == 0 for size, stride in dimensions):
        reason = "expanded (stride 0): converting it would allocate its full size"
    if reason:
        report.left |= dict.fromkeys(candidates, reason)
        return
    converted = to_memory_format(first.detach(), memory_format)
    if converted.stride() == first.stride():
        report.unchanged += candidates
        return
    report.changed += candidates
    if classify(first) != "ambiguous":
        report.moved_bytes += len(candidates) * converted.nbytes
    for tensor in {id(tensor): tensor for tensor in candidates.values()}.values():
        # The object must stay: optimizers, hooks and tied modules refer to it.
        tensor.data = converted
        if tensor.is_leaf and tensor.grad is not None and tensor.grad.layout == torch.strided:
            tensor.grad.data = to_memory_format(tensor.grad, memory_format)
