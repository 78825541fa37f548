"""Exact evaluation: every validation image counts once, for any batch size and any number of ranks."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from cl_train.data.batch import DeviceFormat
from cl_train.data.build import Data
from cl_train.step.precision import Precision
from cl_train.step.train_step import evaluate
from cl_train.system.distributed import Dist, broadcast_buffers, sum_over_ranks
from cl_train.training.nonfinite import TrainingFault
from cl_train.training.plan import Progress
from cl_train.training.records import Tracker
from cl_train.training.setup import Assembly

log = logging.getLogger(__name__)


def evaluate_and_record(
    facts: dict[str, Any],
    data: Data,
    form: DeviceFormat,
    assembly: Assembly,
    progress: Progress,
    tracker: Tracker,
    dist: Dist,
) -> bool:
    """Evaluate the model, and its moving average where there is one. True when the top-1 is the best so far."""
    precision = assembly.parts.precision
    result = evaluate_exactly(assembly.model, data, form, precision, dist)
    facts["val"] = result
    record(result, "val", progress, tracker, dist)
    if assembly.average is not None:
        # The average is kept in fp32, so under fp16_o2 autocast does what the cast weights do in the model.
        as_autocast = Precision("fp16", autocast_dtype=torch.float16) if precision.master_weights else precision
        result = evaluate_exactly(assembly.average.module, data, form, as_autocast, dist)
        facts["val_average"] = result
        record(result, "val_average", progress, tracker, dist)
    is_best = result["top1"] > progress.best_top1
    progress.best_top1 = max(progress.best_top1, result["top1"])
    return is_best


def evaluate_exactly(
    model: nn.Module, data: Data, form: DeviceFormat, precision: Precision, dist: Dist
) -> dict[str, Any]:
    """Loss and accuracy over the validation images, each counted once whatever the batch and the number of ranks.

    Sync point: the sums are read once, at the end.
    """
    broadcast_buffers(model, dist)
    skipped_before = data.skipped_images
    sums = evaluate(model, data.validation(form), precision, dist.device)
    skipped = torch.tensor([data.skipped_images - skipped_before], dtype=torch.float64, device=dist.device)
    loss, correct1, correct5, images, skipped_images = sum_over_ranks(torch.cat([sums, skipped]), dist).tolist()
    if images + skipped_images != data.val_images:
        raise TrainingFault(
            f"evaluation counted {images:.0f} images and skipped {skipped_images:.0f} of {data.val_images}"
        )
    if images == 0:
        raise TrainingFault(f"none of the {data.val_images} validation images could be decoded")
    return {
        "loss": loss / images,
        "top1": 100 * correct1 / images,
        "top5": 100 * correct5 / images,
        "images": int(images),
    }


def record(result: dict[str, Any], kind: str, progress: Progress, tracker: Tracker, dist: Dist) -> None:
    tracker.write(kind, progress.step, {"epoch": progress.epoch, **result})
    if dist.is_main:
        name = "" if kind == "val" else " (moving average)"
        log.info(
            " * Prec@1 %.3f Prec@5 %.3f Loss %.4f on %d images%s",
            result["top1"],
            result["top5"],
            result["loss"],
            result["images"],
            name,
        )
