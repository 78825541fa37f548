"""Exact evaluation: each validation image counts once, for any batch size and number of ranks."""

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cl_train.config.validation import suggest
from cl_train.data.build import Data
from cl_train.data.device import Batch, DeviceFormat
from cl_train.errors import ConfigError, TrainingFault
from cl_train.step.backup import random_state_restored
from cl_train.step.precision import Precision, autocast, kernel_selection
from cl_train.step.train_step import labels_and_top5, logits_of
from cl_train.system.distributed import (
    Dist,
    gather_objects,
    max_over_ranks,
    on_main,
    sum_over_ranks,
)
from cl_train.system.failures import failure_explained
from cl_train.system.machine import MAX_STEPS_AHEAD, DeviceClock
from cl_train.system.processes import StopRequest
from cl_train.training.console import progress_bar

Metrics = Callable[[torch.Tensor, torch.Tensor], Mapping[str, float]]  # of logits and targets
EVALUATED = ("loss", "top1", "top5", "balanced_accuracy", "images")


@dataclass(frozen=True)
class EvaluationSettings:
    source: str | None  # weights of a run that only evaluates: checkpoint, run, file or name
    metrics: Metrics | None
    best_by: str | None  # see `score_of`
    flip: bool  # average the logits of each image and of its mirror image
    reported: str | None  # what the report calls the images; None: no report


@dataclass(eq=False)
class Interrupted(Exception):
    """A signal to a rank ended an evaluation. Raised on all ranks."""

    signum: int


def evaluate_model(
    model: nn.Module,
    data: Data,
    batch_format: DeviceFormat,
    precision: Precision,
    dist: Dist,
    *,
    signals: StopRequest,
    wanted: EvaluationSettings,
) -> tuple[dict[str, Any], torch.Tensor]:
    """Returns loss and accuracies (percent) over all validation images, and the `rows_of` the
    images of this rank. `balanced_accuracy` is the mean recall of the classes that have images.
    `metrics` is called on rank 0 with the logits and targets of all images, on the CPU.

    Raises Interrupted: a signal came. TrainingFault: images are missing, or none could be decoded.
    """
    # All ranks evaluate the BatchNorm statistics that rank 0 saves.
    for buffer in model.buffers() if dist.world_size > 1 else ():
        torch.distributed.broadcast(buffer, src=0)
    skipped_before = data.bad_images.skipped
    batches = _until_signal(data.validation(batch_format), signals, data.val_images, dist)
    rows_of_batches = [torch.empty(0, len(COLUMNS), dtype=torch.float64, device=dist.device)]
    logits_and_targets = []
    clock, ends = DeviceClock(dist.device), deque[Any]()
    for logits, targets in outputs(model, batches, precision, flip=wanted.flip):
        rows_of_batches.append(rows_of(logits, targets))
        ends.append(clock.mark())
        if len(ends) > MAX_STEPS_AHEAD:
            clock.wait(ends.popleft())
        if wanted.metrics:
            logits_and_targets.append((logits.cpu(), targets.cpu()))

    rows = torch.cat(rows_of_batches)
    skipped = data.bad_images.skipped - skipped_before
    loss, correct5, skipped_images, *by_class = _totals(rows, skipped, data.num_classes, dist)
    of_classes, correct = by_class[: data.num_classes], by_class[data.num_classes :]
    images = sum(of_classes)
    if images + skipped_images != data.val_images:
        counted = f"evaluation counted {images:.0f} images and skipped {skipped_images:.0f}"
        advice = "all ranks and workers of an IterableDataset must yield its length in samples"
        raise TrainingFault(f"{counted} of {data.val_images}: {advice}")
    if images == 0:
        raise TrainingFault(f"none of the {data.val_images} validation images could be decoded")

    recalls = [right / count for right, count in zip(correct, of_classes, strict=True) if count]
    result: dict[str, Any] = {"loss": loss / images, "top1": 100 * sum(correct) / images}
    result |= {"top5": 100 * correct5 / images, "images": int(images)}
    result["balanced_accuracy"] = 100 * statistics.fmean(recalls)
    if metrics := wanted.metrics:
        of_ranks = gather_objects(logits_and_targets, dist)
        everything = [batch for of_rank in of_ranks for batch in of_rank]
        logits, targets = (torch.cat(column) for column in zip(*everything, strict=True))
        result |= on_main(lambda: _numbers(metrics, logits, targets), dist)
    return result, rows


def _totals(rows: torch.Tensor, skipped: int, classes: int, dist: Dist) -> list[float]:
    label, predicted, _, _, losses, in_top5 = rows.T
    hits = label[label == predicted]
    counts = [torch.bincount(labels.long(), minlength=classes) for labels in (label, hits)]
    sums = torch.stack([losses.sum(), in_top5.sum(), losses.new_tensor(skipped)])
    return sum_over_ranks(torch.cat([sums, *counts]), dist).tolist()


def score_of(evaluated: Mapping[str, Mapping[str, Any]], best_by: str | None) -> float:
    """Returns the score `best_by`, the higher the better; -inf: unknown. evaluated: by kind."""
    kind = "val_average" if (best_by or "").startswith("average.") else "val"
    result = evaluated.get(kind, {})
    name = (best_by or "top1").removeprefix("average.")
    value = result.get(name)
    if value is None or math.isnan(value):
        return -math.inf
    return -float(value) if name == "loss" else float(value)


def check_evaluation(loss: float | None) -> None:
    """Raises TrainingFault: the loss is not finite (None in a record)."""
    if loss is None or not math.isfinite(loss):
        what = "the loss of the evaluation is not finite"
        raise TrainingFault(f"{what}: weights or outputs hold NaN or Inf")


def check_metrics(wanted: EvaluationSettings, data: Data, dist: Dist) -> None:
    """Calls `metrics` on rank 0 with noise of an evaluation's size, before hours of training.
    Raises ConfigError: it does not return numbers, or there is no number `best_by`.
    """
    images, classes = data.val_images or 2 * data.num_classes, data.num_classes
    names = ["top1", "top5", "loss", "balanced_accuracy"]
    if metrics := wanted.metrics:

        def names_of() -> list[str]:
            targets = torch.arange(images) % classes
            return list(_numbers(metrics, torch.randn(images, classes), targets))

        with random_state_restored(dist.device):
            names += on_main(names_of, dist)
    name = (wanted.best_by or "top1").removeprefix("average.")
    if name not in names:
        raise ConfigError(f"best_by={wanted.best_by}: no such number{suggest(name, names)}")


def _numbers(metrics: Metrics, logits: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    what = "metrics=... must return a dict of numbers"
    with failure_explained(what, f"it was called with {len(logits)} images"):
        numbers = {str(name): float(value) for name, value in metrics(logits, targets).items()}
        if clashes := numbers.keys() & {*EVALUATED, "epoch", "step", "kind"}:
            raise ValueError(f"the names {sorted(clashes)} are taken")
        return numbers


COLUMNS = ("label", "predicted", "probability", "probability of the label", "loss", "in top 5")


def rows_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the `COLUMNS` of each image, float64 [N, 6], on the device; the host does not wait.

    The loss is the plain cross-entropy, whatever `loss=` is.
    """
    probabilities = logits.softmax(1)
    _, best = labels_and_top5(logits, labels)
    columns = (
        labels,
        best[:, 0],
        probabilities.amax(1),
        probabilities.gather(1, labels.unsqueeze(1))[:, 0],
        nn.functional.cross_entropy(logits, labels, reduction="none"),
        (best == labels.unsqueeze(1)).any(1),
    )
    return torch.stack([column.double() for column in columns], 1)


@torch.no_grad()
def outputs(
    model: nn.Module, batches: Iterable[Batch], precision: Precision, *, flip: bool = False
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields the logits, float32 [N, classes], and the targets of each batch; meanwhile `model`,
    without DDP, is in eval mode. flip: average the logits of each image and of its mirror image.
    """
    was_training, largest = model.training, 0
    model.eval()
    for batch in batches:
        if len(batch.images) == 0:  # all were skipped; some models fail on an empty batch
            continue
        largest = max(largest, len(batch.images))
        is_last = len(batch.images) < largest
        selection = kernel_selection(autotune=False) if is_last else nullcontext()
        with autocast(precision, batch.images.device), selection:
            mirrored = batch.images.flip(3) if flip else None  # before a model writes into them
            logits = logits_of(model(batch.images))
            if mirrored is not None:
                logits = (logits + logits_of(model(mirrored))) / 2
        yield logits.float(), batch.targets
    model.train(was_training)


def _until_signal(
    batches: Iterable[Batch], signals: StopRequest, images: int, dist: Dist
) -> Iterator[Batch]:
    """Yields `batches`; before each the ranks agree whether to stop, until all have had theirs."""
    iterator = iter(batches)
    with progress_bar("evaluation", images, unit="image", shown=dist.is_main) as bar:
        while True:
            batch = next(iterator, None)
            flags = [signals.stop or 0, int(batch is not None)]
            stop, unfinished = max_over_ranks(flags, dist)
            if stop:
                raise Interrupted(stop)
            if batch is not None:
                bar.update(len(batch.images) * dist.world_size)
                yield batch
            elif not unfinished:
                return
