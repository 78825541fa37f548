"""Mixed precision: the dtype of each part of a step, loss scaling, fp32 master weights, and their moving average."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cl_train.config.schema import PRECISIONS, ConfigError
from cl_train.config.validation import suggest

VOLTA, AMPERE = (7, 0), (8, 0)  # compute capability of the first GPUs with tensor cores, and with bf16 in them


@dataclass(frozen=True)
class Precision:
    """What `precision=<name>` means (docs/training.md has a table). BatchNorm's parameters and statistics are fp32."""

    name: str  # never "auto"
    autocast_dtype: torch.dtype | None = None  # of convolutions and matmuls, with fp32 weights
    scales_loss: bool = False  # dynamically
    master_weights: bool = False  # fp32 copies of fp16 weights
    tf32: bool = False  # on CUDA, in the matmuls and convolutions that remain in fp32
    reason: str = ""  # why `auto` chose it

    @property
    def input_dtype(self) -> torch.dtype:
        """The dtype of the model's input images: the one that its first convolution computes in."""
        return torch.float16 if self.master_weights else self.autocast_dtype or torch.float32

    @property
    def for_fp32_weights(self) -> "Precision":
        """The precision that evaluates an fp32 copy of the weights (EMA): fp16_o2 has to become autocast."""
        return Precision("fp16", autocast_dtype=torch.float16) if self.master_weights else self  # no loss scale needed


_ROWS = (
    Precision("fp32"),
    Precision("tf32", tf32=True),
    Precision("bf16", autocast_dtype=torch.bfloat16, tf32=True),
    Precision("fp16", autocast_dtype=torch.float16, scales_loss=True, tf32=True),
    Precision("fp16_o2", scales_loss=True, master_weights=True, tf32=True),
)
BY_NAME = {precision.name: precision for precision in _ROWS}


def resolve_precision(name: str, device: torch.device) -> Precision:
    """The precision of that name; `auto`: as the help of `precision=` says. Raises ConfigError: an unknown name."""
    if name not in PRECISIONS:
        raise ConfigError(f"precision={name}; use {', '.join(PRECISIONS)}{suggest(name, PRECISIONS)}")
    if name != "auto":
        return BY_NAME[name]
    if device.type == "cuda":
        has_tensor_cores = torch.cuda.get_device_capability(device) >= VOLTA
        name, reason = ("fp16", "the GPU has tensor cores") if has_tensor_cores else ("fp32", "no tensor cores")
    else:
        is_native = torch.ops.mkldnn._is_mkldnn_bf16_supported() and _cpu_has_native_bf16()
        name, reason = ("bf16", "the CPU has native bf16") if is_native else ("fp32", "no native bf16 on this CPU")
    return replace(BY_NAME[name], reason=reason)


def _cpu_has_native_bf16() -> bool:
    """AVX512-BF16, AMX or Arm's bf16. oneDNN also emulates bf16 on plain AVX512, slower than fp32."""
    with suppress(OSError):
        return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(Path("/proc/cpuinfo").read_text().split())
    return False


def precision_warnings(precision: Precision, device: torch.device) -> list[str]:
    """Reasons against `precision` on `device`, one sentence each; empty if there are none."""
    name, is_fp16 = precision.name, precision.name in ("fp16", "fp16_o2")
    if device.type != "cuda":
        if is_fp16:
            return [f"precision={name} is slow on a CPU; bf16 or fp32 is faster"]
        is_emulated = name == "bf16" and not _cpu_has_native_bf16()
        return ["precision=bf16: this CPU emulates bf16; fp32 is likely to be faster"] if is_emulated else []
    capability = torch.cuda.get_device_capability(device)
    if is_fp16 and capability < VOLTA:
        return [f"precision={name}: this GPU has no tensor cores, so fp16 and channels_last gain little"]
    return ["precision=bf16: this GPU emulates bf16; fp16 is faster"] if name == "bf16" and capability < AMPERE else []


@contextmanager
def kernel_selection(*, tf32: bool | None = None, autotune: bool) -> Iterator[None]:
    """Set which CUDA kernels torch may select, in the whole process; the previous switches are restored at the end.

    Args:
        tf32: allow TF32 in fp32 matmuls and convolutions; None: as it is.
        autotune: let cuDNN time its convolution algorithms once per shape, all of them (torch's default is ten). That
            takes seconds, so not for a shape that occurs once.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.benchmark_limit)
    try:
        if tf32 is not None:
            matmul.allow_tf32 = cudnn.allow_tf32 = tf32
        cudnn.benchmark, cudnn.benchmark_limit = autotune, 0
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.benchmark_limit = before


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The context of forward and loss, in training and in evaluation."""
    dtype = precision.autocast_dtype
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def build_scaler(
    precision: Precision, device: torch.device, init_scale: float = 65536.0, growth_interval: int = 2000
) -> torch.amp.GradScaler:
    """A dynamic loss scaler; for precisions without loss scaling it is disabled and every call is a no-op."""
    return torch.amp.GradScaler(device.type, init_scale, growth_interval=growth_interval, enabled=precision.scales_loss)


def cast_model(model: nn.Module, precision: Precision) -> nn.Module:
    """fp16_o2: cast `model` to fp16 in place, except its BatchNorm layers, as apex's O2 did. Otherwise a no-op.

    BatchNorm keeps fp32 parameters and statistics because a running variance can underflow in fp16.
    """
    if not precision.master_weights:
        return model
    model.half()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.float()
    return model


class MasterWeights:
    """The weights of `model` that the optimizer updates: its own, or for fp16_o2 an fp32 copy of each fp16 parameter
    with the same strides (Micikevicius et al. 2018, section 3.1).
    """

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        self._model = model
        parameters = model.named_parameters() if precision.master_weights else ()
        half = {name: p for name, p in parameters if p.dtype == torch.float16 and p.requires_grad}
        self._full = {name: nn.Parameter(parameter.detach().float()) for name, parameter in half.items()}
        self._half: list[torch.Tensor] = list(half.values())

    def trainable(self) -> dict[str, nn.Parameter]:
        """What the optimizer updates, by name."""
        named = {**dict(self._model.named_parameters()), **self._full}
        return {name: parameter for name, parameter in named.items() if parameter.requires_grad}

    def state_dict(self) -> dict[str, Any]:
        """The model's state dict with fp32 weights, so that any precision can load it."""
        return {**self._model.state_dict(), **{name: master.detach() for name, master in self._full.items()}}

    def copy_gradients_from_model(self) -> None:
        """Move the fp16 gradients, still scaled, to the fp32 copies."""
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
        """Round the fp32 copies into the model's fp16 parameters."""
        if self._half:
            torch._foreach_copy_(self._half, list(self._full.values()))

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Set the fp32 copies, and with them the model, from a state dict with fp32 weights."""
        for name, master in self._full.items():
            master.copy_(state[name])
        self.copy_weights_to_model()


class EMA:
    """A float32 copy of `model`, `module`, with moving averages of the model's weights and BatchNorm statistics.

    torch's AveragedModel cannot average fp32 master weights, which fp16_o2 needs: a change of a weight by a share of
    (1 - decay) is below the resolution of fp16.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.module = copy.deepcopy(model).float().requires_grad_(False).eval()

    @torch.no_grad()
    def update(self, source: Mapping[str, Any]) -> None:
        """ema += (1 - decay) * (weights - ema), for a model's state dict `source`. Integer buffers are copied.

        The host does not wait for the device.
        """
        average = self.module.state_dict()
        tensors = [name for name, value in average.items() if isinstance(value, torch.Tensor)]  # else an extra state
        averages = [name for name in tensors if average[name].is_floating_point()]
        copied = [name for name in tensors if not average[name].is_floating_point()]
        if copied:  # one launch instead of one per BatchNorm
            torch._foreach_copy_([average[name] for name in copied], [source[name] for name in copied])
        weights = [source[name].detach().to(average[name].dtype) for name in averages]
        torch._foreach_lerp_([average[name] for name in averages], weights, 1 - self.decay)
