"""Putting a run's model together, in the one order that works.

Build and load, move and cast, convert the memory format, then copy for the moving average, wrap in DDP, compile.
Converting later would leave DDP's gradient buckets, the average or the compiled graph in the other layout
(pytorch/pytorch#47163).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed
from torch import nn

from cl_train.comparison.auto import Choice, choose_memory_format
from cl_train.config.schema import Config, ConfigError
from cl_train.config.validation import graph_conflict
from cl_train.data.batch import Batch
from cl_train.memory_format import convert as memory_format
from cl_train.memory_format.known_issues import known_issues
from cl_train.memory_format.layout import layout_digest
from cl_train.models import registry as models
from cl_train.step.cuda_graph import (
    WARM_UP_STEPS,
    WARM_UP_STEPS_DDP,
    CudaRecorder,
    GraphedStep,
    HostRecorder,
    Recorder,
    graphed_average,
)
from cl_train.step.ema import WeightAverage
from cl_train.step.optim import build_optimizer
from cl_train.step.precision import MasterWeights, Precision, build_scaler, cast_model, trainable_parameters
from cl_train.step.train_step import StepParts, StepSums, train_step
from cl_train.system.distributed import Dist, broadcast_object, gather_objects

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Assembly:
    """A run's model in all its guises, and what a step needs."""

    model: nn.Module  # bare: for evaluation and checkpoints
    parts: StepParts  # parts.model is what trains: wrapped in DDP, compiled
    average: WeightAverage | None
    memory_format: torch.memory_format  # of the model and its input
    step: Callable[[Sequence[Batch]], StepSums]  # `train_step`, or its replay as a CUDA graph
    update_average: Callable[[], object]


def assemble(cfg: Config, precision: Precision, num_classes: int, dist: Dist, lr: float) -> Assembly:
    """Build everything that a training step works with.

    Raises:
        ConfigError: the model, its weights or its layout cannot be had.
    """
    model = models.build_model(
        cfg.model,
        num_classes=num_classes,
        weights=cfg.weights,
        image_size=cfg.data.image_size,
        keep_classifier=cfg.evaluate_only and cfg.resume is None,
    )
    training = not cfg.evaluate_only
    models.check_input(model, cfg.model, cfg.batch_size, cfg.data.image_size, training=training)
    if cfg.sync_batchnorm and dist.world_size > 1:
        if dist.device.type != "cuda":
            raise ConfigError("sync_batchnorm=true needs CUDA: PyTorch has no SyncBatchNorm for CPUs")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = cast_model(model.to(dist.device), precision)
    chosen = convert_layout(cfg, model, precision, dist)
    check_ranks_alike(model, dist)
    masters = MasterWeights(model) if precision.master_weights else None
    average = WeightAverage(model, cfg.ema_decay) if cfg.ema_decay > 0 else None
    optimizer = build_optimizer(cfg.optim, model, trainable_parameters(model, masters), lr)
    scaler = build_scaler(precision, dist.device, cfg.amp.init_scale, cfg.amp.growth_interval)
    recorder = graph_recorder(cfg, dist)
    trained = wrap(model, dist, recorder, static_graph=cfg.ddp_static_graph)
    if cfg.compile:
        trained.compile(mode=cfg.compile_mode)
    parts = StepParts(
        trained, optimizer, scaler, precision, dist.device, cfg.label_smoothing, cfg.optim.clip_norm, masters
    )
    step, update_average = steps(cfg, parts, average, model, recorder)
    return Assembly(model, parts, average, chosen, step, update_average)


def graph_recorder(cfg: Config, dist: Dist) -> Recorder | None:
    """What records CUDA graphs for this run; None where its steps run as they are."""
    if cfg.cuda_graph == "false" or (cfg.cuda_graph == "auto" and (graph_conflict(cfg) or dist.world_size > 1)):
        return None
    if dist.device.type == "cuda":
        return CudaRecorder(dist.device)
    if cfg.cuda_graph == "true":
        log.warning("cuda_graph=true: there are no CUDA graphs on a CPU; the step runs on static buffers")
        return HostRecorder()
    return None


def steps(
    cfg: Config, parts: StepParts, average: WeightAverage | None, model: nn.Module, recorder: Recorder | None
) -> tuple[Callable[[Sequence[Batch]], StepSums], Callable[[], object]]:
    """How a step and an update of the average are run: as they are, or replayed."""

    def update_average() -> None:
        if average is not None:
            average.update(model, parts.masters)

    if recorder is None:
        return partial(train_step, parts), update_average
    warm_up = WARM_UP_STEPS if parts.model is model else WARM_UP_STEPS_DDP
    step = GraphedStep(parts, recorder, warm_up=warm_up, only_if_launch_bound=cfg.cuda_graph == "auto")
    return step, update_average if average is None else graphed_average(average, parts, recorder)


def convert_layout(cfg: Config, model: nn.Module, precision: Precision, dist: Dist) -> torch.memory_format:
    """Convert `model` in place as `channels_last=` and `conversion=` say; returns the layout of its input."""
    wanted, conversion = cfg.channels_last, cfg.conversion
    if wanted == "auto":
        choice = _measured_choice(cfg, model, precision, dist)
        log.info("channels_last=auto: %s", choice.reason)
        wanted, conversion = str(choice.channels_last).lower(), choice.conversion
    if wanted == "false":
        return torch.contiguous_format
    for line in known_issues(
        model,
        device=dist.device,
        precision_name=precision.name,
        sync_batchnorm=cfg.sync_batchnorm,
    ):
        log.warning("channels_last: %s", line)
    report = memory_format.convert(model, conversion, select=cfg.select or None)
    log.info("channels_last: %s", report)
    return torch.channels_last


def _measured_choice(cfg: Config, model: nn.Module, precision: Precision, dist: Dist) -> Choice:
    """Rank 0 measures while the others wait; all ranks use its choice."""
    choice = None
    if dist.is_main:
        choice = choose_memory_format(
            model,
            batch_size=cfg.batch_size,
            image_size=cfg.data.image_size,
            precision=precision.name,
            device=dist.device,
            compile=cfg.compile,
            compile_mode=cfg.compile_mode,
            cuda_graph=graph_recorder(cfg, dist) is not None,
            optimizer=cfg.optim.name,
        )
    chosen = broadcast_object(choice, dist)
    assert isinstance(chosen, Choice)
    return chosen


def check_ranks_alike(model: nn.Module, dist: Dist) -> None:
    """Every rank must hold the same names, shapes and strides: a broadcast ships bytes in storage order, so it would
    permute the weights of a rank in another layout (NVIDIA/physicsnemo#1614).
    """
    digests = gather_objects(layout_digest(model), dist)
    assert len(set(digests)) == 1, f"ranks built different models or layouts: {digests}"


def wrap(model: nn.Module, dist: Dist, recorder: Recorder | None, *, static_graph: bool = False) -> nn.Module:
    """DDP over the ranks, gradients being views of its buckets (one copy less); the bare model for one process.

    Buckets take each parameter's strides, so channels_last weights have channels_last gradients without a copy. For a
    CUDA graph DDP is built on the stream of the recording: its hooks stay on the stream that they were made on.
    """
    if dist.world_size == 1:
        return model
    device_ids = [dist.device] if dist.device.type == "cuda" else None
    on_stream = torch.cuda.stream(recorder.stream) if isinstance(recorder, CudaRecorder) else nullcontext()
    with on_stream:
        return nn.parallel.DistributedDataParallel(
            model, device_ids=device_ids, gradient_as_bucket_view=True, static_graph=static_graph
        )
