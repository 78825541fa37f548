"""Which operators keep channels_last, measured with the installed torch on one device.

An updatable form of PyTorch's wiki page "Operators with Channels Last support": each operator that vision models use is
run on a channels_last image, forward and backward, and its output strides are classified.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cl_train.memory_format.audit_report import markdown_table
from cl_train.memory_format.layout import CHANNELS_LAST, classify
from cl_train.system.environment import device_name
from cl_train.system.files import write_json, write_text

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IMAGE, VIDEO = (2, 8, 6, 6), (2, 8, 4, 6, 6)

Shape = tuple[int, ...]


def _shuffle(x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


# The operator, and the shapes of its further tensors (weights, other images).
OPERATORS: dict[str, tuple[Callable[..., Tensor], *tuple[Shape, ...]]] = {
    "conv2d 3x3": (lambda x, w: F.conv2d(x, w, padding=1), (8, 8, 3, 3)),
    "conv2d 3x3 stride 2": (lambda x, w: F.conv2d(x, w, stride=2), (8, 8, 3, 3)),
    "conv2d 1x1": (F.conv2d, (8, 8, 1, 1)),
    "conv2d depthwise": (lambda x, w: F.conv2d(x, w, padding=1, groups=8), (8, 1, 3, 3)),
    "conv2d grouped": (lambda x, w: F.conv2d(x, w, padding=1, groups=2), (8, 4, 3, 3)),
    "conv_transpose2d": (lambda x, w: F.conv_transpose2d(x, w, stride=2), (8, 8, 2, 2)),
    "batch_norm training": (lambda x: F.batch_norm(x, None, None, training=True),),
    "group_norm": (lambda x: F.group_norm(x, 2),),
    "instance_norm": (F.instance_norm,),
    "layer_norm of channels (permuted)": (lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (8,)).permute(0, 3, 1, 2),),
    "local_response_norm": (lambda x: F.local_response_norm(x, 3),),
    "relu": (F.relu,),
    "gelu": (F.gelu,),
    "silu": (F.silu,),
    "hardswish": (F.hardswish,),
    "glu dim=1": (lambda x: F.glu(x, dim=1),),
    "softmax dim=1": (lambda x: F.softmax(x, dim=1),),
    "dropout": (lambda x: F.dropout(x, 0.5),),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, 2, 1),),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2),),
    "adaptive_avg_pool2d to 3x3": (lambda x: F.adaptive_avg_pool2d(x, 3),),
    "adaptive_avg_pool2d to 1x1": (lambda x: F.adaptive_avg_pool2d(x, 1),),
    "sum over channels, keepdim": (lambda x: x.sum(1, keepdim=True),),
    "add": (torch.add, IMAGE),
    "mul by [N,C,1,1]": (torch.mul, (2, 8, 1, 1)),
    "where": (lambda x, y: torch.where(x > 0, x, y), IMAGE),
    "masked_fill": (lambda x: x.masked_fill(x > 0, 0.0),),
    "cat of images, dim=1": (lambda x, y: torch.cat([x, y], 1), IMAGE),
    "cat of a chunk and an image, dim=1": (lambda x, y: torch.cat([x.chunk(2, 1)[0], y], 1), (2, 4, 6, 6)),
    "chunk dim=1": (lambda x: x.chunk(2, 1)[0],),
    "channel shuffle (view, transpose, reshape)": (_shuffle,),
    "channel_shuffle": (lambda x: F.channel_shuffle(x, 2),),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2),),
    "flatten": (lambda x: x.flatten(1),),
    "reshape there and back": (lambda x: x.reshape(x.shape[0], -1).reshape(x.shape),),
    "einsum over channels": (lambda x, w: torch.einsum("nchw,oc->nohw", x, w), (8, 8)),
    "pad constant": (lambda x: F.pad(x, (1, 1, 1, 1)),),
    "pad reflect": (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),),
    "interpolate nearest": (lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),),
    "interpolate bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),),
    "roll of the batch (mixup)": (lambda x: x.roll(1, 0),),
    "index_select of the batch": (lambda x: x[torch.arange(1, -1, -1, device=x.device)],),
    "conv3d 3x3x3": (lambda x, w: F.conv3d(x, w, padding=1), (8, 8, 3, 3, 3)),
    "batch_norm of video": (lambda x: F.batch_norm(x, None, None, training=True),),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2),),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2),),
}


def measure(device: torch.device, names: tuple[str, ...] = tuple(OPERATORS)) -> dict[str, Any]:
    """Run the operators on `device` in fp32, bf16 and fp16.

    Outcomes: "kept", "lost", "expanded" (a view with stride 0), "ambiguous", "no image" (another number of dimensions),
    or "unsupported" (no kernel for the dtype, or no backward).
    """
    rows: list[dict[str, str]] = []
    with torch.random.fork_rng([device] if device.type == "cuda" else []), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        for name in names:
            row = {"operator": name}
            for dtype in DTYPES:
                forward, backward = _outcomes(name, device, dtype)
                short = str(dtype).removeprefix("torch.")
                row |= {f"{short} forward": forward, f"{short} backward": backward}
            rows.append(row)
    return {
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        "device": device.type,
        "device_name": device_name(device),
        "threads": torch.get_num_threads(),  # with one thread, a 1x1x1 convolution on a CPU uses another kernel
        "operators": rows,
    }


def write(table: dict[str, Any], folder: Path) -> Path:
    """Write `operators-<device>-torch<version>.json` and `.md` into `folder`; returns the path of the JSON file."""
    folder.mkdir(parents=True, exist_ok=True)
    version = ".".join(table["torch"].split("+")[0].split(".")[:2])
    path = folder / f"operators-{table['device']}-torch{version}.json"
    title = f"# Operators and channels_last: torch {table['torch']} on {table['device_name']}"
    write_json(path, table)
    write_text(path.with_suffix(".md"), f"{title}\n\n{markdown_table(table['operators'])}\n")
    return path


def _outcomes(name: str, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """Forward: of the output. Backward: of the gradients of images and weights, given a channels_last gradient."""
    operator, *shapes = OPERATORS[name]
    is_video = "3d" in name or "video" in name
    shapes = [VIDEO if is_video else IMAGE, *shapes]
    inputs = [_channels_last(torch.randn(shape).to(device, dtype)).requires_grad_() for shape in shapes]
    rank = len(shapes[0])
    try:
        output = operator(*inputs)
    except (RuntimeError, NotImplementedError):
        return "unsupported", "unsupported"
    images = [tensor for tensor in inputs if tensor.dim() == rank and classify(tensor) == "channels_last"]
    try:
        gradients = torch.autograd.grad(output, images, _channels_last(torch.randn_like(output)))
    except (RuntimeError, NotImplementedError):
        return _worst([output], rank), "unsupported"
    return _worst([output], rank), _worst(gradients, rank)


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.to(memory_format=CHANNELS_LAST[tensor.dim()]) if tensor.dim() in CHANNELS_LAST else tensor


def _worst(tensors: list[Tensor] | tuple[Tensor, ...], rank: int) -> str:
    if any(tensor.dim() != rank for tensor in tensors):
        return "no image"
    if any(size > 1 and stride == 0 for t in tensors for size, stride in zip(t.shape, t.stride(), strict=True)):
        return "expanded"
    layouts = {classify(tensor) for tensor in tensors}
    if layouts & {"contiguous", "other"}:
        return "lost"
    return "kept" if "channels_last" in layouts else "ambiguous"
