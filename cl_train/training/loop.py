"""The training loop: `train` and `evaluate` are whole runs. After each step: log, save, stop."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from cl_train.config.schema import Config
from cl_train.data.loader_report import bad_share
from cl_train.errors import TrainingFault
from cl_train.models.files import read_weights, weights_path
from cl_train.step.optim import set_lr
from cl_train.system.distributed import gather_objects, max_over_ranks, on_main
from cl_train.system.files import continues
from cl_train.system.run_folder import BAD_IMAGES
from cl_train.training.active_run import ADVICE, ActiveRun
from cl_train.training.build import utilisation_of
from cl_train.training.console import closing_lines, duration, profile, progress_bar
from cl_train.training.evaluation import (
    EVALUATED,
    Interrupted,
    check_evaluation,
    evaluate_model,
    score_of,
)
from cl_train.training.records import RunResult
from cl_train.training.report import write_report
from cl_train.training.setup import opened_run

log = logging.getLogger(__name__)


def train(cfg: Config, folder: Path, command: str | None = None) -> RunResult:
    """Runs `cfg`; rank 0 keeps its records in `folder`. A program that goes on after the run gives
    its own `command`, and gets a KeyboardInterrupt at the second Ctrl-C.

    Raises ConfigError: a problem in the data's classes, the model or the checkpoint, which cannot
    be found earlier. Another `Fault`, or OSError: the run cannot continue.
    """
    with opened_run(cfg, folder, command) as run:
        done = on_main(run.records.completed, run.dist)
        if done and run.plan.is_done(run.progress) and continues(cfg.resume, run.folder):
            return closed(run, done)
        with step_observers(run, profiled=cfg.profile) as after_step:
            while not (run.stop_signal or run.plan.is_done(run.progress)):
                save_due = train_epoch(run, after_step)
                if not run.stop_signal:
                    end_epoch(run, save_due=save_due)
        has_checkpoint = run.checkpoints.saved_step >= 0 or continues(cfg.resume, run.folder)
        if cfg.resume is not None and not has_checkpoint:  # it began at its last step: a copy
            run.save()
        run.checkpoints.store.finish()
        steps, skipped = run.progress.step, run.progress.skipped_steps
        if not run.stop_signal and steps >= 20 and skipped > steps / 2:
            what = f"{skipped} of {steps} updates were skipped because gradients overflowed"
            raise TrainingFault(f"{what}. {ADVICE}")
        return finish(run)


def evaluate(cfg: Config, folder: Path, command: str | None = None) -> RunResult:
    """Evaluates `weights`, or the checkpoint that `resume` names; if it belongs to the run in
    `folder`, the evaluation gets a folder of its own.
    """
    with opened_run(cfg, folder, command) as run:
        evaluated = evaluate_model_and_ema(run)
        if "val" in evaluated:
            score = score_of(evaluated, run.evaluation.best_by)
            run.progress.set_best(score, evaluated["val"]["top1"])
        record_evaluation(run, evaluated)
        return finish(run)


def train_epoch(run: ActiveRun, after_step: Callable[[], bool]) -> bool:
    """Trains to the end of the epoch, or to a signal; returns whether a checkpoint is due now."""
    plan, state, progress, meter = run.plan, run.state, run.progress, run.meter
    first_batch = progress.step_in_epoch * plan.accumulate_steps
    batches = run.data.train(progress.epoch, state.batch_format, first_batch=first_batch)
    run.epoch_windows = []
    meter.start(plan.image_sizes[min(progress.epoch, plan.epochs - 1)])
    is_epoch_end = plan.is_epoch_end(progress)
    save_due = False
    while not (is_epoch_end or run.stop_signal):
        with meter.waiting():
            micro_batches = list(islice(batches, plan.accumulate_steps))
        if progress.step == 0:
            run.records.show(micro_batches[0].images)

        lr = plan.lr_at(progress)
        set_lr(state.parts.optimizer, lr)
        is_warming_up = state.is_warming_up
        progress.pending_steps.append(state.train_step(micro_batches))
        progress.advance(plan.global_batch_size)
        state.parts.update_average(progress.step)

        meter.tick(plan.global_batch_size, warmup=is_warming_up)
        run.note_first_step()
        if after_step():
            meter.exclude_pause()
        is_epoch_end = plan.is_epoch_end(progress)
        if progress.step % plan.log_every == 0 or is_epoch_end:
            run.log_steps(lr)

        # All ranks must stop or save at the same step: one all-reduce on the host per step.
        is_due = plan.is_step_save_due(progress)
        flags = [run.signals.stop or 0, run.signals.save_requested or is_due]
        run.stop_signal, save_flag = max_over_ranks(flags, run.dist)
        save_due = bool(save_flag)
        if run.stop_signal or (save_due and not is_epoch_end):
            run.save()
            meter.exclude_pause()
    batches.close()  # batches prepared ahead would count as the evaluation's
    return save_due


@contextmanager
def step_observers(run: ActiveRun, *, profiled: bool) -> Iterator[Callable[[], bool]]:
    """Yields a function to call after each step. It moves the progress bar and profiler of rank 0,
    and returns whether it has written a profile, whose time belongs to no step.
    """
    is_main, progress = run.dist.is_main, run.progress
    with ExitStack() as stack:
        steps = run.plan.last_step
        bar = stack.enter_context(progress_bar("training", steps, progress.step, shown=is_main))
        is_profiled = profiled and is_main
        profiler = profile(run.folder, run.dist.device) if is_profiled else nullcontext(bool)
        profile_step = stack.enter_context(profiler)

        def after_step() -> bool:
            bar.update(progress.step - bar.n)
            return profile_step()

        yield after_step


def end_epoch(run: ActiveRun, *, save_due: bool) -> None:
    """Save, then evaluate: a kill or signal in a long evaluation does not lose the epoch. The epoch
    stays open, and the resumed run begins with its evaluation.
    """
    progress, plan = run.progress, run.plan
    run.warn_if_loader_bound()
    if save_due or plan.is_save_due(progress):
        run.save()
    if plan.is_evaluation_due(progress):
        evaluated = evaluate_model_and_ema(run)
        if run.stop_signal:
            run.save()
            return
        score = score_of(evaluated, run.evaluation.best_by)
        if progress.count_evaluation(score, evaluated["val"]["top1"]):
            run.checkpoints.mark_best(progress)
        record_evaluation(run, evaluated)
        if plan.is_out_of_patience(progress):
            log.info("patience=%d: as many evaluations without a gain; the run ends", plan.patience)
            run.save()
        if run.epoch_windows:  # none: the run resumed at the end of an epoch
            took = duration(sum(window.seconds for window in run.epoch_windows))
            best = f"accuracy {progress.best_score:.2f} %"
            if run.evaluation.best_by is not None:
                best = f"{run.evaluation.best_by} {abs(progress.best_score):.4g}"
            log.info("epoch %d: %s of training, best %s", progress.epoch, took, best)
    reasons, _ = run.note_bad_images()
    if reasons and progress.epoch == 0 and run.dist.is_main:
        share = bad_share(reasons, run.data.train_images + run.data.val_images)
        cost = "each is read in vain, and in training the next image takes its place"
        log.warning("%s: %s; %s names them", share, cost, BAD_IMAGES)
    plan.close_epoch(progress)


def evaluate_model_and_ema(run: ActiveRun) -> dict[str, dict[str, Any]]:
    """Returns the results `val` and, of the EMA, `val_average`. A signal sets `run.stop_signal`."""
    state = run.state
    models = {"val": (state.model, state.parts.settings.precision)}
    average = state.parts.average
    if average is not None:
        models["val_average"] = (average.module, state.parts.settings.precision.for_fp32_weights)
    results = {}
    for kind, (model, precision) in models.items():
        try:
            results[kind], predictions = evaluate_model(
                model,
                run.data,
                state.batch_format,
                precision,
                run.dist,
                signals=run.signals,
                wanted=run.evaluation,
            )
        except Interrupted as interrupted:
            run.stop_signal = interrupted.signum
            break
        if run.evaluation.reported is not None and kind == "val":
            weights = on_main(partial(evaluated_weights, run), run.dist)
            about = f"{run.records.facts.model}, {weights}; {run.evaluation.reported}"
            write_report(predictions, run.data, run.dist, run.folder, about)
    return results


def evaluated_weights(run: ActiveRun) -> str:
    """Returns the run or the checkpoint that is evaluated, with its epoch and step."""
    place = f"(epoch {run.progress.epoch}, step {run.progress.step})"
    if not run.records.config["evaluate_only"]:
        return f"run {'/'.join(run.folder.parts[-2:])} {place}"
    if run.checkpoints.resumed_from is not None:
        return f"{run.checkpoints.resumed_from} {place}"
    path = weights_path(run.evaluation.source or "")
    return read_weights(path).file if path else f"weights={run.evaluation.source}"


def record_evaluation(run: ActiveRun, evaluated: dict[str, dict[str, Any]]) -> None:
    """Writes `val` last: its record marks the evaluation as complete for a resumed run."""
    for kind, result in reversed(evaluated.items()):
        run.records.write_evaluation(kind, result)
        line = " * Prec@1 {top1:.3f} Prec@5 {top5:.3f} Loss {loss:.4f} on {images} images"
        more = {name: value for name, value in result.items() if name not in EVALUATED}
        if abs(result["balanced_accuracy"] - result["top1"]) >= 0.05:
            more = {"balanced_accuracy": result["balanced_accuracy"]} | more
        numbers = "".join(f" {name} {value:.4g}" for name, value in more.items())
        log.info("%s%s%s", line.format(**result), numbers, "" if kind == "val" else " (EMA)")


def finish(run: ActiveRun) -> RunResult:
    """Writes the summary. Raises TrainingFault: the model evaluates to NaN."""
    dist, records, stopped_by = run.dist, run.records, run.stop_signal
    for evaluation in records.of_kind("val")[-1:]:
        check_evaluation(evaluation["loss"])
    bad, lost_pct = run.data.bad_images, run.machine_load.lost_pct()
    skipped, each_lost_pct = zip(*gather_objects((bad.skipped, lost_pct), dist), strict=True)
    write = partial(
        records.finish,
        "interrupted" if stopped_by else "completed",
        utilisation=partial(utilisation_of, run.state, dist),
        skipped_images=sum(skipped),
        others_pct=run.machine_load.others_pct(),
        lost_pct=None if None in each_lost_pct else max(each_lost_pct),
        first_step_s=run.first_step_s,
        gpu=run.gpu.worst(),
    )
    summary = on_main(write, dist)  # on all ranks: a launcher may kill rank 0 when the others end
    return closed(run, summary)


def closed(run: ActiveRun, summary: dict[str, Any]) -> RunResult:
    _, bad_images = run.note_bad_images()
    has_trained = bool(run.records.of_kind("train"))
    about_run = (summary, run.folder, run.records.config, bad_images)
    for line in closing_lines(*about_run, has_trained=has_trained):
        log.info("%s", line)
    return RunResult(run.folder, summary, 128 + run.stop_signal if run.stop_signal else 0)
