"""Memory formats: what layout a tensor or a model has, and converting a model from one to the other.

A channels_last tensor keeps its shape, NCHW, and orders its memory pixel by pixel: C-stride < W-stride < H-stride <
N-stride, where dimensions of size 1 have no say (pytorch/pytorch#23403). With C == 1, or H == W == 1, both orders are
the same bytes: such a tensor is *ambiguous*. Five dimensions (video) have the same two formats, NCDHW and NDHWC.
"""

from __future__ import annotations

import copy
import fnmatch
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from cl_train.config.schema import ConfigError
from cl_train.config.validation import suggest
from cl_train.memory_format.known_issues import advice as advice

Layout = Literal["channels_last", "contiguous", "ambiguous", "other"]
Predicate = Callable[[str, nn.Module], bool]

MODES = ("full", "conv", "select", "none")
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d, nn.Conv3d, nn.ConvTranspose3d)
_CONVOLUTION_NAMES = {kind.__name__ for kind in _CONVOLUTIONS}


# --- one tensor ---------------------------------------------------------------------------------------------


def classify(tensor: torch.Tensor) -> Layout:
    """The layout of a tensor [N,C,H,W] or [N,C,D,H,W] by the order of its strides; dense or a slice of something dense.

    Returns "ambiguous" where both orders hold (C == 1, H == W == 1, no elements), and "other" for any other number of
    dimensions, any other order, and broadcast (stride 0) dimensions.
    """
    if tensor.layout != torch.strided or tensor.dim() not in _CHANNELS_LAST:
        return "other"
    if tensor.numel() == 0:
        return "ambiguous"
    last = tensor.dim() - 1
    is_contiguous = _descends(tensor, range(tensor.dim()))
    is_channels_last = _descends(tensor, (0, *range(2, last + 1), 1))
    if is_contiguous and is_channels_last:
        return "ambiguous"
    return "channels_last" if is_channels_last else "contiguous" if is_contiguous else "other"


def _descends(tensor: torch.Tensor, order: Iterable[int]) -> bool:
    """Whether each dimension in `order`, those of size 1 left out, steps over all that the next ones span."""
    extent = 1  # elements between the first and the last of the dimensions seen so far, innermost first
    for dim in reversed(list(order)):
        size, stride = tensor.size(dim), tensor.stride(dim)
        if size == 1:
            continue
        if stride < extent:
            return False
        extent = stride * (size - 1) + extent
    return True


def in_format(tensor: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """`tensor` with the strides of `memory_format`, size-1 dimensions included; the same object where it has them.

    `.to`, never `.contiguous`: the latter leaves the strides of N1HW and NC11 as they are. Only [N,1,1,1] cannot be
    marked channels_last at all. channels_last means channels_last_3d for a tensor [N,C,D,H,W].
    """
    if memory_format != torch.contiguous_format:
        memory_format = _CHANNELS_LAST[tensor.dim()]
    strides = torch.empty(tensor.shape, device="meta", memory_format=memory_format).stride()
    if tensor.stride() == strides:
        return tensor
    return tensor.clone(memory_format=memory_format)


def like_parameter(state: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """`state` with the strides of `parameter` where their shapes agree; dtype and device of `state` stay.

    Optimizer state restored from a file has the file's strides; mixed strides fall off the fused and foreach kernels
    (pytorch/pytorch#106951).
    """
    if state.shape != parameter.shape or state.stride() == parameter.stride():
        return state
    return torch.empty_like(parameter, dtype=state.dtype, device=state.device, requires_grad=False).copy_(state)


# --- a model ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """One parameter or buffer that `convert` gave new strides."""

    name: str
    shape: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    size_bytes: int
    ambiguous: bool


@dataclass
class ConversionReport:
    """What `convert` did to each tensor with four or five dimensions."""

    mode: str
    memory_format: str
    changed: list[Change] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    ambiguous: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def moved_bytes(self) -> int:
        """Bytes whose order in memory changed; ambiguous tensors only got other strides."""
        return sum(change.size_bytes for change in self.changed if not change.ambiguous)

    def __str__(self) -> str:
        lines = [
            f"{self.memory_format} ({self.mode}): {len(self.changed)} tensors changed "
            f"({self.moved_bytes / 2**20:.1f} MiB), {len(self.unchanged)} already so, {len(self.left)} left, "
            f"{len(self.ambiguous)} of them ambiguous (both formats at once: one channel, or 1x1)"
        ]
        reasons: dict[str, list[str]] = {}
        for name, reason in self.left.items():
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines.append(f"  left, {reason}: {', '.join(names[:3])}{more}")
        lines.extend(f"  note: {note}" for note in self.notes)
        return "\n".join(lines)


def convert(
    model: Any,
    mode: str = "full",
    select: Iterable[str] | Predicate | None = None,
    memory_format: torch.memory_format = torch.channels_last,
) -> ConversionReport:
    """Convert the parameters and buffers of `model` in place; the values and the model's code stay as they are.

    Each Parameter stays the same object (optimizers, hooks, ties and `requires_grad` go on), gradients follow. Convert
    after building and loading, before DDP, EMA and the first compiled call. Reverse it with `torch.contiguous_format`.

    Args:
        model: an `nn.Module` (eager, `torch.fx`, scripted, traced, compiled) or a `torch.export` program.
        mode: "full", every tensor with 4 or 5 dimensions, as `model.to(memory_format=...)`; "conv", the weights of
            convolutions only, as `torch.nn.utils.convert_conv2d_weight_memory_format`; "select", the tensors of the
            selected modules; "none", nothing.
        select: mode "select": shell patterns of module names (a pattern takes what is inside the module too), or a
            predicate of (name, module).
        memory_format: `channels_last` or `channels_last_3d`, which mean the same here: tensors of 4 dimensions become
            channels_last, of 5 channels_last_3d; or `contiguous_format`.

    Raises:
        ConfigError: unknown mode; a pattern without a module; a model inside DDP or FSDP.
    """
    if mode not in MODES:
        raise ConfigError(f"conversion={mode}: known are {', '.join(MODES)}{suggest(mode, MODES)}")
    if memory_format not in (torch.channels_last, torch.channels_last_3d, torch.contiguous_format):
        raise ConfigError(f"cannot convert a model to {memory_format}: use channels_last or contiguous_format")
    wanted = "contiguous" if memory_format == torch.contiguous_format else "channels_last"
    report = ConversionReport(mode, wanted)
    root = _unwrap(model, report)
    named = dict(_named_tensors(root))
    chosen = _chosen(root, named, mode, select)
    for group in _groups_sharing_memory(named):
        _convert_group(group, chosen, memory_format, report)
    _note_parametrizations(root, wanted, report)
    return report


def model_memory_format(model: Any) -> Literal["channels_last", "contiguous", "mixed"]:
    """The layout of the parameters with 4 or 5 dimensions; where all are ambiguous, what their strides say."""
    named = model.state_dict if isinstance(model, torch.export.ExportedProgram) else dict(model.named_parameters())
    tensors = [tensor for tensor in named.values() if tensor.dim() in _CHANNELS_LAST]
    found = {classify(tensor) for tensor in tensors}
    if found <= {"ambiguous"}:
        marked = any(in_format(tensor, torch.contiguous_format) is not tensor for tensor in tensors)
        return "channels_last" if marked else "contiguous"
    found -= {"ambiguous"}
    if found == {"channels_last"}:
        return "channels_last"
    return "contiguous" if found == {"contiguous"} else "mixed"


def layout_digest(model: nn.Module) -> str:
    """A hash of every parameter's and buffer's name, shape and strides: equal on ranks whose layouts agree."""
    digest = hashlib.sha256()
    for name, tensor in _named_tensors(model):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.stride()}\n".encode())
    return digest.hexdigest()


def relayout_optimizer_state(optimizer: torch.optim.Optimizer) -> int:
    """Give momentum and moments their parameter's strides, after `load_state_dict`; returns how many changed."""
    changed = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[key] = like_parameter(value, parameter)
                    changed += state[key] is not value
    return changed


def to_contiguous_state(state: Any) -> Any:
    """A copy of `state` (nested dicts, lists, tuples) with every tensor contiguous; tied tensors stay tied.

    Files hold contiguous tensors only: then equal weights are equal bytes, and safetensors accepts them.
    """
    return _contiguous(state, {})


def _contiguous(value: Any, seen: dict[tuple[Any, ...], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        key = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
        if value.numel() == 0 or key not in seen:
            plain = in_format(value.detach(), torch.contiguous_format)
            if plain.untyped_storage().nbytes() != plain.numel() * plain.element_size():
                plain = plain.clone()  # else a slice would drag its whole storage into the file
            seen[key] = plain
        return seen[key]
    if isinstance(value, Mapping):
        result = type(value)((key, _contiguous(item, seen)) for key, item in value.items())  # type: ignore[call-arg]
        if isinstance(value, OrderedDict) and hasattr(value, "_metadata"):
            result._metadata = value._metadata  # type: ignore[attr-defined]  # versions of modules, for load_state_dict
        return result
    if isinstance(value, list | tuple):
        return type(value)(_contiguous(item, seen) for item in value)
    return value


# --- inside convert -----------------------------------------------------------------------------------------


def _unwrap(model: Any, report: ConversionReport) -> Any:
    if isinstance(model, torch.export.ExportedProgram):
        return model
    if not isinstance(model, nn.Module):
        raise ConfigError(f"cannot convert a {type(model).__name__}: expected a torch.nn.Module or an exported program")
    if isinstance(model, nn.parallel.DistributedDataParallel) or "FullyShardedDataParallel" in type(model).__name__:
        raise ConfigError(
            f"convert the model before wrapping it in {type(model).__name__}: its buckets have the old strides "
            "(pytorch/pytorch#47163)"
        )
    if isinstance(model, nn.DataParallel):
        report.notes.append("DataParallel loses the layout when it replicates (pytorch/pytorch#37484): use torchrun")
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
        report.notes.append("compiled: strides are guards, so a call after this conversion compiles again")
        return _unwrap(model._orig_mod, report)
    return model


def _named_tensors(root: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(root, torch.export.ExportedProgram):
        yield from root.state_dict.items()
        yield from ((name, value) for name, value in root.constants.items() if isinstance(value, torch.Tensor))
        return
    yield from root.named_parameters(remove_duplicate=False)
    yield from root.named_buffers(remove_duplicate=False)


def _chosen(
    root: Any, named: Mapping[str, torch.Tensor], mode: str, select: Iterable[str] | Predicate | None
) -> set[str]:
    if mode == "none":
        return set()
    if mode == "full":
        return set(named)
    if mode == "conv":
        return _convolution_weights(root)
    if isinstance(root, torch.export.ExportedProgram):
        raise ConfigError("conversion=select: an exported program has no modules left to select; use full or conv")
    modules = dict(root.named_modules(remove_duplicate=False))
    if callable(select):
        inside = {name for name, module in modules.items() if select(name, module)}
    else:
        inside = _matching(modules, list(select or ()))
    return {name for name in named if _owner(name, modules) in inside}


def _matching(modules: Mapping[str, nn.Module], patterns: list[str]) -> set[str]:
    if not patterns:
        raise ConfigError("conversion=select needs select=<module names>, for instance select='layer1*,layer2*'")
    found: set[str] = set()
    problems = []
    for pattern in patterns:
        heads = fnmatch.filter(modules, pattern)
        if not heads:
            problems.append(f"select={pattern}: the model has no such module{suggest(pattern, modules)}")
        found.update(name for name in modules if any(name == head or name.startswith(f"{head}.") for head in heads))
    if problems:
        raise ConfigError(problems)
    return found


def _owner(tensor_name: str, modules: Mapping[str, nn.Module]) -> str:
    """The module a tensor belongs to; the original of a parametrised tensor belongs to the parametrised module."""
    owner = tensor_name.rpartition(".")[0]
    head, _, rest = f".{owner}".partition(".parametrizations.")
    return head.removeprefix(".") if rest else owner


def _convolution_weights(root: Any) -> set[str]:
    """Names of what convolutions convolve with; of originals where the weight is parametrised."""
    if isinstance(root, torch.export.ExportedProgram):
        inputs = root.graph_signature.inputs_to_parameters
        return {inputs[name] for name in _convolved_nodes(root.graph) if name in inputs}
    names = set()
    for prefix, module in root.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        if isinstance(module, _CONVOLUTIONS) or getattr(module, "original_name", "") in _CONVOLUTION_NAMES:
            names |= {f"{dot}{name}" for name, _ in module.named_parameters() if "bias" not in name}
        if isinstance(module, torch.fx.GraphModule):
            names |= {f"{dot}{target}" for target in _convolved_nodes(module.graph)}
    return names


def _convolved_nodes(graph: torch.fx.Graph) -> Iterator[str]:
    """The weights of functional convolutions in an fx graph: targets of get_attr nodes, names of placeholders."""
    for node in graph.nodes:
        if node.op == "call_function" and "conv" in str(node.target) and len(node.args) > 1:
            weight = node.args[1]
            if isinstance(weight, torch.fx.Node):
                yield str(weight.target) if weight.op == "get_attr" else weight.name


def _groups_sharing_memory(named: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Tensors by memory: those whose bytes overlap come in one group, all others alone.

    Raises:
        ConfigError: a lazy module's parameter, which has no memory yet.
    """
    lazy = [name for name, tensor in named.items() if torch.nn.parameter.is_lazy(tensor)]
    if lazy:
        raise ConfigError(f"{lazy[0]} is lazy and has no shape yet: run one batch through the model first")
    strided = {name: tensor for name, tensor in named.items() if tensor.layout == torch.strided}
    by_address = sorted(strided.items(), key=lambda item: (str(item[1].device), item[1].data_ptr()))
    groups: list[dict[str, torch.Tensor]] = []
    position = {name: index for index, name in enumerate(named)}
    device, end = None, 0
    for name, tensor in by_address:
        start = tensor.data_ptr()
        overlaps = tensor.device == device and start < end and start != 0
        if not overlaps:
            groups.append({})
            end = start
        groups[-1][name] = tensor
        elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = max(end, start + elements * tensor.element_size() if tensor.numel() else start)
        device = tensor.device
    return sorted(groups, key=lambda group: min(position[name] for name in group))


@torch.no_grad()
def _convert_group(
    group: Mapping[str, torch.Tensor], chosen: set[str], memory_format: torch.memory_format, report: ConversionReport
) -> None:
    """Convert the tensors of one piece of memory, so that what shared it shares it afterwards."""
    candidates = {name: tensor for name, tensor in group.items() if tensor.dim() in _CHANNELS_LAST}
    views = {(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in group.values()}
    report.ambiguous.extend(name for name, tensor in candidates.items() if classify(tensor) == "ambiguous")
    if not chosen & candidates.keys():
        report.left.update(dict.fromkeys(candidates, "not selected"))
        return
    if len(views) > 1:
        report.left.update(dict.fromkeys(candidates, "shares its memory with a tensor of another shape"))
        return
    first = next(iter(candidates.values()))
    before, converted = first.stride(), in_format(first.detach(), memory_format)
    if converted.stride() == before:
        report.unchanged.extend(candidates)
        return
    ambiguous = classify(first) == "ambiguous"
    for tensor in {id(tensor): tensor for tensor in candidates.values()}.values():
        tensor.data = converted  # in place: optimizers, hooks and ties hold this very object
        if tensor.is_leaf and tensor.grad is not None:
            tensor.grad.data = in_format(tensor.grad, memory_format)
    size_bytes = converted.numel() * converted.element_size()
    for name in candidates:
        report.changed.append(Change(name, tuple(first.shape), before, converted.stride(), size_bytes, ambiguous))


def _note_parametrizations(root: Any, wanted: str, report: ConversionReport) -> None:
    """A parametrised weight is computed anew in each forward: say where it does not come out in the wanted layout."""
    if not isinstance(root, nn.Module) or wanted == "contiguous" or not report.changed:
        return
    lost = []
    for name, module in root.named_modules():
        if nn.utils.parametrize.is_parametrized(module, "weight") and isinstance(module, _CONVOLUTIONS):
            kept = getattr(module.parametrizations, "weight")  # noqa: B009  (a ModuleDict)
            parametrization = copy.deepcopy(kept)  # computing spectral_norm's changes its state
            with torch.no_grad():
                if classify(parametrization()) == "contiguous":
                    lost.append(name)
    if lost:
        report.notes.append(f"parametrised weights computed contiguous in each forward: {', '.join(lost)}")
