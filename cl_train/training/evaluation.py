"""Exact evaluation: each validation image counts once, for any batch size and any number of ranks; its report."""

import base64
import csv
import io
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import nn

from cl_train.data.build import Data, ImageData
from cl_train.data.device import Batch, DeviceFormat
from cl_train.data.images import BadImage
from cl_train.memory_format.model_call import explain_failure
from cl_train.step.precision import Precision, autocast, kernel_selection
from cl_train.step.train_step import labels_and_top5, logits_of
from cl_train.system.distributed import Dist, gather_objects, max_over_ranks, on_main, sum_over_ranks
from cl_train.system.files import write_text
from cl_train.system.processes import StopRequest
from cl_train.training.records import progress_bar
from cl_train.training.state import MAP, TrainingFault

log = logging.getLogger(__name__)

EVALUATED = ("loss", "top1", "top5", "images")


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
    signals: StopRequest | None = None,
    metrics: Callable[..., Any] | None = None,
    flip: bool = False,
) -> tuple[dict[str, Any], torch.Tensor]:
    """Loss and accuracy (percent) over all validation images, and the `rows_of` the images of this rank. `metrics` are
    called on rank 0 with the logits, float32 [N, classes], and the targets of all images, on the CPU.
    Raises Interrupted: by a signal. TrainingFault: images are missing, or none could be decoded."""
    for buffer in model.buffers() if dist.world_size > 1 else ():  # BatchNorm's statistics, as rank 0 saves them
        torch.distributed.broadcast(buffer, src=0)
    skipped_before, is_binary = data.bad_images.skipped, bool(data.label_shape)
    batches = _until_signal(data.validation(batch_format), signals, data.val_images, dist)
    found, kept = [torch.empty(0, 5, dtype=torch.float64, device=dist.device)], []
    for logits, targets in outputs(model, batches, precision, flip=flip):
        found.append(rows_of(logits, targets, binary=is_binary))
        if metrics or is_binary:
            kept.append((logits.cpu(), targets.cpu()))
    rows = torch.cat(found)
    counts = torch.tensor([len(rows), data.bad_images.skipped - skipped_before], device=dist.device)
    sums = [rows[:, 3].sum(), (rows[:, 0] == rows[:, 1]).sum(), rows[:, 4].sum(), *counts]
    loss, correct1, correct5, images, skipped_images = sum_over_ranks(torch.stack(sums), dist).tolist()
    if images + skipped_images != data.val_images:
        counted = f"evaluation counted {images:.0f} images and skipped {skipped_images:.0f} of {data.val_images}"
        raise TrainingFault(f"{counted}: all ranks and workers of an IterableDataset must yield its length in samples")
    if images == 0:
        raise TrainingFault(f"none of the {data.val_images} validation images could be decoded")
    result: dict[str, Any] = {"loss": loss / images, "top1": 100 * correct1 / images, "top5": 100 * correct5 / images}
    result["images"] = int(images)
    if metrics or is_binary:
        everything = [batch for of_rank in gather_objects(kept, dist) for batch in of_rank]
        logits, targets = (torch.cat(column) for column in zip(*everything, strict=True))
        if is_binary:
            result[MAP] = mean_average_precision(logits.numpy(), targets.numpy() > 0.5)
        if metrics is not None:
            result |= on_main(lambda: _numbers(metrics, logits, targets), dist)
    return result, rows


def check_evaluation(loss: float | None) -> None:
    """Raises TrainingFault: the loss of an evaluation is not finite (None in a record): its accuracy is arbitrary."""
    if loss is None or not math.isfinite(loss):
        raise TrainingFault("the loss of the evaluation is not finite: weights or outputs hold NaN or Inf")


def mean_average_precision(scores: npt.NDArray[np.float32], positives: npt.NDArray[np.bool_]) -> float:
    """Percent: scikit-learn's `average_precision_score` over [images, classes], for classes with a positive image."""
    found = []
    for score, positive in zip(scores.T, positives.T, strict=True):
        order = np.argsort(-score, kind="stable")
        ends = np.append(np.diff(score[order]) != 0, True)  # images with equal scores have one threshold
        hits = np.cumsum(positive[order])
        precision = hits[ends] / (np.flatnonzero(ends) + 1)
        if hits[-1]:
            found.append((np.diff(hits[ends], prepend=0) * precision).sum() / hits[-1])
    return 100 * float(np.mean(found)) if found else math.nan


def _numbers(metrics: Callable[..., Any], logits: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    try:
        numbers = {str(name): float(value) for name, value in metrics(logits, targets).items()}
        if taken := numbers.keys() & {*EVALUATED, "epoch", "step", "kind"}:
            raise ValueError(f"the names {sorted(taken)} are taken")
        return numbers
    except Exception as error:  # of the user's function
        raise TrainingFault(f"metrics=... must return a dict of numbers: {explain_failure(error)}") from error


def rows_of(logits: torch.Tensor, targets: torch.Tensor, *, binary: bool = False) -> torch.Tensor:
    """float64 [N, 5] on the device: target, predicted class, its probability, loss (the plain cross-entropy, whatever
    `loss=` is), and 1 if the target is among the five most probable classes. The host does not wait.
    Targets: int64 [N], with -100 for an image without a label, or float [N, classes]; `binary`: of several labels."""
    if binary:
        loss = nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(1)
    else:
        loss = nn.functional.cross_entropy(logits, targets, reduction="none")
    labels, best = labels_and_top5(logits, targets)
    columns = (labels, best[:, 0], logits.softmax(1).amax(1), loss, (best == labels.unsqueeze(1)).any(1))
    return torch.stack([column.double() for column in columns], 1)


@torch.no_grad()
def outputs(
    model: nn.Module, batches: Iterable[Batch], precision: Precision, *, flip: bool = False
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The logits, float32 [N, classes], and targets of each batch, with `model`, not wrapped in DDP, in eval mode; with
    `flip` the mean of the logits of each image and of its mirror image."""
    was_training, largest = model.training, 0
    model.eval()
    for batch in batches:
        if len(batch.images) == 0:  # all images of the batch were skipped; some models fail on an empty batch
            continue
        largest = max(largest, len(batch.images))
        selection = nullcontext() if len(batch.images) == largest else kernel_selection(autotune=False)  # the last
        with autocast(precision, batch.images.device), selection:
            logits = logits_of(model(batch.images))
            if flip:
                logits = (logits + logits_of(model(batch.images.flip(3)))) / 2
        yield logits.float(), batch.targets
    model.train(was_training)


def _until_signal(batches: Iterable[Batch], signals: StopRequest | None, images: int, dist: Dist) -> Iterator[Batch]:
    """Yield `batches`. Between two of them the ranks agree whether to stop, until all have had theirs."""
    iterator = iter(batches)
    with progress_bar("evaluation", images, unit="image", shown=dist.is_main and signals is not None) as bar:
        while True:
            batch = next(iterator, None)
            flags = [signals.stop or 0 if signals else 0, int(batch is not None)]
            stop, unfinished = max_over_ranks(flags, dist)
            if stop:
                raise Interrupted(stop)
            if batch is not None:
                bar.update(len(batch.images) * dist.world_size)
                yield batch
            elif not unfinished:
                return


# --- report=true ------------------------------------------------------------------------------------------------------

_WORST_IMAGES, _THUMBNAIL_PX = 50, 160


def write_report(predicted: torch.Tensor, data: Data, dist: Dist, folder: Path) -> None:
    """Rank 0 writes `per_class.csv`, `confusions.csv` and `worst.html`; if it cannot, it warns."""
    indices = data.validation_indices()
    if len(indices) != len(predicted):  # an IterableDataset, or a file that became unreadable during the run
        indices = [-1] * len(predicted)
    rows = np.concatenate(gather_objects(np.column_stack((predicted.cpu().numpy(), indices)), dist))
    if not dist.is_main:
        return
    labels = range(len(data.classes), int(rows[:, 1].max(initial=0)) + 1)  # of a model with more outputs than classes
    names = [*data.classes, *(f"output {label}" for label in labels)]
    classes, confused = per_class(rows, names)
    try:
        folder.mkdir(exist_ok=True)
        for name, table in (("per_class", classes), ("confusions", confused)):
            with open(folder / f"{name}.csv", "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
                writer = csv.DictWriter(file, table[0] if table else ["true", "predicted", "images"])
                writer.writeheader()
                writer.writerows(table)
        worst = np.argsort(rows[:, 3])[::-1][:_WORST_IMAGES]  # NaN losses come first
        page = (
            '<!doctype html><meta charset="utf-8"><style>figure { display: inline-block; width: 160px }</style>'
            f"<h1>{100 * (rows[:, 0] == rows[:, 1]).mean():.2f} % of {len(rows)} images are correct</h1>"
            f"<h2>The {len(worst)} images with the largest loss, as the model sees them</h2>"
            + "".join(_figure(row, data, names) for row in rows[worst])
        )
        write_text(folder / "worst.html", page)
    except (OSError, BadImage) as error:
        log.warning("the evaluation's report cannot be written: %s", error)
        return
    lowest = ", ".join(f"{row['class']} {row['top1']:.1f} %" for row in classes[:3])
    frequent = ", ".join(f"{row['true']} as {row['predicted']} {row['images']} times" for row in confused[:3]) or "none"
    log.info("report: lowest accuracy: %s; confusions: %s; %s", lowest, frequent, folder / "worst.html")


def per_class(rows: npt.NDArray[np.float64], names: Sequence[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Accuracy (percent) per class, the lowest first, and the confusions, the most frequent first."""
    counts = np.zeros((len(names), len(names)), int)  # of images by true and predicted class
    np.add.at(counts, tuple(rows[:, :2].astype(int).T), 1)
    table = []
    for label in np.flatnonzero(counts.sum(1)).tolist():
        images, correct, predicted = int(counts[label].sum()), int(counts[label, label]), int(counts[:, label].sum())
        shares = {"top1": 100 * correct / images, "precision": 100 * correct / predicted if predicted else None}
        loss = float(rows[rows[:, 0] == label, 3].mean())
        table.append({"class": names[label], "images": images, "correct": correct, **shares, "loss": loss})
    np.fill_diagonal(counts, 0)
    wrong = np.argwhere(counts).tolist()
    cells = [{"true": names[i], "predicted": names[j], "images": int(counts[i, j])} for i, j in wrong]
    return sorted(table, key=lambda row: row["top1"]), sorted(cells, key=lambda row: -row["images"])


def _figure(row: npt.NDArray[np.float64], data: Data, names: Sequence[str]) -> str:
    """The image, its predicted and its true class with their probabilities, and the end of the image's path."""
    label, predicted, probability, loss, _, index = row
    lines = f"<div>predicted: {escape(names[int(predicted)])} {100 * probability:.1f} %</div>"
    lines += f"<div>true: {escape(names[int(label)])} {100 * np.exp(-loss):.1f} %</div>loss {loss:.3f}"
    if index < 0:
        return f"<figure>{lines}</figure>"
    assert isinstance(data, ImageData)
    name, buffer = data.validation_name(int(index)), io.BytesIO()
    picture = Image.fromarray(data.validation_pixels(int(index)))
    picture.thumbnail((_THUMBNAIL_PX, _THUMBNAIL_PX))
    picture.save(buffer, "JPEG", quality=85)
    image = f'<img src="data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}">'
    return f'<figure title="{escape(name)}">{image}{lines}<div>{escape("/".join(Path(name).parts[-2:]))}</div></figure>'
