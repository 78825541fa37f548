"""From the settings to a model that trains, and its step.

The order matters: `build_model` builds the model, loads its weights, moves and casts it; `setup.py`
then converts its memory format; `train_state` copies it for the EMA, wraps it in DDP and compiles
it, all of which take over its strides (pytorch/pytorch#47163).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from cl_train.data.build import Data
from cl_train.data.device import Batch, DeviceFormat
from cl_train.errors import ConfigError
from cl_train.memory_format.audit_report import LayoutReport
from cl_train.memory_format.layout import model_memory_format, named_tensors, refuse_lazy
from cl_train.memory_format.layout_recorder import recording
from cl_train.models import sources as models
from cl_train.models.facts import ModelFacts, facts_of, image_shapes
from cl_train.step.backup import random_state_restored
from cl_train.step.cuda_graph import WARM_UP_STEPS, WARM_UP_STEPS_DDP, GraphedStep, Recorder
from cl_train.step.optim import freeze
from cl_train.step.precision import (
    BATCH_NORMS,
    Precision,
    autocast,
    cast_model,
    kernel_selection,
)
from cl_train.step.train_step import (
    StepParts,
    StepResult,
    StepSettings,
    logits_of,
    make_step,
    train_step,
)
from cl_train.step.utilisation import utilisation
from cl_train.system.distributed import Dist, check_ranks_agree
from cl_train.system.failures import failure_explained
from cl_train.system.machine import reset_peak_memory
from cl_train.system.run_folder import Speed
from cl_train.training.parts import ModelSettings, audit_command

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainState:
    model: nn.Module  # not wrapped: for evaluation and checkpoints
    parts: StepParts  # optimizer, loss scaler, EMA and the wrapped model that trains
    batch_format: DeviceFormat  # of the model's input; its memory format is also the model's
    train_step: Callable[[Sequence[Batch]], StepResult]  # eager or as a CUDA graph
    parity: str | None = None  # of channels_last, as in summary.json
    facts: Mapping[int, ModelFacts] = field(default_factory=dict)  # by image size of training

    @property
    def is_warming_up(self) -> bool:
        """Whether the steps are still eager, but a CUDA graph of them will be recorded."""
        return isinstance(self.train_step, GraphedStep) and self.train_step.is_warming_up


def build_model(
    wanted: ModelSettings, precision: Precision, data: Data, dist: Dist
) -> tuple[nn.Module, dict[int, ModelFacts]]:
    """Returns the model on its device, in the dtypes of `precision` and not yet converted, and its
    facts at each image size of training. Raises ConfigError: it cannot be built.
    """
    model = model_of(wanted, data.num_classes, data.classes)
    if wanted.weights and dist.is_main:
        names = ("mean", "std") if wanted.is_trained else None
        models.log_preprocessing(wanted.data, wanted.name, wanted.weights, wanted.entry, names)
    head = models.head_parameters(model)
    if wanted.is_trained:
        if wanted.weights:
            refuse_nonfinite(model, f"weights={wanted.weights}")
        freeze(model, wanted.freeze, head)
    facts = facts_by_size(wanted, model)
    if wanted.is_trained and wanted.sync_batchnorm and dist.world_size > 1:
        if dist.device.type != "cuda":
            raise ConfigError("sync_batchnorm=true needs CUDA: CPUs have no SyncBatchNorm")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        freeze(model, wanted.freeze, head)  # the new modules, too
    return cast_model(model.to(dist.device), precision), facts


def train_state(
    wanted: ModelSettings,
    model: nn.Module,
    settings: StepSettings,
    batch_format: DeviceFormat,
    num_classes: int,
    dist: Dist,
) -> TrainState:
    """Returns `model` with the step that trains it. Raises ConfigError: it cannot train."""
    recorder = Recorder(dist.device) if settings.cuda_graph else None
    if recorder is not None and recorder.stream is None:
        log.warning("cuda_graph=true: a CPU has no CUDA graphs, the steps run eagerly")
    on_stream = nullcontext if recorder is None else recorder.on_stream
    # On a CPU `facts_by_size` has already tried the shapes of a zoo's model.
    is_untried = dist.device.type == "cuda" or ":" in wanted.name + settings.loss.name
    is_channels_last = batch_format.memory_format == torch.channels_last
    if is_untried or is_channels_last:
        with on_stream():
            try_run(wanted, model, settings, batch_format, num_classes)
    reset_peak_memory(dist.device)

    # With a static graph DDP knows when a gradient is complete; accumulation has no such mode.
    is_static = settings.cuda_graph and settings.accumulate_steps == 1

    def in_ddp(model: nn.Module) -> nn.Module:
        with on_stream():
            return wrap_in_ddp(model, dist, static_graph=is_static)

    parts = make_step(model, settings, dist.device, wrap=in_ddp)
    step: Callable[[Sequence[Batch]], StepResult] = partial(train_step, parts)
    if recorder is not None:
        warm_up = WARM_UP_STEPS if dist.world_size == 1 else WARM_UP_STEPS_DDP
        step = GraphedStep(parts, recorder, warm_up=warm_up, fall_back=wanted.graph_may_fail)
    return TrainState(model, parts, batch_format, step)


def evaluated_state(
    model: nn.Module, settings: StepSettings, batch_format: DeviceFormat
) -> TrainState:
    """Returns `model` for evaluation only: without a trial step, DDP or compilation."""
    parts = make_step(model, settings, batch_format.device)
    return TrainState(model, parts, batch_format, partial(train_step, parts))


def refuse_nonfinite(model: nn.Module, source: str) -> None:
    """Raises ConfigError: a trained parameter holds NaN or Inf."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.isfinite().all():
            raise ConfigError(f"{source} holds NaN or Inf in {name}")


def model_of(wanted: ModelSettings, num_classes: int, classes: Sequence[str] = ()) -> nn.Module:
    """Returns the model on the CPU with its weights. Raises ConfigError: it cannot be built."""
    model = models.build_model(
        wanted.name,
        num_classes=num_classes,
        classes=classes if wanted.is_trained else (),
        weights=wanted.weights,
        image_size=wanted.largest_size,
        drop_path=wanted.drop_path,
        keep_classifier=not wanted.is_trained,
        entry=wanted.entry,
    )
    refuse_lazy(model)
    if any(tensor.is_meta for tensor in named_tensors(model).values()):
        raise ConfigError(f"model={wanted.name} is on the meta device: build it on the CPU")
    return model


def facts_by_size(wanted: ModelSettings, model: nn.Module) -> dict[int, ModelFacts]:
    """Returns the facts of `model` at each image size of training. Raises ConfigError: it cannot
    take images of such a size, or of evaluation. Errors of the user's own model are left to the
    trial step, which tells more.
    """
    is_users, trained = ":" in wanted.name, wanted.trained_sizes
    facts = {}
    for size in {wanted.data.eval_size, *trained}:
        count = min(2, wanted.batch_size) if is_users else wanted.batch_size
        images = image_shapes(model, count, 3, size, size)
        task = "train on" if size in trained else "evaluate"
        what = f"model={wanted.name} cannot {task} {wanted.batch_size} images of {size} px"
        advice = "change data.image_size, data.size_schedule or batch_size"
        with suppress(Exception) if is_users else failure_explained(what, advice):
            facts[size] = facts_of(model, images, training=size in trained)
    return {size: facts[size] for size in facts.keys() & set(trained)}


def try_run(
    wanted: ModelSettings,
    model: nn.Module,
    settings: StepSettings,
    batch_format: DeviceFormat,
    num_classes: int,
) -> None:
    """Tries a step on the largest images, logs if the model loses channels_last in it, then tries
    an evaluation of the model and of its average.

    On a GPU the step takes the whole batch, so that memory runs out now. It takes two images on a
    CPU, and before a compilation: the compiled step needs less memory.
    """
    size = wanted.largest_size
    is_whole = batch_format.device.type == "cuda" and not settings.compile
    shape = (wanted.batch_size if is_whole else min(2, wanted.batch_size), 3, size, size)
    facts = (settings.precision.name, str(batch_format.device), torch.__version__)
    report = LayoutReport(wanted.name, model_memory_format(model), str(shape), *facts)
    trial = partial(try_model, model, settings, batch_format, shape, num_classes)
    evaluated = (*shape[:2], wanted.data.eval_size, wanted.data.eval_size)
    # Kernels for two images would never be used again.
    with kernel_selection(autotune=torch.backends.cudnn.benchmark and is_whole):
        try:
            with recording(report):
                parts = trial()
        except ConfigError:  # perhaps the model only fails under the recorder
            parts = trial()
        if parts is not None and wanted.is_evaluated:
            try_evaluation(parts, settings.precision, batch_format, evaluated)
    # A contiguous run loses nothing, also where the model permutes its images by itself.
    if batch_format.memory_format == torch.channels_last and report.of("lost"):
        where = audit_command(wanted, settings.precision)
        log.info(
            "trial step of %d images: %s; where and why: %s", shape[0], report.headline(), where
        )


def try_model(
    model: nn.Module,
    settings: StepSettings,
    batch_format: DeviceFormat,
    shape: Sequence[int],
    num_classes: int,
) -> StepParts | None:
    """Trains a copy of `model` for one step on noise [N, 3, H, W]; None: it cannot be copied.
    Raises ConfigError: it cannot take the images. torch's own error: memory runs out.
    """
    device = batch_format.device

    def check_logits(module: nn.Module, inputs: Any, output: Any) -> None:
        shape, needs = list(logits_of(output).shape), f"[N, classes] for {num_classes} classes"
        if len(shape) != 2 or shape[1] < num_classes:
            raise ValueError(f"outputs {shape}, not {needs}")

    try:
        copied = models.copy_model(model)
    except ConfigError as error:
        log.info("no step is tried: %s", error)
        return None
    if not isinstance(copied, torch.jit.ScriptModule):  # it takes no hooks
        copied.register_forward_hook(check_logits)
    what = f"the model cannot train on {shape[-1]} px images"
    advice = "change batch_size or data.image_size, or mend the model"
    with failure_explained(what, advice, memory_too=False), random_state_restored(device):
        # cuDNN's choice of kernels may stay for training: zeros would be faster than images.
        images = batch_format.place(torch.randn(*shape, device=device))
        labels = torch.randint(num_classes, (shape[0],), device=device)
        is_soft = max(settings.mixup, settings.cutmix) > 0
        targets = F.one_hot(labels, num_classes).float() if is_soft else labels
        parts = make_step(copied, replace(settings, compile=False), device)
        train_step(parts, [Batch(images, targets)])
        parts.update_average(settings.ema_every)
    return parts


def try_evaluation(
    parts: StepParts, precision: Precision, batch_format: DeviceFormat, shape: Sequence[int]
) -> None:
    """Raises ConfigError: the model, or its average, cannot be evaluated on images [N, 3, H, W]."""
    models = {"the model": (parts.wrapped_model, precision)}
    if parts.average is not None:
        models["the average of the model"] = parts.average.module, precision.for_fp32_weights
    for name, (model, used) in models.items():
        what = f"{name} cannot be evaluated on {shape[-1]} px images"
        remedy = "use ema_decay=0" if model is not parts.wrapped_model else "mend its eval mode"
        with (
            failure_explained(what, remedy),
            random_state_restored(batch_format.device),
            torch.no_grad(),
            autocast(used, batch_format.device),
        ):
            images = batch_format.place(torch.randn(*shape, device=batch_format.device))
            model.eval()
            logits_of(model(images))


def wrap_in_ddp(model: nn.Module, dist: Dist, *, static_graph: bool) -> nn.Module:
    """Wraps `model` in DDP if there are several ranks. Gradients are views of its buckets, in each
    parameter's strides: channels_last weights have channels_last gradients without a copy.
    """
    if dist.world_size == 1:
        return model
    layouts = {}
    for name, tensor in named_tensors(model).items():
        strides = tensor.stride() if tensor.layout == torch.strided else tensor.layout
        layouts[f"layout of {name}"] = (tuple(tensor.shape), strides)
    check_ranks_agree(layouts, dist)
    ddp = nn.parallel.DistributedDataParallel
    options: dict[str, Any] = {"gradient_as_bucket_view": True, "static_graph": static_graph}
    if dist.device.type == "cuda":
        options["device_ids"] = [dist.device]
    owners = [module for module in model.modules() if list(module.buffers(recurse=False))]
    is_batch_norm = [isinstance(module, BATCH_NORMS) for module in owners]
    if all(is_batch_norm) and "forward_sync_buffers" in signature(ddp).parameters:
        # An option since torch 2.15. By default rank 0's statistics are broadcast in each forward
        # pass; evaluation and checkpoints take rank 0's anyway.
        options["forward_sync_buffers"] = False
    return ddp(model, **options)


def utilisation_of(state: TrainState, dist: Dist, speed: Speed) -> dict[str, Any] | None:
    """Returns the FLOPs and their share of the device's peak at this `speed`; None: unknown."""
    facts = state.facts.get(speed.image_size)
    if facts is None or facts.gflop is None or facts.step_gflop is None:
        return None
    images_per_s = speed.images_per_s["end_to_end"]["median"] / dist.world_size
    gflop, step_gflop = facts.gflop, facts.step_gflop
    return utilisation(gflop, step_gflop, images_per_s, state.parts.settings.precision, dist.device)
