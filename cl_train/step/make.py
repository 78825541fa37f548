"""The step that trains, that is tried and that is timed, made from its settings."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
import torch.compiler.config
from torch import nn

from cl_train.config.schema import AmpConfig, OptimConfig
from cl_train.step.optim import build_optimizer
from cl_train.step.precision import EMA, Fp32Weights, Precision
from cl_train.step.train_step import CROSS_ENTROPY, Loss, StepParts

# For measurements: costs as much as any other rate, and random labels barely change the weights.
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class StepSettings:
    """What one optimizer step does. Steps of equal settings do equal work."""

    precision: Precision
    optim: OptimConfig = field(default_factory=OptimConfig)  # library, decay groups and clip_norm
    loss: Loss = CROSS_ENTROPY
    amp: AmpConfig = field(default_factory=AmpConfig)
    accumulate_steps: int = 1
    ema_decay: float = 0.0  # 0: no moving average
    ema_every: int = 1
    mixup: float = 0.0
    cutmix: float = 0.0
    soft_targets: bool = False  # float [N, classes]: the labels are vectors
    compile: bool = False
    compile_mode: str = "default"
    image_sizes: int = 1  # that a compiled model is prepared for
    cuda_graph: bool = False


def make_step(
    model: nn.Module,
    settings: StepSettings,
    device: torch.device,
    lr: float = LEARNING_RATE,
    *,
    head: Collection[str] = (),
    wrap: Callable[[nn.Module], nn.Module] | None = None,
) -> StepParts:
    """Returns the objects of a step that trains `model`, for `train_step` or `GraphedStep`.

    The model has its device, dtypes and memory format already: the average, the optimizer's state,
    DDP's buckets and the compiled graph take its strides over (pytorch/pytorch#47163). head: names
    of the classifier's parameters. wrap: puts the model into DDP.
    """
    weights = Fp32Weights(model, settings.precision)
    average = EMA(model, settings.ema_decay) if settings.ema_decay > 0 else None
    optimizer = build_optimizer(settings.optim, model, weights.trainable(), lr, head)
    scaler = torch.amp.GradScaler(
        device.type,
        settings.amp.init_scale,
        growth_interval=settings.amp.growth_interval,
        enabled=settings.precision.scales_loss,
    )
    trained = model if wrap is None else wrap(model)
    if settings.compile:
        trained = compiled(trained, settings.compile_mode, settings.image_sizes)
    return StepParts(
        trained,
        weights,
        optimizer,
        scaler,
        settings.precision,
        device,
        settings.loss,
        settings.optim.clip_norm,
        average,
        settings.ema_every,
    )


def compiled(model: nn.Module, mode: str, image_sizes: int = 1) -> nn.Module:
    """Returns `model`, compiled for each image size: dynamic shapes are slower.

    The module inside stays eager, else it would be compiled again for evaluation.
    """
    config = torch.compiler.config
    config.recompile_limit = max(config.recompile_limit, 8 + image_sizes)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        # In place: gradient accumulation needs DDP's own class.
        model.compile(mode=mode, dynamic=False)
        return model
    wrapper = torch.compile(model, mode=mode, dynamic=False)
    assert isinstance(wrapper, nn.Module)
    return wrapper
