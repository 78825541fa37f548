"""Exact evaluation: each validation image counts once, for any batch size and any number of ranks."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from cl_train.data.build import Data
from cl_train.data.device import Batch, DeviceFormat
from cl_train.memory_format.model_call import explain_failure
from cl_train.step.loss import logits_of
from cl_train.step.precision import Precision, autocast, without_autotuning
from cl_train.step.train_step import labels_and_top5
from cl_train.system.distributed import Dist, broadcast_buffers, gather_objects, max_over_ranks, on_main, sum_over_ranks
from cl_train.system.signals import StopRequest
from cl_train.training.nonfinite import TrainingFault

EVALUATED = ("loss", "top1", "top5", "images")


class Interrupted(Exception):
    """A signal (the exception's argument) to a rank ended an evaluation. Raised on all ranks."""


def evaluate_model(
    model: nn.Module,
    data: Data,
    batch_format: DeviceFormat,
    precision: Precision,
    dist: Dist,
    signals: StopRequest | None = None,
    bar: "tqdm[Any] | None" = None,
    metrics: Callable[..., Any] | None = None,
    *,
    flip: bool = False,
) -> tuple[dict[str, Any], torch.Tensor]:
    """Loss and accuracy (percent) over all validation images: `loss`, `top1`, `top5`, `images`.

    The host waits for the device once, at the end, when it reads the sums; with `metrics` after each batch.

    Args:
        metrics: called on rank 0 with the logits, float32 [N, classes], and the targets of all images, on the CPU;
            returns numbers by name, which are added to the result.

    Returns: these numbers, and the `predictions` for the images of this rank.

    Raises:
        Interrupted: a signal requests the run to stop.
        TrainingFault: images are missing, or none could be decoded.
    """
    broadcast_buffers(model, dist)
    skipped_before = data.bad_images.skipped
    batches: Iterable[Batch] = data.validation(batch_format)
    if signals is not None:
        batches = _until_signal(batches, signals, dist, bar)
    kept: list[tuple[torch.Tensor, torch.Tensor]] | None = None if metrics is None else []
    rows = predictions(model, batches, precision, dist.device, flip=flip, kept=kept)
    counts = torch.tensor([len(rows), data.bad_images.skipped - skipped_before], device=dist.device)
    sums = [rows[:, 3].sum(), (rows[:, 0] == rows[:, 1]).sum(), rows[:, 4].sum(), *counts]
    loss, correct1, correct5, images, skipped_images = sum_over_ranks(torch.stack(sums), dist).tolist()
    if images + skipped_images != data.val_images:
        raise TrainingFault(
            f"evaluation counted {images:.0f} images and skipped {skipped_images:.0f} of {data.val_images}; an"
            " IterableDataset must yield as many samples as its length says, on all ranks and workers together"
        )
    if images == 0:
        raise TrainingFault(f"none of the {data.val_images} validation images could be decoded")
    accuracy = {"top1": 100 * correct1 / images, "top5": 100 * correct5 / images}
    result = {"loss": loss / images, **accuracy, "images": int(images)}
    if metrics is not None and kept is not None:
        everything = [batch for of_rank in gather_objects(kept, dist) for batch in of_rank]
        logits, targets = (torch.cat(column) for column in zip(*everything, strict=True))
        result |= on_main(lambda: _numbers(metrics, logits, targets), dist)
    return result, rows


def _numbers(metrics: Callable[..., Any], logits: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """Raises TrainingFault: the user's function fails, or returns something else than new names with numbers."""
    try:
        numbers = {str(name): float(value) for name, value in metrics(logits, targets).items()}
        if taken := numbers.keys() & {*EVALUATED, "epoch", "step", "kind"}:
            raise ValueError(f"the names {sorted(taken)} are taken")
        return numbers
    except Exception as error:
        raise TrainingFault(f"metrics=... must return a dict of numbers: {explain_failure(error)}") from error


@torch.no_grad()
def predictions(
    model: nn.Module,
    batches: Iterable[Batch],
    precision: Precision,
    device: torch.device,
    *,
    flip: bool = False,
    kept: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> torch.Tensor:
    """Evaluate this rank's images; the host does not wait for the device.

    Targets are int64 [N], with -100 for an image without a label, or float [N, classes], as in cross-entropy.

    Args:
        model: not wrapped in DDP, because ranks may have different numbers of batches.
        flip: average the logits of each image and of its mirror image.
        kept: the list to which the logits and targets of each batch are appended, on the CPU.

    Returns:
        float64 [images, 5] on the device: target, predicted class, its probability, loss (the plain cross-entropy,
        whatever `loss=` is), and 1 if the target is among the five most probable classes.
    """
    rows = [torch.empty(0, 5, dtype=torch.float64, device=device)]
    for logits, targets in outputs(model, batches, precision, flip=flip):
        loss = nn.functional.cross_entropy(logits, targets, reduction="none")
        labels, best = labels_and_top5(logits, targets)
        probability = logits.softmax(1).gather(1, best[:, :1])[:, 0]
        in_top5 = (best == labels.unsqueeze(1)).any(1)
        if kept is not None:
            kept.append((logits.cpu(), targets.cpu()))
        columns = (labels, best[:, 0], probability, loss, in_top5)
        rows.append(torch.stack([column.double() for column in columns], 1))
    return torch.cat(rows)


@torch.no_grad()
def outputs(
    model: nn.Module, batches: Iterable[Batch], precision: Precision, *, flip: bool = False
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The logits, float32 [N, classes], and the targets of each batch, with `model` in eval mode; see `predictions`."""
    was_training = model.training
    model.eval()
    largest = 0
    for batch in batches:
        if len(batch.images) == 0:  # all images of the batch were skipped; some models fail on an empty batch
            continue
        largest = max(largest, len(batch.images))
        selection = nullcontext() if len(batch.images) == largest else without_autotuning()  # the last, partial batch
        with autocast(precision, batch.images.device), selection:
            logits = logits_of(model(batch.images))
            if flip:
                logits = (logits + logits_of(model(batch.images.flip(3)))) / 2
        yield logits.float(), batch.targets
    model.train(was_training)


def _until_signal(
    batches: Iterable[Batch], signals: StopRequest, dist: Dist, bar: "tqdm[Any] | None"
) -> Iterator[Batch]:
    """Yield `batches`; between two of them the ranks agree whether to stop.

    Ranks may have different numbers of batches: each takes part in the agreement until all have finished.
    """
    iterator = iter(batches)
    while True:
        batch = next(iterator, None)
        stop, unfinished = max_over_ranks([signals.stop or 0, int(batch is not None)], dist)
        if stop:
            raise Interrupted(stop)
        if not unfinished:
            return
        if bar is not None:
            bar.update()
        if batch is not None:
            yield batch
