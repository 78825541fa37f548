"""From the settings to a model that trains, and its step. The order matters: build and load, move and cast, convert the
memory format; then copy the model for the EMA, wrap it in DDP, compile it. Converting later would leave DDP's gradient
buckets, the EMA or the compiled graph in the other layout (pytorch/pytorch#47163). Then `batch_size=auto`."""

import logging
import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from functools import partial
from inspect import signature
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn

from cl_train.comparison.paired import CONTIGUOUS, Layout, TimedModel, Workload, choose_memory_format, measurement_state
from cl_train.config.schema import AUTO_BATCH_SIZE, Config, ConfigError
from cl_train.config.validation import graph_conflict
from cl_train.data.build import build_data, size_schedule
from cl_train.data.device import Batch, DeviceFormat
from cl_train.memory_format.convert import convert
from cl_train.memory_format.crashes import Crash, crash_safe, known_issues
from cl_train.memory_format.layout import named_tensors, refuse_lazy
from cl_train.memory_format.model_call import explain_failure, failure_explained, state_restored
from cl_train.models import sources as models
from cl_train.step.cuda_graph import WARM_UP_STEPS, WARM_UP_STEPS_DDP, GraphedStep, Recorder
from cl_train.step.optim import build_optimizer, freeze
from cl_train.step.precision import EMA, Fp32Weights, Precision, autocast, cast_model, resolve_precision
from cl_train.step.train_step import Loss, StepParts, StepResult, logits_of, loss_of, train_step
from cl_train.step.utilisation import flops_of, utilisation
from cl_train.system.distributed import Dist, gather_objects, on_main
from cl_train.system.machine import available_bytes, describe_out_of_memory, is_out_of_memory, release_memory
from cl_train.training.state import TrainingFault, TrainState

log = logging.getLogger(__name__)


def build_train_state(cfg: Config, precision: Precision, num_classes: int, dist: Dist, lr: float) -> TrainState:
    """Build the model, its optimizer and its step. Raises ConfigError or TrainingFault: it cannot train."""
    model = build_model(cfg, num_classes, dist)
    for name, parameter in model.named_parameters() if cfg.weights and not cfg.evaluate_only else ():
        if parameter.requires_grad and not parameter.isfinite().all():  # constants may: a mask holds -Inf
            raise ConfigError(f"weights={cfg.weights} holds {'NaN' if parameter.isnan().any() else 'Inf'} in {name}")
    head = models.head_parameters(model)
    if cfg.optim.head_lr_ratio != 1 and not head:
        raise ConfigError(f"optim.head_lr_ratio: model={cfg.model} has no nn.Linear, which would be its classifier")
    freeze(model, cfg.freeze, head)
    model = cast_model(model.to(dist.device), precision)
    batch_format = convert_layout(cfg, model, precision, num_classes, dist)
    weights = Fp32Weights(model, precision)
    average = EMA(model, cfg.ema_decay) if cfg.ema_decay > 0 else None
    optimizer = build_optimizer(cfg.optim, model, weights.trainable(), lr, head)
    scaler = torch.amp.GradScaler(
        dist.device.type, cfg.amp.init_scale, growth_interval=cfg.amp.growth_interval, enabled=precision.scales_loss
    )
    recorder = Recorder(dist.device) if uses_cuda_graph(cfg, dist) else None
    if recorder is not None and recorder.stream is None:
        log.warning("cuda_graph=true: a CPU has no CUDA graphs; the step runs eagerly on static buffers")
    with nullcontext() if recorder is None else recorder.on_stream():
        if dist.device.type == "cuda" and not cfg.evaluate_only:  # before DDP, whose hooks would count the step
            try_model(cfg, model, precision, num_classes, batch_format)
            torch.cuda.reset_peak_memory_stats(dist.device)
        trained = wrap_in_ddp(model, dist, static_graph=cfg.ddp_static_graph)
    if cfg.compile:
        trained = compiled(trained, cfg.compile_mode, graphs=len(size_schedule(cfg.data).image_sizes))
    loss = Loss(cfg.loss, cfg.label_smoothing, cfg.bce_threshold)
    parts = StepParts(trained, weights, optimizer, scaler, precision, dist.device, loss, cfg.optim.clip_norm)
    step: Callable[[Sequence[Batch]], StepResult] = partial(train_step, parts)
    if recorder is not None:
        warm_up = WARM_UP_STEPS if dist.world_size == 1 else WARM_UP_STEPS_DDP
        step = GraphedStep(parts, recorder, warm_up=warm_up, fall_back=cfg.cuda_graph == "auto")
    return TrainState(model, parts, average, batch_format, step)


def check_loss(loss: Loss, num_classes: int, device: torch.device, *, soft: bool) -> None:
    """Raises ConfigError: a loss of the user's fails on two images, or returns no number. soft: targets are float."""
    if loss.function is None:
        return
    logits = torch.zeros(2, num_classes, device=device, requires_grad=True)
    targets = torch.zeros_like(logits) if soft else torch.zeros(2, dtype=torch.int64, device=device)
    what = f"loss={loss.name} on logits {list(logits.shape)} and targets {targets.dtype} {list(targets.shape)}"
    with failure_explained(what, "it must return their mean loss, a tensor of one number"):
        loss(logits, targets).reshape(()).backward()


def build_model(cfg: Config, num_classes: int, dist: Dist) -> nn.Module:
    sizes = size_schedule(cfg.data).image_sizes
    weights = None if cfg.evaluate_only and cfg.resume else cfg.weights
    build = partial(models.build_model, cfg.model, num_classes=num_classes, weights=weights, drop_path=cfg.drop_path)
    model = build(image_size=sizes[-1], keep_classifier=cfg.evaluate_only and cfg.resume is None)
    refuse_lazy(model)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise ConfigError(f"{name} is on the meta device and has no values: build the model on the CPU")
        if isinstance(tensor, nn.Parameter) and tensor.layout != torch.strided:
            raise ConfigError(f"{name} is a sparse parameter, which the optimizers do not update: make it dense")
    val_size = cfg.data.val_size or cfg.data.image_size
    trained = () if cfg.evaluate_only else sizes
    for size in sorted({val_size, *trained}) if ":" not in cfg.model else ():  # a user's own may not run on "meta"
        task = f"{'train on' if size in trained else 'evaluate'} {cfg.batch_size} images of {size} px"
        advice = "change data.image_size, data.size_schedule or batch_size"
        with failure_explained(f"model={cfg.model} cannot {task}", advice):
            images = torch.empty(cfg.batch_size, 3, size, size, device="meta")
            models.copy_model(model, "meta").train(size in trained)(images)
    if cfg.sync_batchnorm and dist.world_size > 1:
        if dist.device.type != "cuda":
            raise ConfigError("sync_batchnorm=true needs CUDA: PyTorch has no SyncBatchNorm for CPUs")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return model


def convert_layout(cfg: Config, model: nn.Module, precision: Precision, num_classes: int, dist: Dist) -> DeviceFormat:
    """Convert `model` in place according to `channels_last=` and `conversion=`; returns the format of its input.
    On a CPU it is tried: a zoo model only in channels_last, which may crash; with `auto` it is contiguous then."""
    channels_last, conversion, select = cfg.channels_last, cfg.conversion, tuple(cfg.select)
    size = size_schedule(cfg.data).image_sizes[-1]  # the largest

    def tried(layout: torch.memory_format) -> DeviceFormat:
        batch_format = DeviceFormat(dist.device, precision.input_dtype, layout)
        if dist.device.type == "cpu" and (layout == torch.channels_last or ":" in cfg.model):
            on_main(lambda: try_model(cfg, model, precision, num_classes, batch_format), dist)
        return batch_format

    if channels_last == "auto":
        measure = partial(choose_memory_format, model, batch_size=cfg.batch_size, image_size=size)
        measure = partial(measure, precision=precision.name, device=dist.device, cuda_graph=uses_cuda_graph(cfg, dist))
        measure = partial(measure, compile=cfg.compile, compile_mode=cfg.compile_mode)
        optimizer = cfg.optim.name if cfg.optim.library == "torch" else "sgd"
        choice = on_main(lambda: measure(optimizer=optimizer), dist)
        log.info("channels_last=auto: %s", choice.reason)
        channels_last, conversion, select = str(choice.channels_last).lower(), choice.conversion, choice.select
    if channels_last == "true":
        if dist.device.type == "cpu" and (issue := known_issues(model)):
            log.info("channels_last: %s", issue)
        log.info("channels_last: %s", convert(model, conversion, select))
        try:
            return tried(torch.channels_last)
        except Crash as crash:
            if cfg.channels_last != "auto":
                raise ConfigError(f"model={cfg.model} in channels_last: {crash}; use channels_last=auto") from None
            log.warning("channels_last=auto: contiguous, because in channels_last %s", crash)
            convert(model, memory_format=torch.contiguous_format)
    return tried(torch.contiguous_format)


@crash_safe
def try_model(cfg: Config, model: nn.Module, precision: Precision, num_classes: int, form: DeviceFormat) -> None:
    """Train on noise of the largest size, and evaluate it; afterwards only torch's caches have changed. On a CPU two
    images in a forked process, because a kernel that crashes would end this one. On a GPU the whole batch, in training
    only; two images if the model will be compiled, which takes less memory than this eager step.
    Raises Crash: the fork was killed. TrainingFault: memory ran out. ConfigError: the model cannot take the images."""
    device, was_training, size = form.device, model.training, size_schedule(cfg.data).image_sizes[-1]
    count = 2 if device.type == "cpu" or cfg.compile else cfg.batch_size
    try:
        with state_restored(model, device):
            # cuDNN times its algorithms on it, and training uses its choice: zeros would be faster than images.
            noise = torch.randn(count, 3, size, size, device=device)
            images = noise.to(form.dtype, memory_format=form.memory_format)
            if not cfg.evaluate_only:
                targets = torch.randint(num_classes, (count,), device=device)
                with autocast(precision, device):
                    output = model(images)
                    logits = logits_of(output)
                    if logits.ndim != 2 or logits.shape[1] < num_classes:
                        raise ValueError(f"outputs {list(logits.shape)}, not [N, classes] for {num_classes} classes")
                    loss = loss_of(output, targets)
                loss.backward()
                if any(p.grad is not None and p.grad.layout != torch.strided for p in model.parameters()):
                    raise ValueError("sparse gradients, which the optimizers do not take: use sparse=False")
            if device.type == "cpu" and (cfg.evaluate_only or cfg.evaluate_every >= 0):
                # Only crashes matter: what else can fail in evaluation is told there.
                with suppress(Exception), torch.no_grad(), autocast(precision, device):
                    model.eval()(images)
                model.train(was_training)
    except Exception as error:
        if is_out_of_memory(error):
            advice = "Use a smaller batch_size or batch_size=auto; accumulate_steps keeps the global batch"
            raise TrainingFault(f"batch_size={count}: {describe_out_of_memory(error)}. {advice}") from None
        raise ConfigError(f"the model cannot train on {size} px images: {explain_failure(error)}") from error


def uses_cuda_graph(cfg: Config, dist: Dist) -> bool:
    """Whether steps are recorded; with `auto` only on a GPU, in one process, and if no other setting conflicts."""
    if cfg.cuda_graph == "auto":
        return dist.device.type == "cuda" and dist.world_size == 1 and graph_conflict(cfg) is None
    return cfg.cuda_graph == "true"


def check_ranks_agree(facts: dict[str, Any], dist: Dist) -> None:
    """Raises ConfigError: the ranks differ. DDP's own check of shapes and layouts fails on the other ranks alone, and
    its broadcast copies bytes in storage order, which permutes weights of another layout (NVIDIA/physicsnemo#1614)."""
    ranks = gather_objects({name: repr(value) for name, value in facts.items()}, dist)
    for rank, other in enumerate(ranks):
        for name in [name for name in ranks[0] | other if other.get(name) != ranks[0].get(name)]:
            differ = f"{name} is {ranks[0].get(name)} on rank 0 and {other.get(name)} on rank {rank}"
            raise ConfigError(f"the ranks disagree: {differ}; start every node with the same command, code and data")


def wrap_in_ddp(model: nn.Module, dist: Dist, *, static_graph: bool) -> nn.Module:
    """DDP if there are several ranks. Gradients are views of its buckets, in each parameter's strides: channels_last
    weights have channels_last gradients without a copy."""
    if dist.world_size == 1:
        return model
    layouts = {}
    for name, tensor in named_tensors(model).items():
        strides = tensor.stride() if tensor.layout == torch.strided else tensor.layout
        layouts[f"layout of {name}"] = (tuple(tensor.shape), strides)
    check_ranks_agree(layouts, dist)
    ddp, options = nn.parallel.DistributedDataParallel, dict[str, Any]()
    owners = [module for module in model.modules() if list(module.buffers(recurse=False))]
    has_only_statistics = all(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in owners)
    if has_only_statistics and "forward_sync_buffers" in signature(ddp).parameters:  # since torch 2.15
        # Else rank 0's are broadcast in each forward pass; evaluation and checkpoints take rank 0's anyway.
        options["forward_sync_buffers"] = False
    device_ids = [dist.device] if dist.device.type == "cuda" else None
    return ddp(model, device_ids=device_ids, gradient_as_bucket_view=True, static_graph=static_graph, **options)


def compiled(model: nn.Module, mode: str, graphs: int) -> nn.Module:
    """Compile each of `graphs` image sizes for training: dynamic shapes are slower. The inner module stays eager, else
    it would be compiled again for evaluation."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 8 + graphs)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model.compile(mode=mode, dynamic=False)  # in place: gradient accumulation needs DDP's own class
        return model
    wrapper = torch.compile(model, mode=mode, dynamic=False)
    assert isinstance(wrapper, nn.Module)
    return wrapper


def utilisation_of(state: TrainState, dist: Dist, speed: dict[str, Any]) -> dict[str, Any] | None:
    """FLOPs and shares of the device's peak (`step.utilisation`); None for a model that cannot run on shapes alone."""
    size, images_per_s = speed["image_size"], speed["images_per_s"]["end_to_end"]["median"] / dist.world_size
    try:
        shapes = models.copy_model(state.model, "meta").train()
        images = torch.empty(2, 3, size, size, device="meta", dtype=next(shapes.parameters()).dtype)
        flops = flops_of(lambda: shapes(images))
    except Exception:  # a user's model may raise any exception
        return None
    return utilisation(flops / len(images) / 1e9, images_per_s, state.parts.precision, dist.device, training=True)


# --- batch_size=auto --------------------------------------------------------------------------------------------------

FIRST, SMALLEST = 8, 2  # BatchNorm cannot train on one image if the last feature map is 1 x 1
LARGEST = {"cuda": 4096, "cpu": 256}
TIME_LIMIT_S = {"cuda": 90.0, "cpu": 30.0}
MARGIN = 0.9  # of the memory: evaluation and fragmentation need additional memory
AS_FAST = 0.98  # of the best speed: a smaller gain does not justify a larger batch, which means fewer updates
STEPS = 4


class BatchSpeed(NamedTuple):
    batch_size: int
    images_per_s: float
    peak_memory_gib: float


def resolve_batch_size(cfg: Config, dist: Dist) -> Config:
    """`cfg` with the number of `batch_size=auto`, and with the micro-steps that `global_batch_size` requires. Rank 0
    measures eager steps on images of the largest size; on a CPU in a forked process, which the system may kill.
    ConfigError: not even two images fit, the data has too few, or the global batch cannot be split evenly."""
    if cfg.batch_size == AUTO_BATCH_SIZE:
        return replace(cfg, batch_size=on_main(lambda: _fastest_batch_size(cfg, dist), dist))
    if cfg.global_batch_size is None:
        return cfg
    micro_steps, rest = divmod(cfg.global_batch_size, cfg.batch_size * dist.world_size)
    asked = f"global_batch_size={cfg.global_batch_size} with batch_size={cfg.batch_size} x {dist.world_size} processes"
    if rest or not micro_steps:
        raise ConfigError(f"{asked}: it is not a multiple; choose another batch_size")
    if micro_steps > 1 and cfg.ddp_static_graph:
        raise ConfigError(f"{asked} needs micro-steps: raise batch_size, or set ddp_static_graph=false")
    return replace(cfg, accumulate_steps=micro_steps)


def _fastest_batch_size(cfg: Config, dist: Dist) -> int:
    device, single_process = dist.device, Dist(0, 1, dist.device)
    augment = replace(cfg.augment, repeats=1)  # a batch of one image has no place for repeats
    with closing(build_data(cfg.data, augment, batch_size=1, seed=cfg.seed, dist=single_process)) as data:
        images, classes = data.train_images, data.num_classes
    size = size_schedule(cfg.data).image_sizes[-1]
    largest = min(LARGEST[device.type], images // (cfg.accumulate_steps * dist.world_size))
    if largest < SMALLEST:
        raise ConfigError(f"batch_size=auto: {images} training images are too few for {dist.world_size} processes")
    available = available_bytes(device)
    limit_gib = math.inf if available is None else MARGIN * available / 2**30
    workload = Workload(SMALLEST, (3, size, size), resolve_precision(cfg.precision, device), device, optim=cfg.optim)
    layout = Layout("", torch.channels_last, cfg.conversion, tuple(cfg.select))
    if cfg.channels_last == "false" or (cfg.channels_last == "auto" and device.type == "cpu"):
        layout = CONTIGUOUS  # on a CPU channels_last may crash, which `auto` avoids
    with measurement_state(workload):
        model = build_model(replace(cfg, batch_size=SMALLEST, weights=None), classes, single_process)

        @crash_safe
        def measure(batch_size: int) -> BatchSpeed:
            release_memory()
            timed = TimedModel(model, layout, replace(workload, batch_size=batch_size))
            timed.warm_up()
            peak_gib = timed.peak_memory_gib([timed])
            return BatchSpeed(batch_size, batch_size / statistics.median(timed.block_times_s(STEPS)), peak_gib)

        chosen, measured = search(measure, largest, limit_gib, TIME_LIMIT_S[device.type])
    release_memory()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    speeds = ", ".join(f"{item.batch_size}: {item.images_per_s:.1f}" for item in measured)
    log.info("batch_size=auto: %d (images/s by size, in %.1f GiB: %s)", chosen, limit_gib, speeds)
    return chosen


def search(
    measure: Callable[[int], BatchSpeed], largest: int, limit_gib: float, time_limit_s: float
) -> tuple[int, list[BatchSpeed]]:
    """Double the batch size from 8 while it fits: the smallest of the fastest sizes, and all that fit, ascending.
    ConfigError: not even 2 images fit."""
    measured: list[BatchSpeed] = []
    started_at, size = perf_counter(), min(FIRST, largest)
    while size >= SMALLEST:
        expected_gib, result = 0.0, None
        if len(measured) > 1:  # running out of memory is slow, and on a CPU the system ends the process
            first, second = measured[-2:]
            per_image = (second.peak_memory_gib - first.peak_memory_gib) / (second.batch_size - first.batch_size)
            expected_gib = second.peak_memory_gib + max(0.0, per_image) * (size - second.batch_size)
        try:
            result = measure(size) if expected_gib <= limit_gib else None
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        if result is not None and result.peak_memory_gib <= limit_gib:
            measured.append(result)
            # The next size would take about twice as long as all before it.
            if size == largest or 3 * (perf_counter() - started_at) > time_limit_s:
                break
            size = min(2 * size, largest)
        elif measured:
            break
        else:
            size = largest = size // 2
    if not measured:
        raise ConfigError(f"batch_size=auto: not even {SMALLEST} images fit into {limit_gib:.2f} GiB")
    best = max(item.images_per_s for item in measured)
    return next(item.batch_size for item in measured if item.images_per_s >= AS_FAST * best), measured
