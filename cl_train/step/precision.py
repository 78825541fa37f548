"""The dtype of each part of a step, fp32 master weights, and their moving average."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from cl_train.config.schema import PRECISIONS
from cl_train.config.validation import suggest
from cl_train.errors import ConfigError
from cl_train.step.backup import set_buffer
from cl_train.system.failures import failure_explained
from cl_train.system.machine import thread_s

PRODUCT, DENSE, DEPTHWISE = "matrix product", "dense convolution", "depthwise convolution"
FASTER = 0.8  # of fp32's time
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class Precision:
    """What `precision=<name>` means (docs/training.md has a table). BatchNorm is always fp32."""

    name: str  # never "auto"
    autocast_dtype: torch.dtype | None = None  # of convolutions and matmuls, with fp32 weights
    scales_loss: bool = False  # dynamically
    master_weights: bool = False  # fp32 copies of fp16 weights
    tf32: bool = False  # on CUDA, in the matmuls and convolutions that remain in fp32
    reason: str = ""  # why `auto` chose it, or what speaks against it

    @property
    def input_dtype(self) -> torch.dtype:
        """The dtype of images: the one that the first convolution computes in."""
        return torch.float16 if self.master_weights else self.autocast_dtype or torch.float32

    @property
    def for_fp32_weights(self) -> "Precision":
        return Precision("fp16", autocast_dtype=torch.float16) if self.master_weights else self


_ALL = [
    Precision("fp32"),
    Precision("tf32", tf32=True),
    Precision("bf16", autocast_dtype=torch.bfloat16, tf32=True),
    Precision("fp16", autocast_dtype=torch.float16, scales_loss=True, tf32=True),
    Precision("fp16_o2", scales_loss=True, master_weights=True, tf32=True),
]
BY_NAME = {precision.name: precision for precision in _ALL}


def resolve_precision(name: str, device: torch.device) -> Precision:
    """Returns the precision `name`; `auto` is the fastest. Raises ConfigError: an unknown name."""
    if name not in PRECISIONS:
        near = suggest(name, PRECISIONS)
        raise ConfigError(f"precision={name}; use {', '.join(PRECISIONS)}{near}")
    if name == "auto":
        fast = _fast_formats(device)
        return replace(BY_NAME[fast[0] if fast else "fp32"], reason=_why(device, fast))
    needed = {"tf32": "tf32", "bf16": "bf16", "fp16": "fp16", "fp16_o2": "fp16"}.get(name)
    if needed is None or needed in _fast_formats(device):
        return BY_NAME[name]
    cost = "the same as fp32" if name == "tf32" else "slow"
    return replace(BY_NAME[name], reason=f"{cost} on this {device.type} device: use precision=auto")


def _why(device: torch.device, fast: list[str]) -> str:
    """Returns why `auto` chose its precision: on a CPU, what was timed."""
    if device.type == "cuda":
        return f"{'fast' if fast else '16-bit arithmetic is slow'} on this GPU"
    shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in bf16_shares().items())
    advice = "cl-train benchmark precision=fp32,bf16 decides for a model"
    return f"time of bf16 / fp32: {shares}; {advice}"


def _fast_formats(device: torch.device) -> list[str]:
    """The number formats that are faster than fp32 on `device`, the best first."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        of_tensor_cores = {"fp16": (7, 0), "bf16": (8, 0), "tf32": (8, 0)}
        return [name for name, first in of_tensor_cores.items() if capability >= first]
    return ["bf16"] if bf16_is_faster_on_cpu() else []


def bf16_is_faster_on_cpu() -> bool:
    """Whether matrix products and dense convolutions are. Depthwise ones do not count, as the model
    is not known here.
    """
    shares = bf16_shares()
    return all(shares.get(name, 1.0) < FASTER for name in (PRODUCT, DENSE))


@cache
def bf16_shares() -> dict[str, float]:
    """Times operations for about 0.1 s, and returns bf16's time / fp32's: the CPU's instructions do
    not tell. With AMX, bf16 was four times as fast as fp32; with AVX512-BF16 alone it took twice
    the time. Ends at the first operation that is not faster, as a CPU without bf16 takes long.
    """
    values = torch.rand(2, 512, 512, generator=torch.Generator().manual_seed(0))
    images, weights = values.view(8, 64, 32, 32), values[0, :72].reshape(64, 64, 3, 3)
    operations: dict[str, tuple[Callable[..., object], torch.Tensor, torch.Tensor]] = {
        PRODUCT: (torch.matmul, *values),
        DENSE: (torch.conv2d, images, weights),
        DEPTHWISE: (
            partial(torch.conv2d, groups=64),
            images.to(memory_format=torch.channels_last),
            weights[:, :1],
        ),
    }
    shares: dict[str, float] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the time of one thread excludes what other processes take
    try:
        for name, (function, *tensors) in operations.items():
            shares[name] = _bf16_share(function, *tensors)
            if shares[name] >= FASTER:
                break
    finally:
        torch.set_num_threads(threads)
    return shares


def _bf16_share(function: Callable[..., object], *values: torch.Tensor) -> float:
    """Returns the time in bf16 as a share of that in fp32."""
    narrow = [tensor.bfloat16() for tensor in values]
    variants = partial(function, *values), partial(function, *narrow)
    rounds = [[thread_s(variant) for variant in variants] for _ in range(8)]
    fp32_s, bf16_s = map(min, zip(*rounds, strict=True))
    return bf16_s / fp32_s


@contextmanager
def kernel_selection(*, tf32: bool | None = None, autotune: bool) -> Iterator[None]:
    """Sets which CUDA kernels the whole process may select within the block.

    tf32: use TF32 in fp32 matmuls and convolutions; None: leave it as it is. autotune: cuDNN times
    its convolution algorithms, once per shape, which takes seconds.
    """
    cudnn = torch.backends.cudnn
    autotuned_before = cudnn.benchmark
    try:
        cudnn.benchmark = autotune
        with nullcontext() if tf32 is None else _tf32_switches(tf32):
            yield
    finally:
        cudnn.benchmark = autotuned_before


@contextmanager
def _tf32_switches(allowed: bool) -> Iterator[None]:
    """Sets torch's older switches and its newer ones, so that code that reads either, as
    `torch.backends.cudnn.flags` does, works in the block.
    """
    backends: Any = torch.backends
    cuda, cudnn = backends.cuda, backends.cudnn
    of_cuda = [cuda.matmul, cudnn.conv, cudnn.rnn]
    newer = [*of_cuda, backends.mkldnn.matmul]
    newer_before = [switch.fp32_precision for switch in newer]
    matmul_before = cudnn_before = None
    # The older ones cannot be read if the program has set the newer ones to something else.
    with suppress(RuntimeError):
        matmul_before = torch.get_float32_matmul_precision()
    with suppress(RuntimeError):
        cudnn_before = cudnn.allow_tf32
    try:
        cuda.matmul.allow_tf32 = cudnn.allow_tf32 = allowed
        for switch in of_cuda:  # else `torch.backends.fp32_precision` may decide
            switch.fp32_precision = "tf32" if allowed else "ieee"
        yield
    finally:
        if matmul_before is not None:
            torch.set_float32_matmul_precision(matmul_before)
        if cudnn_before is not None:
            cudnn.allow_tf32 = cudnn_before
        for switch, precision in zip(newer, newer_before, strict=True):
            switch.fp32_precision = precision


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    dtype = precision.autocast_dtype
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def cast_model(model: nn.Module, precision: Precision) -> nn.Module:
    """fp16_o2: cast `model` to fp16 in place, except BatchNorm, whose variance can underflow."""
    if precision.master_weights:
        model.half()
        for module in model.modules():
            if isinstance(module, BATCH_NORMS):
                module.float()
    return model


class Fp32Weights:
    """The weights that the optimizer updates: the model's, or for fp16_o2 an fp32 copy of each fp16
    parameter with the same strides (Micikevicius et al. 2018, section 3.1).
    """

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        self._model = model
        parameters = model.named_parameters() if precision.master_weights else ()
        half = {name: p for name, p in parameters if p.dtype == torch.float16 and p.requires_grad}
        self._full = {name: nn.Parameter(p.detach().float()) for name, p in half.items()}
        self._half: list[torch.Tensor] = list(half.values())

    def trainable(self) -> dict[str, nn.Parameter]:
        named = {**dict(self._model.named_parameters()), **self._full}
        return {name: parameter for name, parameter in named.items() if parameter.requires_grad}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns all parameters, in fp32, and all buffers, also those not in a state dict."""
        named = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        return {**named, **self._full}

    def state_dict(self) -> dict[str, Any]:
        """The model's state dict with fp32 weights, so that any precision can load it."""
        state = self._model.state_dict()
        state.update({name: full.detach() for name, full in self._full.items()})
        return state

    def copy_gradients_from_model(self) -> None:
        """Moves the fp16 gradients, still scaled, to the fp32 copies."""
        halves = zip(self._full.values(), self._half, strict=True)
        pairs = [(full, half.grad) for full, half in halves if half.grad is not None]
        gradients = [torch.empty_like(full) for full, _ in pairs]
        if pairs:
            torch._foreach_copy_(gradients, [gradient for _, gradient in pairs])
        for (full, _), gradient in zip(pairs, gradients, strict=True):
            full.grad = gradient
        for half in self._half:
            half.grad = None

    @torch.no_grad()
    def copy_weights_to_model(self) -> None:
        if self._half:
            torch._foreach_copy_(self._half, list(self._full.values()))

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        for name, full in self._full.items():
            full.copy_(state[name])
        self.copy_weights_to_model()


class EMA:
    """Keeps moving averages of a model's `Fp32Weights` and BatchNorm statistics in `module`, its
    copy in float32: fp16 does not resolve such small changes. Raises ConfigError: the model cannot
    be copied.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        with failure_explained("the model cannot be copied for its average", "use ema_decay=0"):
            self.module = copy.deepcopy(model).float().requires_grad_(False).eval()
        self.collect()

    def collect(self) -> None:
        """Collects the tensors of `module`, tied ones once; a checkpoint may have replaced some."""
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        self._averages = {name: t for name, t in tensors.items() if t.is_floating_point()}
        self._copied = {name: t for name, t in tensors.items() if not t.is_floating_point()}

    @torch.no_grad()
    def update(self, source: Mapping[str, torch.Tensor]) -> None:
        """Applies ema += (1 - decay) * (weights - ema) to `Fp32Weights.tensors`. Copies integer
        buffers, and tensors that are new or have another shape. The host does not wait.
        """
        own = {**self._averages, **self._copied}
        for name, value in source.items():
            if name not in own or own[name].shape != value.shape:
                dtype = torch.float32 if value.is_floating_point() else None
                set_buffer(self.module, name, value.to(dtype, copy=True))
                self.collect()
        copied = [name for name in self._copied if name in source]
        if copied:  # one launch instead of one per BatchNorm
            values = [source[name] for name in copied]
            torch._foreach_copy_([self._copied[name] for name in copied], values)
        averages = {name: t for name, t in self._averages.items() if name in source}
        weights = [source[name].detach().to(average.dtype) for name, average in averages.items()]
        get_ema_multi_avg_fn(self.decay)(list(averages.values()), weights, None)
