"""The program: build everything, run the loop, write down what came out.

`train` reads from top to bottom. In the loop there are three decisions per step, in this order: log, evaluate, save.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from cl_train.config.schema import Config, ConfigError
from cl_train.config.validation import to_yaml
from cl_train.data.batch import DeviceFormat
from cl_train.data.bottleneck import bottleneck_advice
from cl_train.data.build import Data, build_data
from cl_train.data.images import Times
from cl_train.data.loader import BadImageError
from cl_train.data.workers import WorkerError
from cl_train.memory_format.layout import model_memory_format
from cl_train.models import registry as models
from cl_train.step.optim import set_lr
from cl_train.step.precision import Precision, kernel_selection, resolve_precision, warnings_for
from cl_train.step.train_step import StepSums
from cl_train.system.checkpoint_file import CheckpointError
from cl_train.system.checkpoint_store import CheckpointStore
from cl_train.system.distributed import (
    Dist,
    agree,
    broadcast_object,
    choose_device,
    gather_objects,
    processes,
    sum_over_ranks,
)
from cl_train.system.heartbeat import RankFault, watch_ranks
from cl_train.system.run_folder import RunLock, check_space, check_writable
from cl_train.system.signals import StopRequest
from cl_train.training import summary
from cl_train.training.batch_size import settle_batch_size
from cl_train.training.console import EpochAverages, ProgressBar, console_line
from cl_train.training.evaluation import evaluate_and_record
from cl_train.training.nonfinite import (
    NonFinitePolicy,
    TrainingFault,
    Trouble,
    check_loss_scale,
    check_skipped_share,
    find_trouble,
    oom_message,
)
from cl_train.training.plan import (
    Plan,
    Progress,
    is_done,
    is_epoch_end,
    is_evaluation_due,
    is_save_due,
    is_save_due_in_epoch,
    make_plan,
    plan_lr,
)
from cl_train.training.preflight import try_one_step
from cl_train.training.profiling import profile
from cl_train.training.records import Tracker, logging_to
from cl_train.training.resume import identify, resume, roll_back, save
from cl_train.training.run_state import copy_statistics, restore_statistics, tensor_bytes
from cl_train.training.setup import Assembly, assemble
from cl_train.training.throughput import ThroughputMeter

log = logging.getLogger(__name__)

KNOWN_FAULTS = (TrainingFault, CheckpointError, BadImageError, WorkerError, RankFault, OSError, torch.OutOfMemoryError)
ExitCallback = Callable[[type[BaseException] | None, BaseException | None, TracebackType | None], bool]


def check(runs: list[Config]) -> None:
    """Refuse what can be known to fail before any file is made: models, weights, devices.

    Raises:
        ConfigError: every problem of every run.
    """
    problems = []
    for cfg in runs:
        try:
            models.check_model(cfg.model, cfg.weights)
            choose_device(cfg.device)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


def run(cfg: Config, folder: Path) -> int:
    """`train`, with what is known to go wrong in a run turned into exit code 1."""
    try:
        return train(cfg, folder)
    except KNOWN_FAULTS:
        return 1  # said and logged by `tell_fault`


def train(cfg: Config, folder: Path) -> int:
    """Run `cfg`, leaving its records in `folder` (rank 0's). Returns the exit code: 0, or 128 + n after signal n.

    Raises:
        ConfigError: something that could only be known here (the data's classes, the checkpoint) does not fit.
        TrainingFault, CheckpointError, BadImageError, WorkerError: the run cannot go on.
    """
    with ExitStack() as stack:
        signals = StopRequest()
        stack.push(signals)  # entered below, left last of all: closing workers and files is not to be interrupted
        dist = stack.enter_context(processes(cfg.device, cfg.rank_timeout_s))
        folder = Path(broadcast_object(str(folder.absolute()), dist))
        if dist.is_main:
            check_writable(folder)
            stack.enter_context(RunLock(folder))
        stack.enter_context(logging_to(folder if dist.is_main else None))
        precision = resolve_precision(cfg.precision, dist.device)
        prepare_torch(cfg, dist)
        # Autotuning pays off because shapes never change: the loader drops the last, smaller batch.
        stack.enter_context(kernel_selection(tf32=precision.tf32, autotune=not cfg.deterministic))
        cfg = settle_batch_size(cfg, precision, dist)
        stack.push(tell_fault(cfg, dist))
        stack.enter_context(watch_ranks(dist))
        facts = summary.describe_run(cfg, precision, dist.device, dist.world_size)
        announce(facts, precision, dist, folder)

        # --- build -----------------------------------------------------------------------------------------------
        data = build_data(cfg.data, cfg.augment, batch_size=cfg.batch_size, seed=cfg.seed, dist=dist)
        stack.callback(data.close)
        plan = make_plan(cfg, data.train_images, data.batches_per_epoch, dist.world_size)
        assembly = assemble(cfg, precision, data.num_classes, dist, plan.lr)
        form = DeviceFormat(dist.device, precision.input_dtype, assembly.memory_format)
        facts |= {"memory_format": model_memory_format(assembly.model), "workers": data.workers}
        identity = identify(cfg, facts, data)
        store = CheckpointStore(folder / "checkpoints", cfg.checkpoint.keep, cfg.checkpoint.background)
        progress, sums = resume(cfg, store, assembly, identity, dist)
        if dist.is_main:
            warn_of_space(store.folder.parent, assembly, cfg.checkpoint.keep)
        tracker = Tracker(folder if dist.is_main else None, tensorboard=cfg.tensorboard, resumed_step=progress.step)
        stack.callback(tracker.close)
        tracker.write_config(to_yaml(cfg))
        meter = ThroughputMeter(cfg.warmup_steps)
        stack.push(write_failure(facts, tracker, progress, meter))
        try_one_step(cfg, assembly, data.num_classes)
        signals.__enter__()
        profiler = stack.enter_context(profile(cfg, folder, dist))
        policy = NonFinitePolicy(cfg.on_nonfinite, cfg.max_nonfinite)
        average = assembly.average.module if assembly.average is not None else None
        statistics = copy_statistics(assembly.model, average)
        last_saved_at = time.monotonic()
        latest: dict[str, Any] = {}
        stop = 0  # the signal that asks the run to end

        # --- loop ------------------------------------------------------------------------------------------------
        while not (stop or cfg.evaluate_only or is_done(progress, plan)):
            if not cfg.data.persistent_workers:
                store.wait()  # new workers are forked: no thread should be writing then
            batches = data.train(progress.epoch, form, first_batch=progress.step_in_epoch * cfg.accumulate_steps)
            bar = ProgressBar(plan.steps_per_epoch, progress.step_in_epoch, progress.epoch, shown=dist.is_main)
            averages, times_before = EpochAverages(), dataclasses.replace(data.times)
            verdict, save_now = "go on", 0
            meter.start()
            while not is_epoch_end(progress, plan):
                waiting_since = time.perf_counter()
                micro_batches = list(islice(batches, cfg.accumulate_steps))
                wait_s = time.perf_counter() - waiting_since
                if progress.step == 0:
                    tracker.write_images(micro_batches[0].images, cfg.data.mean, cfg.data.std)
                set_lr(assembly.parts.optimizer, plan_lr(cfg, plan, progress.step))
                sums.append(assembly.step(micro_batches))
                progress.advance(plan.global_batch_size)
                if assembly.average is not None and progress.step % cfg.ema_every == 0:
                    assembly.update_average()
                meter.tick(plan.global_batch_size, wait_s)
                profiler.step()
                bar.update()

                if progress.step % cfg.log_every == 0 or is_epoch_end(progress, plan):
                    latest, troubles = read_window(sums, meter, plan, progress, assembly, dist)
                    sums.clear()
                    averages.add(latest)
                    tracker.write("train", progress.step, latest)
                    bar.write_line(console_line(latest, averages, progress.step_in_epoch, plan.steps_per_epoch))
                    check_loss_scale(latest["loss_scale"], cfg.amp.min_scale, progress.step)
                    verdict = policy.decide(troubles)
                    if troubles:
                        restore_statistics(statistics, assembly.model, average)
                    else:
                        statistics = copy_statistics(assembly.model, average)
                    if verdict == "roll back":
                        break

                save_asked = signals.save_requested or is_save_due_in_epoch(cfg, progress, last_saved_at)
                stop, save_now = agree([signals.stop or 0, int(save_asked)], dist)
                if stop or (save_now and not is_epoch_end(progress, plan)):
                    with meter.paused():
                        save(store, assembly, progress, identity, sums, dist)
                        last_saved_at = time.monotonic()
                if stop:
                    break
            bar.close()
            batches.close()  # else batches on their way would be accounted to the evaluation
            if verdict == "roll back":
                sums = roll_back(store, assembly, progress, tracker, dist)
            elif not stop:
                if averages.seconds() > 0:  # a run that was stopped at an epoch's end goes on here without a step
                    explain_waiting(data, times_before, averages, dist)
                progress.finish_epoch(plan.steps_per_epoch)
                is_best = False
                if is_evaluation_due(cfg, progress, plan):
                    is_best = evaluate_and_record(facts, data, form, assembly, progress, tracker, dist)
                is_best = is_best and cfg.checkpoint.save_best
                if save_now or is_best or is_save_due(cfg, progress, plan):
                    save(store, assembly, progress, identity, sums, dist, best=is_best)
                    last_saved_at = time.monotonic()

        # --- finish ----------------------------------------------------------------------------------------------
        if cfg.evaluate_only:
            evaluate_and_record(facts, data, form, assembly, progress, tracker, dist)
        store.wait(final=True)
        check_skipped_share(progress.skipped_steps, progress.step)
        facts |= summary.results(progress, meter, assembly, latest, cfg) | {
            "status": "interrupted" if stop else "completed"
        }
        if not (latest or cfg.evaluate_only):  # the run had been finished before: what it found stays
            facts |= summary.results_of_records(folder / "metrics.jsonl", cfg)
        tracker.write_summary(facts, summary.hparams_of(cfg, facts))
        if dist.is_main:
            log.info("%s", summary.closing_line(facts, folder))
        return 128 + stop if stop else 0


# --- before the loop ------------------------------------------------------------------------------------------------


def prepare_torch(cfg: Config, dist: Dist) -> None:
    """Process-wide switches and seeds. Ranks share the seed: their models must be equal, their images differ."""
    random.seed(cfg.seed)
    np.random.seed(cfg.seed)
    torch.manual_seed(cfg.seed)
    torch.use_deterministic_algorithms(cfg.deterministic)
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS refuses to be deterministic without it
    if dist.world_size > 1 and dist.device.type == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.world_size))
        torch.set_num_threads(max(1, cores // ranks_here))


def warn_of_space(folder: Path, assembly: Assembly, keep: int) -> None:
    """
    Raises:
        ConfigError: not even one checkpoint fits.
    """
    weights = tensor_bytes(assembly.model.state_dict())
    copies = 4 if assembly.average is not None else 3  # weights, up to two moments, moving average
    for line in check_space(folder, copies * weights, keep):
        log.warning("%s", line)


def announce(facts: dict[str, Any], precision: Precision, dist: Dist, folder: Path) -> None:
    if not dist.is_main:
        return
    log.info(
        "%s on %s, %d process%s", facts["model"], facts["device_name"], dist.world_size, "es" * (dist.world_size > 1)
    )
    log.info("precision: %s%s", precision.name, f" ({precision.reason})" if precision.reason else "")
    for line in warnings_for(precision, dist.device):
        log.warning("%s", line)
    log.info("run folder: %s", folder)


def tell_fault(cfg: Config, dist: Dist) -> ExitCallback:
    """An exit callback: say in one message why the run cannot go on, on the console and in `train.log`."""

    def on_exit(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if isinstance(error, torch.OutOfMemoryError):
            log.error("the run failed: %s", oom_message(error, cfg.batch_size, dist.device))
        elif isinstance(error, KNOWN_FAULTS):
            log.error("the run failed: %s", error)
        return False

    return on_exit


def explain_waiting(data: Data, before: Times, averages: EpochAverages, dist: Dist) -> None:
    """Where an epoch waited for data, say what the bottleneck was and which setting to change."""
    now = data.times
    spent = Times(
        now.read_s - before.read_s,
        now.decode_s - before.decode_s,
        now.resize_s - before.resize_s,
        now.images - before.images,
    )
    advice = bottleneck_advice(
        spent, workers=data.workers, seconds=averages.seconds(), data_wait_pct=averages.measured_mean("data_wait_pct")
    )
    if advice is not None and dist.is_main:
        log.warning("%s (channels_last cannot show while the loader is the bottleneck)", advice)


def write_failure(facts: dict[str, Any], tracker: Tracker, progress: Progress, meter: ThroughputMeter) -> ExitCallback:
    """An exit callback: a run that ends by an exception still leaves its summary, with status `failed`."""

    def on_exit(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if error is not None:
            facts.update(steps=progress.step, images_seen=progress.images_seen, why=str(error).splitlines()[:1])
            facts.update(summary.throughput_facts(meter.measured(), is_synthetic=False))
            tracker.write_summary(facts, {})
        return False

    return on_exit


# --- in the loop ----------------------------------------------------------------------------------------------------


def read_window(
    sums: list[StepSums], meter: ThroughputMeter, plan: Plan, progress: Progress, assembly: Assembly, dist: Dist
) -> tuple[dict[str, Any], list[Trouble]]:
    """Close the window: the one place where training waits for the device, and the one reduction over the ranks.

    Returns:
        The window's record, and every rank's steps with a NaN or Inf.
    """
    rows = torch.stack([torch.stack([s.loss.double(), s.correct1, s.correct5, s.skipped]) for s in sums])
    totals = sum_over_ranks(rows.sum(0), dist)
    loss, correct1, correct5, skipped = totals.tolist()  # sync point
    window = meter.window()
    progress.skipped_steps += round(skipped / dist.world_size)
    images = len(sums) * plan.global_batch_size
    scaler = assembly.parts.scaler
    troubles: list[Trouble] = []
    if skipped or not math.isfinite(loss):  # the same on every rank, as it was summed
        own = find_trouble(
            rows[:, 0].tolist(),
            rows[:, 3].tolist(),
            first_step=progress.step - len(sums) + 1,
            rank=dist.rank,
            scales_loss=scaler.is_enabled(),
        )
        troubles = [trouble for ranks in gather_objects(own, dist) for trouble in ranks]
    record = {
        "epoch": progress.epoch,
        "loss": loss / (len(sums) * dist.world_size),
        "top1": 100 * correct1 / images,
        "top5": 100 * correct5 / images,
        "lr": float(assembly.parts.optimizer.param_groups[0]["lr"]),  # a tensor where the step is a CUDA graph
        **{name: value for name, value in dataclasses.asdict(window).items() if name != "steps"},
        "loss_scale": scaler.get_scale() if scaler.is_enabled() else None,
        "skipped_steps": progress.skipped_steps,
        "peak_memory_gib": summary.peak_memory_gib(dist.device),
    }
    return record, troubles
