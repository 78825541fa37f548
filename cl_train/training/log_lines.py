"""The steps between two log lines: added up on the device, read one line late, logged, and searched for NaN.

All ranks decide equally, because they decide on numbers that were gathered or summed over them.
"""

import logging
import math
from dataclasses import replace
from typing import Any

import torch

from cl_train.data.loader import bottleneck_advice
from cl_train.system.distributed import gather_objects, sum_over_ranks
from cl_train.system.processes import cores_of_process
from cl_train.training.progress import TrainingFault, Window
from cl_train.training.records import duration, peak_memory_gib, without_warmup
from cl_train.training.setup import Run

log = logging.getLogger(__name__)

_FEW_STEPS = 20
ADVICE = (
    "Lower optim.lr, add schedule.warmup_epochs or optim.clip_norm, or try precision=bf16; "
    "on_nonfinite=skip continues without such steps"
)

BadStep = tuple[int, bool, int, float]  # step, whether its loss is finite (its gradient is not), rank, loss


def log_window(run: Run, lr: float) -> None:
    """Submit the steps since the last log line, with the last one's `lr`, for reading; log those submitted before.

    A GPU continues meanwhile. At the end of an epoch and on a CPU the host waits. Raises TrainingFault: see below.
    """
    submitted = _submit(run, lr)
    log_submitted(run)
    run.submitted = submitted
    if not reads_late(run.dist.device) or run.plan.is_epoch_end(run.progress):
        log_submitted(run)


def reads_late(device: torch.device) -> bool:
    """Whether the host would wait for the device by reading a log line at once."""
    return device.type != "cpu"


def _submit(run: Run, lr: float) -> Window:
    """Add up the steps since the last log line on the device, in one reduction over all ranks."""
    steps, scaler = run.unlogged_steps, run.state.parts.scaler
    rows = torch.stack([torch.stack([s.loss.double(), s.correct1, s.correct5, s.skipped]) for s in steps])
    bad_images = rows.new_full((1,), run.data.bad_images.skipped)
    totals = sum_over_ranks(torch.cat([rows.sum(0), bad_images]), run.dist)
    is_bad = ~totals[0].isfinite()  # as `bad_steps` decides, but without waiting for the device
    run.buffer_backup.settle(is_bad if scaler.is_enabled() else is_bad | (totals[3] > 0))
    if scaler.is_enabled():  # private, but `get_scale` waits for the device
        scale = scaler._get_scale_async()
        assert scale is not None
        totals = torch.cat([totals, scale.double().view(1)])
    totals = totals.to("cpu", non_blocking=True)  # pinned memory if it comes from a GPU
    run.unlogged_steps = []
    record = {
        # Values that a resumed run may change; a comparison refuses runs in which they changed.
        **{name: run.records.facts[name] for name in ("memory_format", "precision", "world_size", "device_name")},
        "step": run.progress.step,
        "epoch": run.progress.epoch,
        "lr": lr,
    }
    return replace(run.meter.close(), rows=rows, totals=totals, record=record, copied=run.meter.clock.mark())


def log_submitted(run: Run) -> None:
    """Log the submitted window, if there is one; the host waits for its end. Raises TrainingFault: the run must end."""
    if run.submitted is None:
        return
    window, run.submitted = run.submitted, None
    record, rows = window.record, window.rows
    run.meter.clock.wait(window.copied)
    loss, correct1, correct5, skipped, skipped_images, *scale = window.totals.tolist()
    run.progress.skipped_steps += round(skipped / run.dist.world_size)
    found: list[BadStep] = []
    if skipped or not math.isfinite(loss):  # equal on all ranks, because it is a sum over them
        for step, (its_loss, _, _, was_skipped) in enumerate(rows.tolist(), record["step"] - len(rows) + 1):
            # With loss scaling, overflowing gradients are expected, because they determine the scale.
            if not math.isfinite(its_loss) or (was_skipped and not scale):
                found.append((step, math.isfinite(its_loss), run.dist.rank, its_loss))
        found = [step for of_rank in gather_objects(found, run.dist) for step in of_rank]
    images = len(rows) * run.plan.global_batch_size
    record |= {
        "loss": loss / (len(rows) * run.dist.world_size),
        "top1": 100 * correct1 / images,
        "top5": 100 * correct5 / images,
        **run.meter.measured(window),
        "loss_scale": scale[0] if scale else None,
        "skipped_steps": run.progress.skipped_steps,
        "skipped_images": int(skipped_images),
        "peak_memory_gib": peak_memory_gib(run.dist.device),
    }
    run.windows_of_epoch.append(record)
    run.records.write("train", record)
    log.info("%s", console_line(run, record))
    cfg = run.plan.cfg
    if scale and scale[0] < cfg.amp.min_scale:  # GradScaler has no minimum (pytorch/pytorch#99640)
        raise TrainingFault(
            f"the loss scale fell to {scale[0]:g} at step {record['step']} (amp.min_scale={cfg.amp.min_scale:g}): "
            f"gradients overflow fp16 at every scale. {ADVICE}"
        )
    run.bad_steps += len({step for step, *_ in found})
    check_bad_steps(found, run.bad_steps, cfg.max_nonfinite if cfg.on_nonfinite == "skip" else 0)


def check_bad_steps(found: list[BadStep], count: int, limit: int) -> None:
    """Raises TrainingFault: `count` bad steps so far, the last ones in `found`, are more than `limit`."""
    if found and count > limit:
        step, has_loss, rank, loss = min(found)
        what = "a gradient is not finite" if has_loss else f"the loss is {loss}"
        which = f"; {count} such steps exceed max_nonfinite={limit}" if limit else ""
        raise TrainingFault(f"{what} at step {step} on rank {rank}; the update was skipped{which}. {ADVICE}")


def mean(records: list[dict[str, Any]], name: str) -> float:
    """The mean over windows, weighted by their images."""
    images = sum(record["images"] for record in records)
    return sum(float(record[name]) * record["images"] for record in records) / images


def console_line(run: Run, window: dict[str, Any]) -> str:
    """A window in main_amp's format: each value, and in brackets its mean over the epoch.

    Time is seconds per step, Speed is images per second of all ranks including data loading, Data is the share of the
    time in which a step waited for its batch. ETA is without evaluations.
    """
    records, measured = run.windows_of_epoch, without_warmup(run.windows_of_epoch)
    step_in_epoch = run.progress.step_in_epoch - (run.progress.step - window["step"])
    seconds_per_step = mean(measured, "step_ms") / 1000
    speed = sum(record["images"] for record in measured) / sum(record["seconds"] for record in measured)
    scale = f" Scale {window['loss_scale']:g} Skipped {window['skipped_steps']}" if window["loss_scale"] else ""
    bad_images = f" Bad images {window['skipped_images']}" if window["skipped_images"] else ""
    return (
        f"Epoch: [{window['epoch']}][{step_in_epoch}/{run.plan.steps_per_epoch}]"
        f" Time {window['step_ms'] / 1000:.3f} ({seconds_per_step:.3f})"
        f" Speed {window['images_per_s']:.1f} ({speed:.1f})"
        f" Loss {window['loss']:.4f} ({mean(records, 'loss'):.4f})"
        f" Prec@1 {window['top1']:.2f} ({mean(records, 'top1'):.2f})"
        f" Prec@5 {window['top5']:.2f} ({mean(records, 'top5'):.2f})"
        f" LR {window['lr']:.5f} Data {window['data_wait_pct']:.0f}%{scale}{bad_images}"
        f" ETA {duration((run.plan.last_step - window['step']) * seconds_per_step)}"
        f"{' (warm-up)' if window['warmup'] else ''}"
    )


def warn_if_loader_bound(run: Run) -> None:
    """If an epoch waited for data, name the bottleneck and the setting to change, once."""
    images = sum(window["images"] for window in run.windows_of_epoch if not window["warmup"])
    if run.is_loader_checked or images < _FEW_STEPS * run.plan.global_batch_size:  # mostly the loader's start
        return
    run.is_loader_checked = True
    advice = bottleneck_advice(
        run.data.times,
        workers=run.data.workers,
        cores=cores_of_process(run.dist.world_size),
        seconds=sum(window["seconds"] for window in run.windows_of_epoch),
        data_wait_pct=mean(without_warmup(run.windows_of_epoch), "data_wait_pct"),
    )
    if advice is not None and run.dist.is_main:
        log.warning("%s (a slow loader can mask the gain of channels_last)", advice)
