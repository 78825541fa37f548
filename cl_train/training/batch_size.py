"""`batch_size=auto`: the smallest of the fastest batch sizes that fit into memory."""

import logging
import math
import statistics
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

from cl_train.config.schema import AUTO_BATCH_SIZE, Config
from cl_train.data.build import build_data, size_schedule
from cl_train.data.loader import DataSettings
from cl_train.errors import ConfigError
from cl_train.measure.timed_step import TimedStep, Workload, measurement_state
from cl_train.memory_format.convert import CONTIGUOUS
from cl_train.step.precision import resolve_precision
from cl_train.system.distributed import Dist, on_main
from cl_train.system.machine import available_bytes, is_out_of_memory, release_memory
from cl_train.training.build import model_of, step_settings, try_shapes
from cl_train.training.layout_choice import layout_of

log = logging.getLogger(__name__)

FIRST, SMALLEST = 8, 2  # BatchNorm cannot train on one image if the last feature map is 1 x 1
LARGEST = {"cuda": 4096, "cpu": 256}
SEARCH_LIMIT_S = {"cuda": 90.0, "cpu": 30.0}
USED_MEMORY = 0.9  # as a share: evaluation and fragmentation need the rest
AS_FAST = 0.98  # of the best speed: a smaller gain does not justify fewer updates
STEPS_PER_SIZE = 4


class BatchSpeed(NamedTuple):
    batch_size: int
    images_per_s: float
    peak_memory_gib: float


def resolve_batch_size(cfg: Config, dist: Dist) -> Config:
    """`cfg` with the number of `batch_size=auto`, and with the micro-steps that `global_batch_size`
    requires. Rank 0 measures eager steps on images of the largest size.

    Raises ConfigError: not even two images fit, the data has too few, or the global batch cannot be
    split evenly.
    """
    if cfg.batch_size == AUTO_BATCH_SIZE:
        return replace(cfg, batch_size=on_main(lambda: _fastest_batch_size(cfg, dist), dist))
    if cfg.global_batch_size is None:
        return cfg
    micro_steps, rest = divmod(cfg.global_batch_size, cfg.batch_size * dist.world_size)
    batches = f"batch_size={cfg.batch_size} x {dist.world_size} processes"
    request = f"global_batch_size={cfg.global_batch_size} with {batches}"
    if rest or not micro_steps:
        raise ConfigError(f"{request}: it is not a multiple; choose another batch_size")
    if micro_steps > 1 and cfg.ddp_static_graph:
        advice = "raise batch_size, or set ddp_static_graph=false"
        raise ConfigError(f"{request} needs micro-steps: {advice}")
    return replace(cfg, accumulate_steps=micro_steps)


def _fastest_batch_size(cfg: Config, dist: Dist) -> int:
    device, alone = dist.device, Dist(0, 1, dist.device)
    augment = replace(cfg.augment, repeats=1)  # a batch of one image has no place for repeats
    one_image = DataSettings(cfg.data, augment, batch_size=1, seed=cfg.seed, dist=alone)
    with closing(build_data(one_image)) as data:
        images, classes = data.train_images, data.num_classes
    largest = min(LARGEST[device.type], images // (cfg.accumulate_steps * dist.world_size))
    if largest < SMALLEST:
        what = f"{images} training images are too few for {dist.world_size} processes"
        raise ConfigError(f"batch_size=auto: {what}")
    available = available_bytes(device)
    limit_gib = math.inf if available is None else USED_MEMORY * available / 2**30

    settings = step_settings(cfg, resolve_precision(cfg.precision, device), alone, soft=False)
    settings = replace(settings, compile=False, cuda_graph=False)
    size = size_schedule(cfg.data).largest
    workload = Workload(SMALLEST, (3, size, size), settings, device)
    layout = layout_of(cfg)
    if cfg.channels_last == "auto" and device.type == "cpu":
        layout = CONTIGUOUS  # the choice comes later: the likely one
    smallest = replace(cfg, batch_size=SMALLEST, weights=None)
    with measurement_state(workload.settings, workload.device):
        model = model_of(smallest, classes)
        try_shapes(smallest, model)

        def measure(batch_size: int) -> BatchSpeed:
            release_memory()
            sized = replace(workload, batch_size=batch_size)
            timed = TimedStep(model, layout, sized)
            timed.warm_up()
            peak_gib = timed.peak_memory_gib()
            step_s = statistics.median(timed.block_times_s(STEPS_PER_SIZE))
            return BatchSpeed(batch_size, sized.images_per_step / step_s, peak_gib)

        chosen, measured = search(measure, largest, limit_gib, SEARCH_LIMIT_S[device.type])
    release_memory()
    speeds = ", ".join(f"{item.batch_size}: {item.images_per_s:.1f}" for item in measured)
    log.info("batch_size=auto: %d (images/s by size, in %.1f GiB: %s)", chosen, limit_gib, speeds)
    return chosen


def search(
    measure: Callable[[int], BatchSpeed], largest: int, limit_gib: float, time_limit_s: float
) -> tuple[int, list[BatchSpeed]]:
    """Double the batch size from 8 while it fits: the smallest of the fastest sizes, and all that
    fit, ascending. ConfigError: not even 2 images fit.
    """
    measured: list[BatchSpeed] = []
    started_at, size = perf_counter(), min(FIRST, largest)
    while size >= SMALLEST:
        result = None
        try:
            if _expected_gib(measured, size) <= limit_gib:
                result = measure(size)
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
        what = f"not even {SMALLEST} images fit into {limit_gib:.2f} GiB"
        raise ConfigError(f"batch_size=auto: {what}")
    enough = AS_FAST * max(item.images_per_s for item in measured)
    return next(item.batch_size for item in measured if item.images_per_s >= enough), measured


def _expected_gib(measured: list[BatchSpeed], size: int) -> float:
    """Extrapolates from the last two sizes: on a CPU, running out of memory ends the process."""
    if len(measured) < 2:
        return 0.0
    first, second = measured[-2:]
    images = second.batch_size - first.batch_size
    per_image_gib = max(0.0, second.peak_memory_gib - first.peak_memory_gib) / images
    return second.peak_memory_gib + per_image_gib * (size - second.batch_size)
