"""What each operator of torch does with channels_last: a table of `operator_probe`."""

import fnmatch
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from cl_train.errors import ConfigError
from cl_train.memory_format import operator_probe
from cl_train.memory_format.layout import classify, have_other_strides
from cl_train.memory_format.operator_probe import (
    AGAINST,
    compile,
    differentiated,
    image_of,
    probe_function,
)

# Expressions of an image x or a video v in channels_last, with torch, its functional `F`,
# ones(*shape), contiguous, and weight(*shape) in channels_last.
_PROBES = """
F.conv2d(x, weight(8, 8, 3, 3), padding=1)
F.conv2d(x, weight(8, 8, 1, 1))
F.conv2d(x, weight(8, 8, 3, 3), stride=2)
F.conv2d(x, weight(8, 8, 3, 3), padding=2, dilation=2)
F.conv2d(x, weight(8, 2, 3, 3), padding=1, groups=4)
F.conv2d(x, weight(8, 1, 3, 3), padding=1, groups=8)
F.conv_transpose2d(x, weight(8, 8, 3, 3), stride=2)
F.batch_norm(x, None, None, ones(8), ones(8), training=True)
F.batch_norm(x, *(ones(8),) * 4)
F.group_norm(x, 2, ones(8), ones(8))
F.layer_norm(x, x.shape[1:])
F.local_response_norm(x, 3)
F.layer_norm(x.permute(0, 2, 3, 1), (8,)).permute(0, 3, 1, 2)
F.relu_(x * 1)
F.prelu(x, ones(8))
F.instance_norm(x)
F.normalize(x)
F.relu(x)
F.leaky_relu(x)
F.elu(x)
F.gelu(x)
F.silu(x)
F.mish(x)
F.hardswish(x)
F.hardsigmoid(x)
F.hardtanh(x)
F.softplus(x)
F.dropout(x)
F.dropout2d(x)
F.glu(x, 1)
F.softmax(x, 1)
F.log_softmax(x, 1)
x.sigmoid()
x.clamp(-1, 1)
x + x.flip(0)
(x * 1).add_(x)
x * ones(8).view(1, 8, 1, 1)
torch.where(x > 0, x, -x)
x - x.mean((2, 3), keepdim=True)
x - x.sum(1, keepdim=True)
x.cumsum(2)
F.max_pool2d(x, 2)
F.avg_pool2d(x, 2)
F.lp_pool2d(x.abs() + 1, 2, 2)
F.adaptive_avg_pool2d(x, 3)
F.adaptive_max_pool2d(x, 3)
F.fractional_max_pool2d(x, 2, output_size=4)
F.pad(x, (1, 1, 1, 1))
F.pad(x, (1, 1, 1, 1), mode='reflect')
F.pad(x, (1, 1, 1, 1), mode='replicate')
F.interpolate(x, scale_factor=2)
F.interpolate(x, scale_factor=2, mode='bilinear')
F.interpolate(x, scale_factor=2, mode='bicubic')
F.grid_sample(x, ones(2, 8, 8, 2), align_corners=False)
F.pixel_shuffle(x, 2)
F.pixel_unshuffle(x, 2)
F.channel_shuffle(x, 2)
x.contiguous()
x.clone()
x.double()
torch.empty_like(x).copy_(x)
torch.cat([x, x], 1)
torch.stack([x, x], 2).flatten(1, 2)
x.chunk(2, 1)[0]
torch.cat(x.split(4, 1)[::-1], 1)
x[:, :, 1:-1, 1:-1]
x.index_select(1, torch.arange(4, device=x.device))
x.flip(3)
x.roll(1, 2)
x.view(2, 2, 4, 8, 8).transpose(1, 2).reshape(x.shape)
torch.zeros_like(x)
torch.empty_like(x)
torch.full_like(x, 2)
torch.randn_like(x)
x.new_zeros(x.shape)
(x * 1).mul_(2).relu_()
(x * 1).copy_(x.flip(1))
torch.add(x.detach(), 1, out=torch.empty_like(x))
torch.mul(x.detach(), 2, out=ones(2, 8, 8, 8))
x + ones(2, 8, 8, 8)
ones(2, 8, 8, 8) * x
torch.where(x > 0, x, ones(2, 8, 8, 8))
torch.cat([x, ones(2, 8, 8, 8)], 1)
torch.maximum(ones(2, 8, 8, 8), x)
F.adaptive_avg_pool2d(x, 1) * x
x.mean((2, 3))
x.amax((2, 3))
x.transpose(2, 3).contiguous()
x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
x.flatten(2).transpose(1, 2).contiguous()
F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)
F.pad(x, (1, 1, 1, 1), mode='circular')
F.pad(x, (-1, -1, -1, -1))
F.interpolate(x, size=(5, 7), mode='area')
F.interpolate(x, scale_factor=0.5, mode='bilinear', antialias=True)
F.interpolate(x, size=(5, 7), mode='nearest-exact')
torch.roll(x, (1, 2), (2, 3))
torch.as_strided(x.roll(1, 0), (5, 10), (4, 1), 0)
x.repeat(1, 2, 1, 1)
F.unfold(x, 3)
x.softmax(-1)
F.conv3d(v, weight(8, 8, 3, 3, 3), padding=1)
F.conv3d(v, weight(8, 1, 3, 3, 3), groups=8)
F.conv_transpose3d(v, weight(8, 8, 2, 2, 2), stride=2)
F.max_pool3d(v, 2)
F.avg_pool3d(v, 2)
F.adaptive_avg_pool3d(v, 2)
F.batch_norm(v, None, None, ones(8), ones(8), training=True)
F.instance_norm(v)
F.group_norm(v, 2, ones(8), ones(8))
F.interpolate(v, scale_factor=2, mode='trilinear')
F.pad(v, (1,) * 6)
F.relu(v)
torch.cat([v, v], 1)
"""
PROBES = tuple(_PROBES.split("\n")[1:-1])
_RANDOM = ("dropout", "fractional", "randn_like", "empty_like(x)")  # their values differ each time


def selected(patterns: Sequence[str]) -> list[str]:
    """The probes that match shell patterns. Raises ConfigError: none does."""
    probes = [probe for pattern in patterns for probe in fnmatch.filter(PROBES, pattern)]
    if not probes:
        raise ConfigError(f"select={','.join(patterns)}: no operator matches; docs/operators.md")
    return probes


def check_compiler(device: torch.device) -> None:
    """Raises ConfigError: torch.compile does not work on this machine."""
    outcome = _outcome(compile, lambda x: x + 1, torch.zeros(2, device=device))
    if isinstance(outcome, str):
        raise ConfigError(f"against=compile: torch cannot compile here ({outcome}); leave it out")


def conformance(
    device: torch.device,
    dtype: torch.dtype,
    against: Sequence[str] = (),
    probes: Iterable[str] = PROBES,
) -> list[dict[str, str]]:
    """A row for the output and one for the gradient of each probe: format and strides in eager
    mode, and for each of `against` "same" or what differs from it: shape, strides, values, or an
    error. Rows with a difference first. A probe that fails in eager mode has one row with the
    error, or with `against` none: there is nothing to compare.
    """
    rows = []
    for expression in probes:
        image = image_of(expression, device, dtype)
        function = probe_function(expression, image)
        eager = _outcome(differentiated, function, image)
        if isinstance(eager, str):
            if not against:
                rows.append({"operator": expression, "direction": "forward", "eager": eager})
            continue
        has_values = not any(word in expression for word in _RANDOM)
        others = {name: _outcome(AGAINST[name], function, image) for name in against}
        for index, direction in enumerate(("forward", "backward")):
            expected = eager[index]
            if expected is None:
                continue
            row = {"operator": expression, "direction": direction, "eager": _described(expected)}
            for name, outcome in others.items():
                if not isinstance(outcome, str):
                    with_values = has_values and name != "fake"
                    outcome = _difference(expected, outcome[index], with_values)
                row[name] = outcome
            rows.append(row)
    return sorted(rows, key=lambda row: not differs(row))


def differs(row: dict[str, str]) -> bool:
    return any(row.get(name, "same") != "same" for name in AGAINST)


def _outcome(run: Callable[..., Any], function: Callable[..., Any], image: torch.Tensor) -> Any:
    """The output and the gradient, or the error as text."""
    try:
        return run(function, image)
    except Exception as error:  # of any part of the compiler
        message = str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}: {message:.60}"


def _described(tensor: torch.Tensor) -> str:
    return f"{classify(tensor)} {tuple(tensor.stride())}"


def _difference(expected: torch.Tensor, other: torch.Tensor | None, has_values: bool) -> str:
    if other is None or other.shape != expected.shape:
        return "no gradient" if other is None else f"shape {tuple(other.shape)}"
    if have_other_strides(expected, other):
        return _described(other)
    if has_values:
        largest = expected.abs().max().item()
        tolerance = 1e-4 if torch.finfo(expected.dtype).bits >= 32 else 0.03
        deviation = (expected.double() - other.double()).abs().max().item()
        if deviation > tolerance * max(largest, 1e-3):
            return f"values, by {deviation:.2g} of {largest:.2g}"
    return "same"


def conformance_program(row: dict[str, str], device: torch.device, dtype: torch.dtype) -> str:
    """A program of torch alone that shows the differences of a row."""
    ways = [name for name in AGAINST if row.get(name, "same") != "same"]
    facts = [f"# {name}: {row[name]}" for name in ("operator", "direction", "eager", *ways)]
    arguments = ", ".join([repr(row["operator"]), repr(str(device)), str(dtype), *map(repr, ways)])
    return "\n".join([*facts, inspect.getsource(operator_probe), "", f"show({arguments})", ""])
