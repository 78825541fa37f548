"""`batch_size=auto`: real steps at growing batches, until memory or time is spent; then the fastest that fits."""

from __future__ import annotations

import dataclasses
import logging
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cl_train.comparison.alternation import is_out_of_memory, release_memory
from cl_train.comparison.model_cost import peak_memory_of_step_gib
from cl_train.config.schema import AUTO_BATCH_SIZE, Config, ConfigError
from cl_train.data.batch import Batch
from cl_train.data.build import build_data
from cl_train.step.precision import Precision
from cl_train.system.distributed import Dist, broadcast_object
from cl_train.system.timing import timed_s
from cl_train.training.run_state import tensor_bytes
from cl_train.training.setup import Assembly, assemble

log = logging.getLogger(__name__)

FIRST, SMALLEST = 8, 2  # one image is not enough for BatchNorm where the last feature map is 1 x 1
LARGEST = {"cuda": 4096, "cpu": 256}
TIME_LIMIT_S = {"cuda": 90.0, "cpu": 30.0}
MARGIN = 0.9  # of the memory: evaluation, fragments and other images' targets come on top of a step
ALIKE = 0.98  # of the best speed; a larger batch that gains less than the rest is not worth its fewer updates
STEPS = 4


@dataclass(frozen=True)
class Measured:
    """One batch size."""

    batch_size: int
    images_per_s: float
    peak_memory_gib: float


@dataclass(frozen=True)
class Choice:
    """`chosen` is the smallest batch whose speed is within 2 % of the best; `largest` the largest that fits."""

    chosen: Measured
    largest: Measured
    tried: tuple[Measured, ...]
    stopped_by: str  # "memory", "time" or "images"


def settle_batch_size(cfg: Config, precision: Precision, dist: Dist) -> Config:
    """`cfg` with a number for `batch_size=auto`; any other `cfg` as it is. Rank 0 measures, all ranks get its answer.

    Random numbers are as before. Steps are measured as they are, neither compiled nor recorded: each size would be
    compiled anew.

    Raises:
        ConfigError: not even two images fit, or the data is too small.
    """
    if cfg.batch_size != AUTO_BATCH_SIZE:
        return cfg
    answer: int | ConfigError | None = None
    if dist.is_main:
        try:
            answer = _measured_choice(cfg, precision, dist)
        except ConfigError as error:
            answer = error
    answer = broadcast_object(answer, dist)
    if isinstance(answer, ConfigError):
        raise answer
    assert isinstance(answer, int)
    return dataclasses.replace(cfg, batch_size=answer)


def _measured_choice(cfg: Config, precision: Precision, dist: Dist) -> int:
    images, classes = _size_of_data(cfg, dist)
    device = dist.device
    limit_gib = MARGIN * available_memory_gib(device)
    largest = min(LARGEST[device.type], images // (cfg.accumulate_steps * dist.world_size))
    if largest < SMALLEST:
        raise ConfigError(f"batch_size=auto: {images} training images are too few for {dist.world_size} processes")
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        measure = _steps_of(cfg, precision, classes, device)
        choice = search(measure, largest=largest, limit_gib=limit_gib, time_limit_s=TIME_LIMIT_S[device.type])
    del measure
    release_memory(device)
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    log.info("batch_size=auto: %s", describe(choice, limit_gib))
    return choice.chosen.batch_size


def describe(choice: Choice, limit_gib: float) -> str:
    chosen, largest = choice.chosen, choice.largest
    fits = "fits" if choice.stopped_by == "memory" else f"was tried (stopped by {choice.stopped_by})"
    gib = f"{chosen.peak_memory_gib:.2f} of {limit_gib:.2f} GiB"
    return (
        f"{chosen.batch_size} ({chosen.images_per_s:.1f} images/s, {gib}); "
        f"the largest that {fits} is {largest.batch_size} ({largest.images_per_s:.1f} images/s)"
    )


def search(
    measure: Callable[[int], Measured],
    *,
    largest: int,
    limit_gib: float,
    time_limit_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Choice:
    """Double the batch from 8 while it fits, then try half-way between the last that fits and the first that does not.

    A size that the memory of the last two sizes predicts not to fit is not tried: running out of memory is slow, and on
    a CPU it ends the process.

    Args:
        measure: runs steps at a batch size; may run out of memory.
        largest: no batch above it is tried.
        limit_gib: a batch whose peak is above it does not fit.

    Raises:
        ConfigError: not even two images fit.
    """
    tried: list[Measured] = []
    started_at = clock()

    def attempt(size: int) -> bool:
        if len(tried) >= 2 and _predicted_gib(tried, size) > limit_gib:
            return False
        try:
            done = measure(size)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        if done.peak_memory_gib > limit_gib:
            return False
        tried.append(done)
        return True

    def is_late(size: int) -> bool:
        """Would a measurement that takes as many times longer as the batch is larger end after the limit?"""
        spent = clock() - started_at
        return bool(tried) and spent * (1 + size / sum(item.batch_size for item in tried)) > time_limit_s

    size, too_large, stopped_by = min(FIRST, largest), None, "images"
    while not attempt(size):
        size, too_large = size // 2, size
        if size < SMALLEST:
            raise ConfigError(f"batch_size=auto: not even {SMALLEST} images fit into {limit_gib:.2f} GiB")
    while too_large is None and size < largest:
        size = min(2 * size, largest)
        if is_late(size):
            stopped_by = "time"
            break
        if not attempt(size):
            too_large = size
    if too_large is not None:
        stopped_by = "memory"
        between = (tried[-1].batch_size + too_large) // 2
        if between > tried[-1].batch_size and not is_late(between):
            attempt(between)
    best = max(item.images_per_s for item in tried)
    chosen = next(item for item in tried if item.images_per_s >= ALIKE * best)
    return Choice(chosen, tried[-1], tuple(tried), stopped_by)


def _predicted_gib(tried: list[Measured], size: int) -> float:
    """Peak memory grows in a line: weights and optimizer, then so much per image."""
    first, second = tried[-2:]
    per_image = (second.peak_memory_gib - first.peak_memory_gib) / (second.batch_size - first.batch_size)
    return second.peak_memory_gib + max(0.0, per_image) * (size - second.batch_size)


def available_memory_gib(device: torch.device) -> float:
    """What this process may use: free memory and what torch holds in reserve on a GPU, free pages on a CPU."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return (free + torch.cuda.memory_reserved(device)) / 2**30
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def _size_of_data(cfg: Config, dist: Dist) -> tuple[int, int]:
    alone = dataclasses.replace(dist, world_size=1)
    data = build_data(cfg.data, cfg.augment, batch_size=1, seed=cfg.seed, dist=alone)
    try:
        return data.train_images, data.num_classes
    finally:
        data.close()


def _steps_of(cfg: Config, precision: Precision, classes: int, device: torch.device) -> Callable[[int], Measured]:
    """A function that trains a throw-away model on noise; weights, loss scale and speed settings are the run's."""
    layout = "true" if cfg.channels_last == "auto" else cfg.channels_last
    plain = dataclasses.replace(
        cfg, batch_size=FIRST, channels_last=layout, compile=False, cuda_graph="false", weights=None, ema_decay=0.0
    )
    assembly = assemble(plain, precision, classes, Dist(0, 0, 1, device), lr=1e-4)

    def measure(size: int) -> Measured:
        if device.type == "cuda":
            release_memory(device)
        shape = (size, 3, cfg.data.image_size, cfg.data.image_size)
        images = torch.randn(shape, device=device).to(precision.input_dtype, memory_format=assembly.memory_format)
        micro_batches = [Batch(images, torch.randint(classes, (size,), device=device))] * cfg.accumulate_steps

        def step() -> None:
            assembly.step(micro_batches)

        step()  # kernels are chosen here
        peak = peak_memory_of_step_gib(step, _held_bytes(assembly) + images.nbytes, 0, device)
        seconds = statistics.median(timed_s(step, device) for _ in range(STEPS))
        return Measured(size, size * cfg.accumulate_steps / seconds, peak)

    return measure


def _held_bytes(assembly: Assembly) -> int:
    groups = assembly.parts.optimizer.param_groups
    weights = [*assembly.model.parameters(), *assembly.model.buffers()]
    states = [assembly.parts.optimizer.state.get(parameter, {}) for group in groups for parameter in group["params"]]
    masters = [] if assembly.parts.masters is None else list(assembly.parts.masters.masters.values())
    return tensor_bytes([*weights, *masters]) + tensor_bytes([dict(state) for state in states])
