"""The training loop: `train` is a whole run, top to bottom.

After each step: log, save, stop, in this order. An epoch ends with a save and an evaluation.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from cl_train.config.schema import Config, ConfigError
from cl_train.config.user_function import user_function
from cl_train.data.bottleneck import bottleneck_advice
from cl_train.data.loader import first_reasons
from cl_train.data.transforms import check_augment
from cl_train.models import sources as models
from cl_train.step.loss import build_loss
from cl_train.step.optim import check_optimizer, set_lr
from cl_train.system.distributed import (
    broadcast_object,
    choose_device,
    gather_objects,
    max_over_ranks,
    on_main,
    processes,
    sum_over_ranks,
)
from cl_train.system.heartbeat import watch_ranks
from cl_train.system.launcher import cores_of_process
from cl_train.system.run_folder import claimed_folder, continues
from cl_train.system.signals import StopRequest
from cl_train.training.batch_size import resolve_batch_size
from cl_train.training.evaluation import EVALUATED, Interrupted, evaluate_model, write_report
from cl_train.training.nonfinite import (
    NonFiniteStep,
    check_evaluation,
    check_loss_scale,
    check_skipped_share,
    find_nonfinite_steps,
)
from cl_train.training.progress import score_of
from cl_train.training.records import (
    RunResult,
    best_evaluation,
    closing_lines,
    end_time,
    finite_or_null,
    peak_memory_gib,
    read_records,
    speed,
    utilisation_of,
)
from cl_train.training.run_log import RunLog, console_line, duration, mean, progress_bar
from cl_train.training.setup import Run, Submitted, prepare_torch, set_up
from cl_train.training.throughput import profile, without_warmup
from cl_train.training.trackers import build_tracker

log = logging.getLogger(__name__)

_FEW_STEPS = 20
PLACE = ("kind", "step", "epoch", "time")  # of a record in a run


def check_runs(runs: list[Config]) -> None:
    """Find problems with models, weights, optimizers, augmentations and devices before any file is created.

    Raises ConfigError: every problem of every run.
    """
    problems = []
    for cfg in runs:
        try:
            models.check_model(cfg.model, cfg.weights)
            check_optimizer(cfg.optim)
            build_loss(cfg.loss, cfg.label_smoothing, cfg.bce_threshold)
            if cfg.metrics is not None:
                user_function("metrics", cfg.metrics)
            check_augment(cfg.augment, cfg.data.mean)  # timm reads its policies itself
            choose_device(cfg.device, warn=False)
            for name in cfg.log_to:
                build_tracker(name)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


def train(cfg: Config, folder: Path, command: str | None = None) -> RunResult:
    """Run `cfg` with its records in `folder` (rank 0's). A program that goes on after the run gives its own `command`.

    Raises:
        ConfigError: a problem that cannot be found earlier: the data's classes, the model, the checkpoint.
        TrainingFault, CheckpointError, BadImageError, WorkerError, RankFault, OSError: the run cannot continue.
    """
    with ExitStack() as stack:
        signals = StopRequest(ends_process=command is None)
        stack.push(signals)  # closed last: a signal does not interrupt the closing of data and files
        run_log = stack.enter_context(RunLog())
        dist = stack.enter_context(processes(cfg.device, cfg.rank_timeout_s))
        stack.enter_context(watch_ranks(dist))
        folder = Path(broadcast_object(str(folder.absolute()), dist))  # ranks would generate different timestamps
        if cfg.evaluate_only and continues(cfg.resume, folder):  # beside the records of the run, which stay as they are
            source = str(folder) if cfg.resume == "auto" else cfg.resume
            cfg, folder = replace(cfg, resume=source, overwrite=True), folder / "evaluation"
        if dist.is_main:
            stack.enter_context(claimed_folder(folder, resume=cfg.resume, overwrite=cfg.overwrite))
            run_log.open_file(folder)
        else:
            run_log.only_warnings()
        prepare_torch(dist, deterministic=cfg.deterministic)
        cfg = resolve_batch_size(cfg, dist)
        run = set_up(cfg, folder, dist, signals, stack)
        run.summary["command"] = command or run.summary["command"]
        stack.enter_context(failure_in_summary(run))
        profile_step = stack.enter_context(profile(folder if cfg.profile and dist.is_main else None, dist.device))
        signals.__enter__()  # exited last (pushed first); until here, a signal ends the process at once
        plan, state = run.plan, run.state
        bar = progress_bar("training", plan.last_step, run.progress.step, shown=dist.is_main)

        if cfg.evaluate_only:
            record_evaluation(run, evaluate_model_and_ema(run))
        while not (cfg.evaluate_only or run.stop_signal or plan.is_done(run.progress)):
            progress, save_due = run.progress, False
            first_batch = progress.step_in_epoch * plan.accumulate_steps
            batches = run.data.train(progress.epoch, run.batch_format, first_batch=first_batch)
            records: list[dict[str, Any]] = []  # of this epoch
            run.meter.start(plan.image_size_at(progress))
            while not plan.is_epoch_end(progress):
                with run.meter.waiting():
                    micro_batches = list(islice(batches, plan.accumulate_steps))
                lr = plan.lr_at(progress)
                set_lr(state.parts.optimizer, lr)
                run.unlogged_steps.append(state.train_step(micro_batches))
                progress.advance(plan.global_batch_size)
                if state.ema is not None and progress.step % cfg.ema_every == 0:
                    state.ema.update(state.model, state.parts.masters)
                run.meter.tick(plan.global_batch_size)
                profile_step()
                bar.update(progress.step - bar.n)

                if plan.is_log_due(progress):
                    log_window(run, records, lr)

                save_due = signals.save_requested or plan.is_save_due(progress, run.checkpoints.minutes_since_save())
                # All ranks must stop or save at the same step. The cost: one all-reduce on the host per step.
                run.stop_signal, save_flag = max_over_ranks([signals.stop or 0, int(save_due)], dist)
                save_due = bool(save_flag)
                if run.stop_signal or (save_due and not plan.is_epoch_end(progress)):
                    with run.meter.paused():
                        log_submitted(run)
                        run.checkpoints.save(progress, run.unlogged_steps)
                if run.stop_signal:
                    break
            batches.close()  # batches prepared ahead would count as the evaluation's
            if not run.stop_signal:
                end_epoch(run, records, save_due=save_due)
        bar.close()
        if not (cfg.evaluate_only or run.records or cfg.resume is None or continues(cfg.resume, folder)):
            run.checkpoints.save(run.progress, run.unlogged_steps)  # nothing was left to train: `folder` has none yet
        finish(run, evaluate_only=cfg.evaluate_only)
        return RunResult(folder, finite_or_null(run.summary), 128 + run.stop_signal if run.stop_signal else 0)


@contextmanager
def failure_in_summary(run: Run) -> Iterator[None]:
    """A run that ends with an exception still writes its summary, with status `failed`."""
    try:
        yield
    except BaseException as error:
        if run.dist.world_size == 1:  # the other ranks may not take part
            with suppress(RuntimeError):
                log_submitted(run)
        run.summary["why"] = str(error).partition("\n")[0]
        with suppress(RuntimeError):  # after an error of the device, the loss scale cannot be read
            run.summary |= results(run) | end_time(run.summary["started"])
        with suppress(OSError):  # report the first error
            run.writer.finish(run.summary, retries=False)
        raise


# --- in the loop ------------------------------------------------------------------------------------------------------


def log_window(run: Run, records: list[dict[str, Any]], lr: float) -> None:
    """Submit the steps since the last log line for reading, and log those that were submitted before.

    A GPU continues meanwhile: the numbers reach the host one line late. At the end of an epoch, before a checkpoint and
    on a CPU the host waits for them.

    Args:
        records: those of the epoch, to which the new one will be added.
        lr: of the last step.

    Raises TrainingFault: the run cannot continue.
    """
    submitted = submit_window(run, records, lr)
    log_submitted(run)
    run.submitted = submitted
    if not reads_late(run.dist.device) or run.plan.is_epoch_end(run.progress):
        log_submitted(run)


def reads_late(device: torch.device) -> bool:
    """Whether the host would wait for the device by reading a log line at once."""
    return device.type != "cpu"


def submit_window(run: Run, records: list[dict[str, Any]], lr: float) -> Submitted:
    """Add up the steps since the last log line on the device, in one reduction over all ranks."""
    steps, progress, scaler = run.unlogged_steps, run.progress, run.state.parts.scaler
    rows = torch.stack([torch.stack([s.loss.double(), s.correct1, s.correct5, s.skipped]) for s in steps])
    bad_images = rows.new_full((1,), run.data.bad_images.skipped)
    totals = sum_over_ranks(torch.cat([rows.sum(0), bad_images]), run.dist)
    is_bad = ~totals[0].isfinite()  # as `find_nonfinite_steps` decides, but without waiting for the device
    run.buffer_backup.settle(is_bad if scaler.is_enabled() else is_bad | (totals[3] > 0))
    if scaler.is_enabled():  # private, but `get_scale` waits for the device
        scale = scaler._get_scale_async()
        assert scale is not None
        totals = torch.cat([totals, scale.double().view(1)])
    totals = totals.to("cpu", non_blocking=True)  # pinned memory if it comes from a GPU
    run.unlogged_steps = []
    record = {
        # Values that a resumed run may change; a comparison refuses runs in which they changed.
        **{name: run.summary[name] for name in ("memory_format", "precision", "world_size", "device_name")},
        "step": progress.step,
        "epoch": progress.epoch,
        "lr": lr,
    }
    window, copied = run.meter.close(), run.meter.clock.mark()
    return Submitted(record, records, progress.step_in_epoch, rows, totals, copied, window)


def log_submitted(run: Run) -> None:
    """Log the submitted window, if there is one, and decide on its non-finite steps; the host waits for its end.

    Raises TrainingFault: the run cannot continue.
    """
    submitted, run.submitted = run.submitted, None
    if submitted is None:
        return
    record, nonfinite = read_window(run, submitted)
    run.records.append(record)
    submitted.records.append(record)
    run.writer.write("train", record["step"], record)
    steps_left = run.plan.last_step - record["step"]
    log.info("%s", console_line(submitted.records, submitted.step_in_epoch, run.plan.steps_per_epoch, steps_left))
    check_loss_scale(record["loss_scale"], run.min_loss_scale, record["step"])
    run.nonfinite.check(nonfinite)


def read_window(run: Run, submitted: Submitted) -> tuple[dict[str, Any], list[NonFiniteStep]]:
    """The record of a submitted window, and its non-finite steps on every rank."""
    dist, steps = run.dist, len(submitted.rows)
    run.meter.clock.wait(submitted.copied)
    loss, correct1, correct5, skipped, skipped_images, *scale = submitted.totals.tolist()
    run.progress.skipped_steps += round(skipped / dist.world_size)
    nonfinite: list[NonFiniteStep] = []
    if skipped or not math.isfinite(loss):  # equal on all ranks, because it is a sum over them
        losses, _, _, skips = submitted.rows.T.tolist()
        first_step = submitted.record["step"] - steps + 1
        own_steps = find_nonfinite_steps(losses, skips, first_step, dist.rank, scales_loss=bool(scale))
        nonfinite = [step for steps_of_rank in gather_objects(own_steps, dist) for step in steps_of_rank]
    images = steps * run.plan.global_batch_size
    record = submitted.record | {
        "loss": loss / (steps * dist.world_size),
        "top1": 100 * correct1 / images,
        "top5": 100 * correct5 / images,
        **run.meter.measured(submitted.window),
        "loss_scale": scale[0] if scale else None,
        "skipped_steps": run.progress.skipped_steps,
        "skipped_images": int(skipped_images),
        "peak_memory_gib": peak_memory_gib(dist.device),
    }
    return record, nonfinite


def end_epoch(run: Run, records: list[dict[str, Any]], *, save_due: bool) -> None:
    """Save, then evaluate, so that neither a kill nor a signal during a long evaluation loses the epoch.

    A signal in the evaluation leaves the epoch open: the resumed run begins with its evaluation.
    """
    progress, plan, checkpoints = run.progress, run.plan, run.checkpoints
    warn_if_loader_bound(run, records)
    if save_due or plan.is_epoch_save_due(progress):
        checkpoints.save(progress, run.unlogged_steps)
    if plan.is_evaluation_due(progress):
        evaluated = evaluate_model_and_ema(run)
        if run.stop_signal:
            if checkpoints.saved_step != progress.step:
                checkpoints.save(progress, run.unlogged_steps)
            return
        if progress.is_gain(score_of(evaluated["val"])) and plan.checkpoint.save_best:
            checkpoints.mark_best(progress, run.unlogged_steps)
        record_evaluation(run, evaluated)
        if plan.is_out_of_patience(progress):
            log.info("patience=%d: %d evaluations without a gain; the run ends", plan.patience, plan.patience)
            if checkpoints.saved_step != progress.step:
                checkpoints.save(progress, run.unlogged_steps)
        if records:  # none: the run resumed at the end of an epoch
            seconds = sum(record["seconds"] for record in records)
            log.info(
                "epoch %d: %s of training, best accuracy %.2f %%", progress.epoch, duration(seconds), progress.best_top1
            )
    plan.close_epoch(progress)


def evaluate_model_and_ema(run: Run) -> dict[str, dict[str, Any]]:
    """Evaluate the model as `val`, and its EMA, if there is one, as `val_average`. A signal sets `run.stop_signal`."""
    state, data, form, dist = run.state, run.data, run.batch_format, run.dist
    models_to_evaluate = {"val": (state.model, state.parts.precision)}
    if state.ema is not None:
        models_to_evaluate["val_average"] = (state.ema.module, state.parts.precision.for_fp32_weights)
    batches = math.ceil(data.val_images / dist.world_size / run.plan.batch_size)
    results = {}
    for kind, (model, precision) in models_to_evaluate.items():
        try:
            with progress_bar("evaluation", batches, unit="batch", shown=dist.is_main) as bar:
                results[kind], predictions = evaluate_model(
                    model, data, form, precision, dist, run.signals, bar, run.metrics, flip=run.plan.evaluate_flip
                )
        except Interrupted as interrupted:
            (run.stop_signal,) = interrupted.args
            break
        if run.plan.report and kind == "val":
            write_report(predictions, data, dist, run.folder / "report")
    return results


def record_evaluation(run: Run, evaluated: dict[str, dict[str, Any]]) -> None:
    """`val` comes last: its record marks the evaluation as complete for a resumed run."""
    for kind in ("val_average", "val"):
        if kind not in evaluated:
            continue
        result = evaluated[kind]
        run.summary[kind] = result
        run.writer.write(kind, run.progress.step, {"epoch": run.progress.epoch, **result})
        line = " * Prec@1 {top1:.3f} Prec@5 {top5:.3f} Loss {loss:.4f} on {images} images".format(**result)
        line += "".join(f" {name} {value:.4g}" for name, value in result.items() if name not in EVALUATED)
        log.info("%s%s", line, "" if kind == "val" else " (EMA)")


def warn_if_loader_bound(run: Run, records: list[dict[str, Any]]) -> None:
    """If an epoch waited for data, name the bottleneck and the setting to change, once.

    An epoch of a few steps mostly waits for the loader's start, which says nothing about its speed.
    """
    if run.is_loader_checked or sum(record["images"] for record in records if not record["warmup"]) < _FEW_STEPS * (
        run.plan.global_batch_size
    ):
        return
    run.is_loader_checked = True
    advice = bottleneck_advice(
        run.data.times,
        workers=run.data.workers,
        cores=cores_of_process(run.dist.world_size),
        seconds=sum(record["seconds"] for record in records),
        data_wait_pct=mean(without_warmup(records), "data_wait_pct"),
    )
    if advice is not None and run.dist.is_main:
        log.warning("%s (a slow loader can mask the gain of channels_last)", advice)


# --- at the end -------------------------------------------------------------------------------------------------------


def finish(run: Run, *, evaluate_only: bool) -> None:
    """Wait for the last checkpoint and write the summary.

    Raises:
        CheckpointError: the last checkpoint could not be written.
        TrainingFault: most updates were skipped, or the last evaluation is not finite.
    """
    run.checkpoints.store.finish()
    check_skipped_share(run.progress.skipped_steps, run.progress.step)
    check_evaluation(run.summary["val"])
    skipped_images = warn_of_bad_images(run)
    if not (run.records or evaluate_only):
        read_earlier_results(run)
    run.summary |= results(run) | {
        "status": "interrupted" if run.stop_signal else "completed",
        "others_pct": run.machine_load.others_pct(),
        "skipped_images": skipped_images,
        "best": best_evaluation(read_records(run.folder / "metrics.jsonl")) if run.dist.is_main else None,
        **end_time(run.summary["started"]),
    }
    if run.summary["data"] == "synthetic":  # no loader: end-to-end speed equals compute speed
        run.summary["images_per_s"]["compute"] = run.summary["images_per_s"]["end_to_end"]
    if run.dist.is_main and run.summary["images_per_s"]["end_to_end"] and not run.stop_signal:
        run.summary["utilisation"] = utilisation_of(
            run.state.model, run.summary, run.state.parts.precision, run.dist.device
        )
    on_main(lambda: run.writer.finish(run.summary), run.dist)  # a launcher may kill rank 0 when others end
    for line in closing_lines(run.summary, run.folder):
        log.info("%s", line)


def read_earlier_results(run: Run) -> None:
    """Nothing was trained, because an earlier process had completed the run: its results are those of the run."""
    for record in read_records(run.folder / "metrics.jsonl"):
        if record["kind"] == "train":
            run.records.append(record)
        else:
            run.summary[record["kind"]] = {n: value for n, value in record.items() if n not in PLACE}


def warn_of_bad_images(run: Run) -> int:
    """Name the first images that were skipped; returns how many were, over all ranks and epochs."""
    bad = run.data.bad_images
    ranks = gather_objects((bad.skipped, bad.reasons), run.dist)
    reasons = {name: reason for _, of_rank in ranks for name, reason in of_rank.items()}
    if reasons and run.dist.is_main:
        log.warning("%d images cannot be read and were skipped: %s", len(reasons), first_reasons(reasons))
    return sum(skipped for skipped, _ in ranks)


def results(run: Run) -> dict[str, Any]:
    """The results that are known after training; speeds without warm-up."""
    progress, scaler = run.progress, run.state.parts.scaler
    scale = scaler.get_scale() if scaler.is_enabled() else None
    peaks_gib = [peak_memory_gib(run.dist.device), *(record["peak_memory_gib"] for record in run.records)]
    return {
        "steps": progress.step,
        "images_seen": progress.images_seen,
        "peak_memory_gib": round(max(peaks_gib), 4),
        "train": {"loss": run.records[-1]["loss"] if run.records else None},
        "amp": {"scale": scale, "skipped_steps": progress.skipped_steps},
        **speed(run.records),
    }
