"""The step that trains, is tried and is timed: autocast{forward, loss} -> scale -> backward ->
unscale -> clip -> step -> update -> zero_grad. Its results stay on the device; the host waits only
for an optimizer without a fused kernel.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property

import torch
import torch.compiler.config
from torch import nn

from cl_train.config.schema import LOSSES, OptimConfig
from cl_train.config.validation import user_function
from cl_train.data.device import Batch
from cl_train.step.optim import build_optimizer, in_memory_order, make_dense
from cl_train.step.precision import EMA, Fp32Weights, Precision, autocast

# For measurements: costs as much as any other rate, and random labels barely change the weights.
LEARNING_RATE = 1e-4
# Inception v3 as in torchvision's references; GoogLeNet as in Szegedy et al. 2014.
_AUX_WEIGHTS = {"aux_logits": 0.4, "aux_logits1": 0.3, "aux_logits2": 0.3}


@dataclass(frozen=True)
class Loss:
    """Cross-entropy, bce (Wightman et al. 2021, "ResNet strikes back"), or the user's function."""

    name: str = "cross_entropy"  # or bce, or package.module:function
    label_smoothing: float = 0.0
    bce_threshold: float | None = None  # targets become 1 above it and 0 below
    # One per class; empty: none. The repr, by which measurements are kept, leaves them out.
    class_weights: tuple[float, ...] = field(default=(), repr=False)

    @cached_property
    def function(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
        """The user's function of logits and targets. Raises ConfigError: it cannot be imported."""
        return None if self.name in LOSSES else user_function("loss", self.name)

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the mean, float32 [], for logits [N, classes] and targets int64 [N] or float [N,
        classes]. Class weights do not change the divisor, the number of images: micro-batches and
        ranks count equally.
        """
        logits = logits.float()
        if self.function is not None:
            loss = self.function(logits, targets)
            if loss.numel() != 1:
                what = f"loss={self.name} returned {list(loss.shape)}"
                raise ValueError(f"{what}; it must return the mean, a tensor of one number")
            return loss.reshape(())
        if not self.class_weights:
            return self._named(logits, targets, "mean")
        weights = _on_device(self.class_weights, logits.shape[1], logits.device)
        of_images = targets @ weights if targets.is_floating_point() else weights[targets]
        losses = self._named(logits, targets, "none")
        return (losses.view(len(losses), -1).mean(1) * of_images).mean()

    def _named(self, logits: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
        if self.name == "cross_entropy":
            return nn.functional.cross_entropy(
                logits, targets, label_smoothing=self.label_smoothing, reduction=reduction
            )
        assert self.name == "bce", self.name
        classes = logits.shape[1]
        if not targets.is_floating_point():
            targets = nn.functional.one_hot(targets, classes)
        targets = targets * (1 - self.label_smoothing) + self.label_smoothing / classes
        if self.bce_threshold is not None:
            targets = targets > self.bce_threshold
        return nn.functional.binary_cross_entropy_with_logits(
            logits, targets.float(), reduction=reduction
        )


@cache  # a copy to a GPU in each step would wait for it
def _on_device(weights: tuple[float, ...], outputs: int, device: torch.device) -> torch.Tensor:
    """Returns one weight per output; outputs without a class have 1."""
    return torch.tensor([*weights, *[1.0] * (outputs - len(weights))], device=device)


CROSS_ENTROPY = Loss()


def loss_of(output: object, targets: torch.Tensor, loss: Loss = CROSS_ENTROPY) -> torch.Tensor:
    """Returns the loss of an output, with the auxiliary heads of Inception v3 and GoogLeNet."""
    total = loss(logits_of(output), targets)
    for name, weight in _AUX_WEIGHTS.items():
        if (logits := getattr(output, name, None)) is not None:
            total = total + weight * loss(logits, targets)
    return total


def logits_of(output: object) -> torch.Tensor:
    """Returns the main head's logits [N, classes]. Raises ValueError: no tensor, no `.logits`."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, torch.Tensor):
        needs = "training needs a tensor [N, classes], or an object with the attribute `logits`"
        raise ValueError(f"the model returned a {type(output).__name__}; {needs}")
    return logits


@dataclass(frozen=True)
class StepSettings:
    """What one optimizer step does. Steps of equal settings do equal work."""

    precision: Precision
    optim: OptimConfig = field(default_factory=OptimConfig)  # library, decay groups and clip_norm
    loss: Loss = CROSS_ENTROPY
    accumulate_steps: int = 1
    ema_decay: float = 0.0  # 0: no moving average
    ema_every: int = 1
    mixup: float = 0.0
    cutmix: float = 0.0
    compile: bool = False
    image_sizes: int = 1  # that a compiled model is prepared for
    cuda_graph: bool = False


@dataclass(frozen=True)
class StepParts:
    wrapped_model: nn.Module  # the model that trains, perhaps in DDP, perhaps compiled
    weights: Fp32Weights
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    device: torch.device
    settings: StepSettings
    average: EMA | None = None

    def update_average(self, step: int) -> None:
        if self.average is not None and step % self.settings.ema_every == 0:
            self.average.update(self.weights.tensors())


def make_step(
    model: nn.Module,
    settings: StepSettings,
    device: torch.device,
    lr: float = LEARNING_RATE,
    *,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
) -> StepParts:
    """Makes the step of a model that has its device, dtypes and memory format already: the average,
    the optimizer's state, DDP's buckets and the compiled graph take over its strides
    (pytorch/pytorch#47163). wrap: puts the model into DDP. Raises ConfigError: as `make_dense` and
    `EMA` do.
    """
    make_dense(model)
    weights = Fp32Weights(model, settings.precision)
    average = EMA(model, settings.ema_decay) if settings.ema_decay > 0 else None
    optimizer = build_optimizer(settings.optim, model, weights.trainable(), lr)
    scaler = torch.amp.GradScaler(device.type, enabled=settings.precision.scales_loss)
    trained = model if wrap is None else wrap(model)
    if settings.compile:
        trained = compiled(trained, settings.image_sizes)
    return StepParts(trained, weights, optimizer, scaler, device, settings, average)


def compiled(model: nn.Module, image_sizes: int = 1) -> nn.Module:
    """Compiles one graph per image size: dynamic shapes are slower. The module inside stays eager;
    else it would be compiled again for evaluation.
    """
    config = torch.compiler.config
    config.recompile_limit = max(config.recompile_limit, 8 + image_sizes)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        # In place: gradient accumulation needs DDP's own class.
        model.compile(dynamic=False)
        return model
    wrapper = torch.compile(model, dynamic=False)
    assert isinstance(wrapper, nn.Module)
    return wrapper


@dataclass(frozen=True)
class StepResult:
    """One optimizer step on this rank: 0-d tensors on the device."""

    loss: torch.Tensor  # float32, mean over the images
    correct1: torch.Tensor  # images whose top-1 class is correct; int64, from a graph float32
    correct5: torch.Tensor
    skipped: torch.Tensor  # float32, 1 if a gradient was not finite


def labels_and_top5(
    logits: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the labels, int64 [N], and the five most probable classes, int64 [N, 5 or fewer].

    For float targets (mixed images) the label is the class with the largest weight; if several have
    it, the most probable of them.
    """
    best = logits.detach().float().topk(min(5, logits.shape[1]), dim=1).indices
    if not targets.is_floating_point():
        return targets, best
    hits = targets.gather(1, best) == targets.amax(1, keepdim=True)
    first_hit = best.gather(1, hits.int().argmax(1, keepdim=True))[:, 0]
    return torch.where(hits.any(1), first_hit, targets.argmax(1)), best


def train_step(parts: StepParts, micro_batches: Sequence[Batch]) -> StepResult:
    """Takes one optimizer step over micro-batches (gradient accumulation).

    A gradient that is not finite skips the update and lowers the loss scale, if there is one.
    """
    rows = []
    for number, batch in enumerate(micro_batches, 1):
        # DDP all-reduces in the last backward pass.
        with _without_reduction(parts.wrapped_model, unless=number == len(micro_batches)):
            with autocast(parts.settings.precision, parts.device):
                output = parts.wrapped_model(batch.images)
                loss = loss_of(output, batch.targets, parts.settings.loss)
            parts.scaler.scale(loss / len(micro_batches)).backward()

        labels, best = labels_and_top5(logits_of(output), batch.targets)
        hits = best == labels.unsqueeze(1)
        rows.append((loss.detach(), hits[:, 0].sum(), hits.any(1).sum()))

    losses, correct1, correct5 = (torch.stack(values) for values in zip(*rows, strict=True))
    return StepResult(losses.mean(), correct1.sum(), correct5.sum(), update_weights(parts))


def _without_reduction(model: nn.Module, *, unless: bool) -> AbstractContextManager[object]:
    is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
    return model.no_sync() if is_ddp and not unless else nullcontext()  # type: ignore[operator]


def update_weights(parts: StepParts) -> torch.Tensor:
    optimizer = parts.optimizer
    parts.weights.copy_gradients_from_model()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    update = _scaled_update if parts.scaler.is_enabled() else _plain_update
    skipped = update(parts, parameters)
    parts.weights.copy_weights_to_model()
    optimizer.zero_grad(set_to_none=True)
    return skipped


def _scaled_update(parts: StepParts, parameters: list[torch.Tensor]) -> torch.Tensor:
    optimizer, scaler = parts.optimizer, parts.scaler
    one = torch.ones((), device=parts.device)
    scale_before = scaler.scale(one)
    if (clip_norm := parts.settings.optim.clip_norm) is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, clip_norm)
    with in_memory_order(optimizer):
        scaler.step(optimizer)
    scaler.update()
    # Only a skipped update lowers the scale. The host does not wait for the comparison.
    return (scaler.scale(one) < scale_before).float()


def _plain_update(parts: StepParts, parameters: list[torch.Tensor]) -> torch.Tensor:
    optimizer = parts.optimizer
    # The norm is not finite if one gradient is not.
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if (clip_norm := parts.settings.optim.clip_norm) is not None:
        nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
    skipped = (~norm.isfinite()).float()
    # The fused kernels of SGD and Adam(W) read the flag on the device.
    skips_itself = isinstance(optimizer, torch.optim.SGD | torch.optim.Adam)
    with in_memory_order(optimizer):
        if skips_itself and optimizer.defaults["fused"]:
            optimizer.found_inf = skipped  # type: ignore[attr-defined]
            try:
                optimizer.step()
            finally:
                del optimizer.found_inf  # type: ignore[attr-defined]
        # The host waits: an optimizer without a fused kernel cannot skip on the device.
        elif not skipped.item():
            optimizer.step()
    return skipped
