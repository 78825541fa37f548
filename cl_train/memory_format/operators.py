"""Which operators keep channels_last, measured for the installed torch on one device.

The machine-readable successor of PyTorch's wiki page "Operators with Channels Last support": each operator that vision
models use is run on a channels_last image, forward and backward, in each dtype, and its strides are looked at.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor

from cl_train.config.schema import ConfigError
from cl_train.memory_format.audit_report import markdown_table
from cl_train.memory_format.convert import classify
from cl_train.system.environment import device_name

SCHEMA_VERSION = 1
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DIRECTIONS = ("forward", "backward")

Operator = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """One operator; `shapes` are of its further tensors (weights, other images), as it takes them."""

    name: str
    call: Operator
    shapes: tuple[tuple[int, ...], ...] = ()
    image: tuple[int, ...] = (2, 8, 6, 6)


def _ones(x: Tensor, *shape: int) -> Tensor:
    return torch.ones(shape, device=x.device, dtype=x.dtype)


def _channels(x: Tensor, value: float = 1.0) -> Tensor:
    return torch.full((x.shape[1],), value, device=x.device, dtype=x.dtype)


def _grid(x: Tensor) -> Tensor:
    theta = torch.eye(2, 3, device=x.device, dtype=x.dtype).expand(x.shape[0], 2, 3)
    return F.affine_grid(theta, list(x.shape), align_corners=False)


def _regroup(x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


def _layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x.permute(0, 2, 3, 1), (x.shape[1],)).permute(0, 3, 1, 2)


def _targets(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[0], *x.shape[2:], dtype=torch.int64, device=x.device)


def _picked(x: Tensor, dim: int) -> Tensor:
    return torch.index_select(x, dim, torch.arange(x.shape[dim] - 1, -1, -1, device=x.device))


VIDEO = (2, 8, 4, 6, 6)

CASES: tuple[Case, ...] = (
    Case("conv2d 3x3", lambda x, w: F.conv2d(x, w, padding=1), ((8, 8, 3, 3),)),
    Case("conv2d 3x3 stride 2", lambda x, w: F.conv2d(x, w, stride=2), ((8, 8, 3, 3),)),
    Case("conv2d 3x3 dilated", lambda x, w: F.conv2d(x, w, dilation=2), ((8, 8, 3, 3),)),
    Case("conv2d 1x1", lambda x, w: F.conv2d(x, w), ((8, 8, 1, 1),)),
    Case("conv2d depthwise", lambda x, w: F.conv2d(x, w, padding=1, groups=8), ((8, 1, 3, 3),)),
    Case("conv2d grouped", lambda x, w: F.conv2d(x, w, padding=1, groups=2), ((8, 4, 3, 3),)),
    Case("conv_transpose2d", lambda x, w: F.conv_transpose2d(x, w, stride=2), ((8, 8, 2, 2),)),
    Case("deform_conv2d", lambda x, w: torchvision.ops.deform_conv2d(x, _ones(x, 2, 18, 4, 4), w), ((8, 8, 3, 3),)),
    Case("batch_norm training", lambda x: F.batch_norm(x, None, None, _channels(x), _channels(x), training=True)),
    Case("batch_norm eval", lambda x: F.batch_norm(x, _channels(x, 0), _channels(x), _channels(x), _channels(x))),
    Case("group_norm", lambda x: F.group_norm(x, 2, _channels(x), _channels(x))),
    Case("instance_norm", lambda x: F.instance_norm(x)),
    Case("layer_norm of channels (permuted)", _layer_norm),
    Case("local_response_norm", lambda x: F.local_response_norm(x, 3)),
    Case("normalize dim=1", lambda x: F.normalize(x, dim=1)),
    Case("relu", F.relu),
    Case("relu6", F.relu6),
    Case("leaky_relu", F.leaky_relu),
    Case("prelu", lambda x: F.prelu(x, _channels(x))),
    Case("elu", F.elu),
    Case("gelu", F.gelu),
    Case("silu", F.silu),
    Case("mish", F.mish),
    Case("hardswish", F.hardswish),
    Case("hardsigmoid", F.hardsigmoid),
    Case("sigmoid", torch.sigmoid),
    Case("tanh", torch.tanh),
    Case("softplus", F.softplus),
    Case("glu dim=1", lambda x: F.glu(x, dim=1)),
    Case("softmax dim=1", lambda x: F.softmax(x, dim=1)),
    Case("log_softmax dim=1", lambda x: F.log_softmax(x, dim=1)),
    Case("max_pool2d", lambda x: F.max_pool2d(x, 3, 2, 1)),
    Case("avg_pool2d", lambda x: F.avg_pool2d(x, 2)),
    Case("adaptive_avg_pool2d to 3x3", lambda x: F.adaptive_avg_pool2d(x, 3)),
    Case("adaptive_avg_pool2d to 1x1", lambda x: F.adaptive_avg_pool2d(x, 1)),
    Case("adaptive_max_pool2d to 3x3", lambda x: F.adaptive_max_pool2d(x, 3)),
    Case("lp_pool2d", lambda x: F.lp_pool2d(x, 2, 2)),
    Case("mean over the image, keepdim", lambda x: x.mean((2, 3), keepdim=True)),
    Case("mean over the image", lambda x: x.mean((2, 3))),
    Case("sum over channels, keepdim", lambda x: x.sum(1, keepdim=True)),
    Case("amax over the image, keepdim", lambda x: x.amax((2, 3), keepdim=True)),
    Case("cumsum dim=1", lambda x: x.cumsum(1)),
    Case("add", torch.add, ((2, 8, 6, 6),)),
    Case("mul by [N,C,1,1]", torch.mul, ((2, 8, 1, 1),)),
    Case("mul by [C,1,1]", torch.mul, ((8, 1, 1),)),
    Case("mul by a mask [N,1,H,W]", torch.mul, ((2, 1, 6, 6),)),
    Case("div by a number", lambda x: x / 3),
    Case("addcmul", torch.addcmul, ((2, 8, 6, 6), (2, 8, 6, 6))),
    Case("lerp", lambda x, y: torch.lerp(x, y, 0.3), ((2, 8, 6, 6),)),
    Case("maximum", torch.maximum, ((2, 8, 6, 6),)),
    Case("where", lambda x, y: torch.where(x > 0, x, y), ((2, 8, 6, 6),)),
    Case("clamp", lambda x: x.clamp(-1, 1)),
    Case("pow", lambda x: x.square()),
    Case("masked_fill", lambda x: x.masked_fill(x > 0, 0.0)),
    Case("dropout", lambda x: F.dropout(x, 0.5)),
    Case("dropout2d", lambda x: F.dropout2d(x, 0.5)),
    Case("stochastic_depth", lambda x: torchvision.ops.stochastic_depth(x, 0.5, "row")),
    Case("cat of dense images, dim=1", lambda x, y: torch.cat([x, y], 1), ((2, 8, 6, 6),)),
    Case("cat of a chunk and a dense image, dim=1", lambda x, y: torch.cat([x.chunk(2, 1)[0], y], 1), ((2, 4, 6, 6),)),
    Case("cat of chunks, dim=1", lambda x: torch.cat(x.chunk(2, 1), 1)),
    Case("cat of dense images, dim=0", lambda x, y: torch.cat([x, y], 0), ((2, 8, 6, 6),)),
    Case("chunk dim=1", lambda x: x.chunk(2, 1)[0]),
    Case("slice of rows", lambda x: x[:, :, 1:]),
    Case("regroup channels (view, transpose, reshape)", _regroup),
    Case("channel_shuffle", lambda x: F.channel_shuffle(x, 2)),
    Case("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2)),
    Case("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2)),
    Case("flatten", lambda x: x.flatten(1)),
    Case("flatten of the image", lambda x: x.flatten(2)),
    Case("reshape there and back", lambda x: x.reshape(x.shape[0], -1).reshape(x.shape)),
    Case("einsum over channels", lambda x, w: torch.einsum("nchw,oc->nohw", x, w), ((8, 8),)),
    Case("pad constant", lambda x: F.pad(x, (1, 1, 1, 1))),
    Case("pad reflect", lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect")),
    Case("pad replicate", lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate")),
    Case("pad channels", lambda x: F.pad(x, (0, 0, 0, 0, 0, 1))),
    Case("interpolate nearest", lambda x: F.interpolate(x, scale_factor=2, mode="nearest")),
    Case("interpolate bilinear", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
    Case("interpolate bilinear antialias", lambda x: F.interpolate(x, size=(3, 3), mode="bilinear", antialias=True)),
    Case("interpolate bicubic", lambda x: F.interpolate(x, scale_factor=2, mode="bicubic")),
    Case("interpolate area", lambda x: F.interpolate(x, size=(3, 3), mode="area")),
    Case("grid_sample", lambda x: F.grid_sample(x, _grid(x), align_corners=False)),
    Case("flip", lambda x: x.flip(3)),
    Case("roll of the batch (mixup)", lambda x: x.roll(1, 0)),
    Case("roll of the image", lambda x: x.roll((1, 1), (2, 3))),
    Case("index_select of the batch", lambda x: _picked(x, 0)),
    Case("index_select of channels", lambda x: _picked(x, 1)),
    Case("clone", torch.clone),
    Case("to another dtype", lambda x: x.to(torch.float64)),
    Case("zeros_like", lambda x: torch.zeros_like(x) + 0 * x),
    Case("roi_align", lambda x: torchvision.ops.roi_align(x, [_ones(x, 1, 4)] * 2, (3, 3))),
    Case("cross_entropy of images", lambda x: F.cross_entropy(x, _targets(x))),
    Case("conv3d 3x3x3", lambda x, w: F.conv3d(x, w, padding=1), ((8, 8, 3, 3, 3),), VIDEO),
    Case("conv3d 1x1x1", lambda x, w: F.conv3d(x, w), ((8, 8, 1, 1, 1),), VIDEO),
    Case("batch_norm of video", lambda x: F.batch_norm(x, None, None, training=True), (), VIDEO),
    Case("group_norm of video", lambda x: F.group_norm(x, 2), (), VIDEO),
    Case("relu of video", F.relu, (), VIDEO),
    Case("add of videos", torch.add, (VIDEO,), VIDEO),
    Case("max_pool3d", lambda x: F.max_pool3d(x, 2), (), VIDEO),
    Case("avg_pool3d", lambda x: F.avg_pool3d(x, 2), (), VIDEO),
    Case("adaptive_avg_pool3d to 2x2x2", lambda x: F.adaptive_avg_pool3d(x, 2), (), VIDEO),
    Case("cat of dense videos, dim=1", lambda x, y: torch.cat([x, y], 1), (VIDEO,), VIDEO),
    Case("interpolate trilinear", lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), (), VIDEO),
)


def measure(device: torch.device, cases: tuple[Case, ...] = CASES) -> dict[str, Any]:
    """Run every case on `device`. Outcomes: "kept", "lost", "broadcast" (a view with stride 0), "ambiguous", "no image"
    (another number of dimensions), or "unsupported" (the operator refuses the dtype or has no backward).
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operators about themselves; a table is not the place
        torch.manual_seed(0)
        rows = [{"operator": case.name, "outcomes": _outcomes(case, device)} for case in cases]
    return {
        "schema_version": SCHEMA_VERSION,
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        "device": device.type,
        "device_name": device_name(device),
        "threads": torch.get_num_threads(),  # with one, a 1x1x1 convolution on a CPU goes to another kernel
        "operators": rows,
    }


def _outcomes(case: Case, device: torch.device) -> dict[str, dict[str, str]]:
    return {str(dtype).removeprefix("torch."): _run(case, device, dtype) for dtype in DTYPES}


def _run(case: Case, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    inputs = [_channels_last(shape, device, dtype) for shape in (case.image, *case.shapes)]
    try:
        output = case.call(*inputs)
    except (RuntimeError, NotImplementedError):
        return dict.fromkeys(DIRECTIONS, "unsupported")
    rank = len(case.image)
    outcomes = {"forward": _outcome([output], rank)}
    gradient = torch.randn_like(output)
    if gradient.dim() == rank:
        gradient = gradient.to(memory_format=torch.channels_last if rank == 4 else torch.channels_last_3d)
    images = [tensor for tensor in inputs if tensor.dim() == rank and classify(tensor) == "channels_last"]
    try:
        outcomes["backward"] = _outcome(torch.autograd.grad(output, images, gradient), rank)
    except (RuntimeError, NotImplementedError):
        outcomes["backward"] = "unsupported"
    return outcomes


def _channels_last(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    tensor = torch.randn(shape).to(device, dtype)
    if len(shape) in (4, 5):
        tensor = tensor.to(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d)
    return tensor.requires_grad_()


def _outcome(tensors: list[Tensor] | tuple[Tensor, ...], rank: int) -> str:
    """The worst of the tensors' layouts."""
    if any(tensor.dim() != rank for tensor in tensors):
        return "no image"
    layouts = {classify(tensor) for tensor in tensors}
    if any(_is_broadcast(tensor) for tensor in tensors):
        return "broadcast"
    if layouts & {"contiguous", "other"}:
        return "lost"
    return "kept" if "channels_last" in layouts else "ambiguous"


def _is_broadcast(tensor: Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


# --- tables -----------------------------------------------------------------------------------------------------------


def markdown(table: dict[str, Any]) -> str:
    """The table with one row for each operator, and what it was measured on."""
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    rows = []
    for row in table["operators"]:
        cells = {f"{name} {way}": row["outcomes"][name][way] for name in names for way in DIRECTIONS}
        rows.append({"operator": row["operator"], **cells})
    device = f"{table['device']} ({table['device_name']})"
    cudnn = f", cuDNN {table['cudnn']}" if table["cudnn"] else ""
    return (
        f"# Operators and channels_last: torch {table['torch']}, {device}{cudnn}\n\n"
        "Measured by `python scripts/audit.py --operators`. Input and output gradient are channels_last. kept: the "
        "output (forward), the gradients of the images and weights (backward) are channels_last; lost: they are not; "
        "broadcast: a view with stride 0; ambiguous: size-1 dimensions leave it open; no image: another number of "
        "dimensions.\n\n"
        f"{markdown_table(rows)}\n"
    )


def write(table: dict[str, Any], folder: Path) -> Path:
    """Write `operators-<device>-torch<version>.json` and `.md` into `folder`; returns the path of the first."""
    folder.mkdir(parents=True, exist_ok=True)
    version = ".".join(table["torch"].split("+")[0].split(".")[:2])
    path = folder / f"operators-{table['device']}-torch{version}.json"
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(markdown(table), encoding="utf-8")
    return path


def read(path: Path) -> dict[str, Any]:
    """A table that `write` wrote.

    Raises:
        ConfigError: no such file, or another kind of file.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as an operator table ({error})") from error
    if not isinstance(table, dict) or table.get("schema_version") != SCHEMA_VERSION or "operators" not in table:
        raise ConfigError(f"{path}: not an operator table of this program (see scripts/audit.py --operators)")
    return table


def diff(old: dict[str, Any], new: dict[str, Any]) -> list[dict[str, str]]:
    """Rows for what differs between two tables: operators, dtypes and directions; "-" where one has no such entry."""
    before, after = _flat(old), _flat(new)
    rows = []
    for key in dict.fromkeys([*before, *after]):
        was, now = before.get(key, "-"), after.get(key, "-")
        if was != now:
            operator, dtype, direction = key
            row = {"operator": operator, "dtype": dtype, "direction": direction}
            columns = (f"torch {old['torch']} {old['device']}", f"now: torch {new['torch']} {new['device']}")
            rows.append({**row, **dict(zip(columns, (was, now), strict=True))})
    return rows


def _flat(table: dict[str, Any]) -> dict[tuple[str, str, str], str]:
    return {
        (row["operator"], dtype, direction): outcome
        for row in table["operators"]
        for dtype, directions in row["outcomes"].items()
        for direction, outcome in directions.items()
    }
