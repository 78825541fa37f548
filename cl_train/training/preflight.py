"""What is tried before the first epoch, on noise: does the model train, does the batch fit, which batch is fastest.

A model that cannot train fails in seconds. `batch_size=auto` runs real steps at growing batch sizes, until memory or
time runs out, and takes the fastest size that fits.
"""

import dataclasses
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from cl_train.comparison.paired import CONTIGUOUS, Layout, TimedModel, Workload, measurement_state
from cl_train.config.schema import AUTO_BATCH_SIZE, Config, ConfigError
from cl_train.data.build import build_data, size_schedule
from cl_train.data.device import DeviceFormat
from cl_train.memory_format.crashes import Crash, crash_safe
from cl_train.memory_format.model_call import explain_failure, state_restored
from cl_train.step.precision import Precision, autocast, resolve_precision
from cl_train.step.train_step import logits_of, loss_of
from cl_train.system.distributed import Dist, on_main
from cl_train.system.machine import available_bytes, describe_out_of_memory, is_out_of_memory, release_memory
from cl_train.training.progress import TrainingFault

log = logging.getLogger(__name__)

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


def check_batch_fits(
    model: nn.Module,
    precision: Precision,
    batch_format: DeviceFormat,
    *,
    batch_size: int,
    image_size: int,
    num_classes: int,
    compiled: bool,
) -> None:
    """On a GPU, train the whole batch once, before `model` is wrapped in DDP, whose hooks would count it.

    With two images if the model will be `compiled`, which takes less memory than this eager pass.

    Raises:
        TrainingFault: the batch does not fit into memory.
        ConfigError: as `check_runs`.
    """
    if batch_format.device.type == "cuda":
        shape = (min(batch_size, 2) if compiled else batch_size, 3, image_size, image_size)
        with _failures_explained(batch_size, image_size):
            trial_step(model, precision, batch_format, shape, num_classes)
        torch.cuda.reset_peak_memory_stats(batch_format.device)


@crash_safe
def check_runs(
    model: nn.Module,
    precision: Precision,
    batch_format: DeviceFormat,
    *,
    image_size: int,
    num_classes: int,
    training: bool,
    evaluation: bool,
) -> None:
    """Train and evaluate two images in a forked process, because a kernel that crashes would end this one.

    Raises:
        Crash: the process was killed; the message names the module.
        ConfigError: the model cannot take the images, or has fewer outputs than there are classes.
    """
    shape, device = (2, 3, image_size, image_size), batch_format.device
    if training:
        with _failures_explained(2, image_size):
            trial_step(model, precision, batch_format, shape, num_classes)
    if evaluation:
        was_training = model.training
        # Only crashes matter: what else can fail in evaluation is told there.
        with state_restored(model, device), suppress(Exception), torch.no_grad(), autocast(precision, device):
            model.eval()(_noise(shape, batch_format))
        model.train(was_training)


@contextmanager
def _failures_explained(batch_size: int, image_size: int) -> Iterator[None]:
    """Turn any exception of the model, the user's code, into a TrainingFault, if memory ran out, or a ConfigError."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise TrainingFault(
                f"batch_size={batch_size}: {describe_out_of_memory(error)}. Use a smaller batch_size or "
                "batch_size=auto; accumulate_steps keeps the global batch"
            ) from None
        raise ConfigError(f"the model cannot train on {image_size} px images: {explain_failure(error)}") from error


def trial_step(
    model: nn.Module,
    precision: Precision,
    batch_format: DeviceFormat,
    shape: tuple[int, int, int, int],
    num_classes: int,
) -> None:
    """Forward and backward on noise; afterwards only torch's caches have changed."""
    device = batch_format.device
    with state_restored(model, device):
        images = _noise(shape, batch_format)
        targets = torch.randint(num_classes, (shape[0],), device=device)
        with autocast(precision, device):
            output = model(images)
            logits = logits_of(output)
            if logits.ndim != 2 or logits.shape[1] < num_classes:
                shape_found = list(logits.shape)
                raise ValueError(f"outputs of shape {shape_found}; expected [N, classes] for {num_classes} classes")
            loss = loss_of(output, targets)
        loss.backward()
        if any(p.grad is not None and p.grad.layout != torch.strided for p in model.parameters()):
            raise ValueError("sparse gradients, which the optimizers do not take: use sparse=False")


def _noise(shape: tuple[int, ...], batch_format: DeviceFormat) -> torch.Tensor:
    """cuDNN times its algorithms on it, and training uses its choice: zeros would be faster than images."""
    noise = torch.randn(shape, device=batch_format.device)
    return noise.to(batch_format.dtype, memory_format=batch_format.memory_format)


# --- batch_size=auto --------------------------------------------------------------------------------------------------


def resolve_batch_size(cfg: Config, dist: Dist, build: Callable[[Config, int, Dist], nn.Module]) -> Config:
    """`cfg` with a number instead of `batch_size=auto`, and with the micro-steps that `global_batch_size` requires.

    `build`: the model from the settings, the number of classes and the rank.
    Rank 0 measures, and all ranks use its result. Steps are measured eagerly, because every size would be compiled or
    recorded again, and on images of the largest size; on a CPU in a forked process, which the system may kill. Random
    generators are restored.

    Raises ConfigError: not even two images fit, the data has too few, or the global batch cannot be split evenly.
    """
    if cfg.batch_size == AUTO_BATCH_SIZE:
        return dataclasses.replace(cfg, batch_size=on_main(lambda: _fastest_batch_size(cfg, dist, build), dist))
    if cfg.global_batch_size is None:
        return cfg
    micro_steps, rest = divmod(cfg.global_batch_size, cfg.batch_size * dist.world_size)
    if rest or not micro_steps:
        raise ConfigError(
            f"global_batch_size={cfg.global_batch_size} is not a multiple of batch_size={cfg.batch_size} x "
            f"{dist.world_size} processes: choose another batch_size"
        )
    if micro_steps > 1 and cfg.ddp_static_graph:
        raise ConfigError(
            f"global_batch_size={cfg.global_batch_size} needs {micro_steps} micro-steps, which "
            "ddp_static_graph=true does not allow: raise batch_size, or set ddp_static_graph=false"
        )
    return dataclasses.replace(cfg, accumulate_steps=micro_steps)


def _fastest_batch_size(cfg: Config, dist: Dist, build: Callable[[Config, int, Dist], nn.Module]) -> int:
    device, single_process = dist.device, Dist(0, 1, dist.device)
    augment = dataclasses.replace(cfg.augment, repeats=1)  # a batch of one image has no place for repeats
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
    with measurement_state(workload):
        model = build(dataclasses.replace(cfg, batch_size=SMALLEST, weights=None), classes, single_process)
        find = partial(search, largest=largest, limit_gib=limit_gib, time_limit_s=TIME_LIMIT_S[device.type])
        try:
            measured = find(partial(_measure, model, CONTIGUOUS if cfg.channels_last == "false" else layout, workload))
        except Crash:
            if cfg.channels_last != "auto":
                raise
            measured = find(partial(_measure, model, CONTIGUOUS, workload))
    release_memory()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    chosen = smallest_of_the_fastest(measured)
    speeds = ", ".join(f"{item.batch_size}: {item.images_per_s:.1f}" for item in measured)
    log.info("batch_size=auto: %d (images/s by size, in %.1f GiB: %s)", chosen, limit_gib, speeds)
    return chosen


@crash_safe
def _measure(model: nn.Module, layout: Layout, workload: Workload, batch_size: int) -> BatchSpeed:
    release_memory()
    timed = TimedModel(model, layout, dataclasses.replace(workload, batch_size=batch_size))
    timed.warm_up()
    peak_gib = timed.peak_memory_gib([timed])
    return BatchSpeed(batch_size, batch_size / statistics.median(timed.block_times_s(STEPS)), peak_gib)


def smallest_of_the_fastest(measured: list[BatchSpeed]) -> int:
    best = max(item.images_per_s for item in measured)
    return next(item.batch_size for item in measured if item.images_per_s >= AS_FAST * best)


def search(
    measure: Callable[[int], BatchSpeed],
    *,
    largest: int,
    limit_gib: float,
    time_limit_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[BatchSpeed]:
    """Double the batch size from 8 while it fits; returns the sizes that fit, in ascending order.

    Raises ConfigError if not even two images fit.
    """
    measured: list[BatchSpeed] = []
    started_at, size = clock(), min(FIRST, largest)
    while size >= SMALLEST:
        result = None
        if _peak_gib(measured, size) <= limit_gib:
            try:
                result = measure(size)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
        if result is not None and result.peak_memory_gib <= limit_gib:
            measured.append(result)
            if size == largest:
                return measured
            size = min(2 * size, largest)
            if (clock() - started_at) * (1 + size / sum(item.batch_size for item in measured)) > time_limit_s:
                return measured
        elif measured:
            return measured
        else:
            size = largest = size // 2
    raise ConfigError(f"batch_size=auto: not even {SMALLEST} images fit into {limit_gib:.2f} GiB")


def _peak_gib(measured: list[BatchSpeed], size: int) -> float:
    """The peak memory of `size`, extrapolated from the last two results; 0 if there are fewer.

    A size that is too large is not tried: running out of memory is slow, and on a CPU the system ends the process.
    """
    if len(measured) < 2:
        return 0.0
    first, second = measured[-2:]
    per_image = (second.peak_memory_gib - first.peak_memory_gib) / (second.batch_size - first.batch_size)
    return second.peak_memory_gib + max(0.0, per_image) * (size - second.batch_size)
