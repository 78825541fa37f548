"""Mixed precision: the dtype of each part of a step, loss scaling, fp32 master weights, and their moving average.

The dtypes of each precision. The names are those of `precision=`:

| name    | weights | convolutions, matmuls | BatchNorm's input | loss scale | master weights |
|---------|---------|-----------------------|-------------------|------------|----------------|
| fp32    | fp32    | fp32, TF32 off        | fp32              | no         | no             |
| tf32    | fp32    | TF32 on CUDA          | fp32              | no         | no             |
| bf16    | fp32    | bf16 (autocast)       | bf16              | no         | no             |
| fp16    | fp32    | fp16 (autocast)       | fp16              | dynamic    | no             |
| fp16_o2 | fp16    | fp16                  | fp16              | dynamic    | fp32           |

BatchNorm's parameters and statistics are fp32 in every row. In every row but `fp32`, matmuls and
convolutions that remain in fp32 use TF32 on CUDA.
"""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from cl_train.config.schema import ConfigError
from cl_train.config.validation import suggest

VOLTA, AMPERE = (7, 0), (8, 0)  # compute capability of the first GPUs with tensor cores, and with bf16 in them


@dataclass(frozen=True)
class Precision:
    """One row of the table above, with TF32 as a switch of its own."""

    name: str  # never "auto"
    autocast_dtype: torch.dtype | None = None
    scales_loss: bool = False
    master_weights: bool = False
    tf32: bool = False
    reason: str = ""  # why `auto` chose it

    @property
    def input_dtype(self) -> torch.dtype:
        """The dtype of the model's input images: the one that its first convolution computes in."""
        return torch.float16 if self.master_weights else self.autocast_dtype or torch.float32

    @property
    def for_fp32_weights(self) -> "Precision":
        """The precision that evaluates an fp32 copy of the weights (EMA): fp16_o2 has to become autocast."""
        return Precision("fp16", autocast_dtype=torch.float16) if self.master_weights else self  # no loss scale needed


_TABLE = (
    Precision("fp32"),
    Precision("tf32", tf32=True),
    Precision("bf16", autocast_dtype=torch.bfloat16, tf32=True),
    Precision("fp16", autocast_dtype=torch.float16, scales_loss=True, tf32=True),
    Precision("fp16_o2", scales_loss=True, master_weights=True, tf32=True),
)
BY_NAME = {precision.name: precision for precision in _TABLE}


def resolve_precision(name: str, device: torch.device) -> Precision:
    """Resolve a `precision=` name for `device`.

    auto: fp16 on CUDA with compute capability >= 7.0 (tensor cores), bf16 on a CPU with native bf16, else fp32.
    """
    if name not in (*BY_NAME, "auto"):
        raise ConfigError(f"precision={name}; use auto, {', '.join(BY_NAME)}{suggest(name, BY_NAME)}")
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
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            words = {word for line in file if line.startswith(("flags", "Features")) for word in line.split()}
    except OSError:
        return False
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


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
def kernel_selection(*, tf32: bool, autotune: bool) -> Iterator[None]:
    """Set which CUDA kernels torch may select; the previous switches are restored at the end.

    The switches are process-wide: PyTorch has no narrower scope.

    Args:
        tf32: allow TF32 in fp32 matmuls and convolutions.
        autotune: let cuDNN time its convolution algorithms once per shape, all of them (torch's default is ten).
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.benchmark_limit)
    try:
        matmul.allow_tf32 = cudnn.allow_tf32 = tf32
        cudnn.benchmark, cudnn.benchmark_limit = autotune, 0
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.benchmark_limit = before


@contextmanager
def without_autotuning() -> Iterator[None]:
    """For a shape that occurs once: cuDNN's search for the fastest algorithm takes seconds."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The context of forward and loss, in training and in evaluation."""
    dtype = precision.autocast_dtype
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def build_scaler(
    precision: Precision, device: torch.device, init_scale: float = 65536.0, growth_interval: int = 2000
) -> torch.amp.GradScaler:
    """A dynamic loss scaler; for precisions without loss scaling it is disabled and every call is a no-op."""
    options = {"init_scale": init_scale, "growth_interval": growth_interval}
    return torch.amp.GradScaler(device.type, enabled=precision.scales_loss, **options)  # type: ignore[arg-type]


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
    """fp32 copies of a model's fp16 parameters, which the optimizer updates (Micikevicius et al. 2018, section 3.1).

    fp32 parameters (BatchNorm's) are their own master weights. Each copy has the strides of its parameter.
    """

    def __init__(self, model: nn.Module) -> None:
        self.by_name = dict(model.named_parameters())
        half = {n: p for n, p in self.by_name.items() if p.dtype == torch.float16 and p.requires_grad}
        full = {name: nn.Parameter(parameter.detach().float()) for name, parameter in half.items()}
        self.by_name.update(full)
        self._half: list[torch.Tensor] = list(half.values())
        self._full: list[torch.Tensor] = list(full.values())

    def copy_gradients_from_model(self) -> None:
        """Move the fp16 gradients, still scaled, to the fp32 master weights."""
        pairs = [(full, half.grad) for full, half in zip(self._full, self._half, strict=True) if half.grad is not None]
        gradients = [torch.empty_like(full) for full, _ in pairs]
        torch._foreach_copy_(gradients, [gradient for _, gradient in pairs])
        for (full, _), gradient in zip(pairs, gradients, strict=True):
            full.grad = gradient
        for half in self._half:
            half.grad = None

    @torch.no_grad()
    def copy_weights_to_model(self) -> None:
        """Round the fp32 master weights into the model's fp16 parameters."""
        torch._foreach_copy_(self._half, self._full)

    @torch.no_grad()
    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Set master weights and model from `state`: fp32 values by parameter name, such as a model's state dict."""
        for name, master in self.by_name.items():
            master.copy_(state[name])
        self.copy_weights_to_model()


def full_precision_state(model: nn.Module, masters: MasterWeights | None) -> dict[str, torch.Tensor]:
    """The model's state dict with master weights instead of fp16 weights, so that any precision can load it."""
    state = dict(model.state_dict())
    if masters is not None:
        state.update({name: master.detach() for name, master in masters.by_name.items()})
    return state


def trainable_parameters(model: nn.Module, masters: MasterWeights | None) -> dict[str, nn.Parameter]:
    """The parameters that the optimizer updates, by name: the model's own, or their fp32 master weights."""
    named = dict(model.named_parameters()) if masters is None else masters.by_name
    return {name: parameter for name, parameter in named.items() if parameter.requires_grad}


class EMA:
    """A float32 copy of `model`, `module`, with moving averages of the model's weights and BatchNorm statistics.

    torch's AveragedModel cannot average fp32 master weights, which fp16_o2 needs: a change of a weight by a share of
    (1 - decay) is below the resolution of fp16.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.module = copy.deepcopy(model).float().requires_grad_(False).eval()

    @torch.no_grad()
    def update(self, model: nn.Module, masters: MasterWeights | None = None) -> None:
        """ema += (1 - decay) * (weights - ema). Integer buffers are copied. The host does not wait for the device."""
        source, average = full_precision_state(model, masters), self.module.state_dict()
        tensors = [name for name, value in average.items() if isinstance(value, torch.Tensor)]  # else an extra state
        averages = [name for name in tensors if average[name].is_floating_point()]
        copied = [name for name in tensors if not average[name].is_floating_point()]
        if copied:  # one launch instead of one per BatchNorm
            torch._foreach_copy_([average[name] for name in copied], [source[name] for name in copied])
        weights = [source[name].detach().to(average[name].dtype) for name in averages]
        torch._foreach_lerp_([average[name] for name in averages], weights, 1 - self.decay)
