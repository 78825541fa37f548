"""Exact evaluation: each validation image counts once, for any batch size and any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from cl_train.data.batch import Batch, DeviceFormat
from cl_train.data.splits import Data
from cl_train.step.loss import logits_of, loss_of
from cl_train.step.precision import Precision, autocast
from cl_train.step.train_step import count_correct
from cl_train.system.distributed import Dist, broadcast_buffers, max_over_ranks, sum_over_ranks
from cl_train.system.signals import StopRequest
from cl_train.training.nonfinite import TrainingFault


class Interrupted(Exception):
    """A signal (the exception's argument) to a rank ended an evaluation. Raised on all ranks."""


def evaluate_model(
    model: nn.Module,
    data: Data,
    batch_format: DeviceFormat,
    precision: Precision,
    dist: Dist,
    signals: StopRequest | None = None,
    bar: tqdm[Any] | None = None,
    observe: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
    *,
    flip: bool = False,
) -> dict[str, Any]:
    """Loss and accuracy (percent) over all validation images: `loss`, `top1`, `top5`, `images`.

    The host waits for the device once, at the end, when it reads the sums. `observe`, `flip`: see `evaluation_sums`.

    Raises:
        Interrupted: a signal requests the run to stop.
        TrainingFault: images are missing, or none could be decoded.
    """
    broadcast_buffers(model, dist)
    skipped_before = data.bad_images.skipped
    batches: Iterable[Batch] = data.validation(batch_format)
    if signals is not None:
        batches = _until_signal(batches, signals, dist, bar)
    sums = evaluation_sums(model, batches, precision, dist.device, observe, flip=flip)
    skipped = torch.tensor([data.bad_images.skipped - skipped_before], dtype=torch.float64, device=dist.device)
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


@torch.no_grad()
def evaluation_sums(
    model: nn.Module,
    batches: Iterable[Batch],
    precision: Precision,
    device: torch.device,
    observe: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
    *,
    flip: bool = False,
) -> torch.Tensor:
    """Sums over this rank's images; the loss is the plain cross-entropy, whatever `loss=` is.

    Args:
        model: not wrapped in DDP, because ranks may have different numbers of batches.
        observe: called with the logits [N, classes] and the targets int64 [N] of each batch.
        flip: average the logits of each image and of its mirror image.

    Returns:
        float64 [4] on the device: sum of losses, images correct at top-1, at top-5, all images. The counts are exact.
    """
    was_training = model.training
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    for batch in batches:
        images = len(batch.images)
        if images == 0:  # all images of the batch were skipped: their mean loss is NaN
            continue
        with autocast(precision, device):
            logits = logits_of(model(batch.images))
            if flip:
                logits = (logits + logits_of(model(batch.images.flip(3)))) / 2
            loss = loss_of(logits, batch.targets)
        if observe is not None:
            observe(logits, batch.targets)
        counts = [*count_correct(logits, batch.targets), torch.full_like(sums[3], images)]
        sums += torch.stack([loss.double() * images, *counts])
    model.train(was_training)
    return sums


def _until_signal(batches: Iterable[Batch], signals: StopRequest, dist: Dist, bar: tqdm[Any] | None) -> Iterator[Batch]:
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
