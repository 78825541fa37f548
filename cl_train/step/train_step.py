"""One optimizer step. No logging, no clock, no files.

A step follows the AMP recipe: autocast{forward, loss} -> scale -> backward -> unscale -> clip -> step -> update ->
zero_grad. All results stay on the device: the host waits here only for an optimizer without a fused kernel.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from cl_train.data.device import Batch
from cl_train.step.loss import CROSS_ENTROPY, Loss, logits_of, loss_of
from cl_train.step.precision import MasterWeights, Precision, autocast


@dataclass(frozen=True)
class StepParts:
    """The objects and settings that every step of a run uses."""

    model: nn.Module  # may be wrapped: DDP, compiled
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    precision: Precision
    device: torch.device
    loss: Loss = CROSS_ENTROPY
    clip_norm: float | None = None
    masters: MasterWeights | None = None  # fp16_o2 only


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step on this rank: 0-d tensors on the device."""

    loss: torch.Tensor  # float32, mean over the images
    correct1: torch.Tensor  # int64 (float32 from a CUDA graph), images whose top-1 prediction is correct
    correct5: torch.Tensor  # the same for top-5
    skipped: torch.Tensor  # float32, 1 if the update was skipped because a gradient was not finite


def count_correct(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of N images are correct at top-1 and at top-5: two int64 0-d tensors on the device."""
    labels, best = labels_and_top5(logits, targets)
    hits = best == labels.unsqueeze(1)
    return hits[:, 0].sum(), hits.any(1).sum()


def labels_and_top5(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The labels, int64 [N], and the most probable classes, int64 [N, 5] (or all, if there are fewer), the best first.

    For MixUp/CutMix targets the class with the larger weight counts; of several (multi-label) the most probable one.
    """
    best = logits.detach().float().topk(min(5, logits.shape[1]), dim=1).indices
    if not targets.is_floating_point():
        return targets, best
    hits = targets.gather(1, best) == targets.amax(1, keepdim=True)
    first_hit = best.gather(1, hits.int().argmax(1, keepdim=True))[:, 0]
    return torch.where(hits.any(1), first_hit, targets.argmax(1)), best


def train_step(parts: StepParts, micro_batches: Sequence[Batch]) -> StepResult:
    """One optimizer step over one or more micro-batches (gradient accumulation).

    In every precision, a non-finite gradient skips the update and the weights do not change. With loss
    scaling it also lowers the scale.
    """
    ddp, rows = parts.model if isinstance(parts.model, nn.parallel.DistributedDataParallel) else None, []
    for number, batch in enumerate(micro_batches, 1):
        is_last = number == len(micro_batches)
        with nullcontext() if ddp is None or is_last else ddp.no_sync():  # DDP all-reduces in the last backward pass
            with autocast(parts.precision, parts.device):
                output = parts.model(batch.images)
                loss = loss_of(output, batch.targets, parts.loss)
            parts.scaler.scale(loss / len(micro_batches)).backward()
        rows.append((loss.detach(), *count_correct(logits_of(output), batch.targets)))
    losses, correct1, correct5 = (torch.stack(values) for values in zip(*rows, strict=True))
    return StepResult(losses.mean(), correct1.sum(), correct5.sum(), update_weights(parts))


def update_weights(parts: StepParts) -> torch.Tensor:
    """Unscale, clip, update, zero the gradients. Returns float32 [] on the device: 1 if the update was skipped."""
    if parts.masters is not None:
        parts.masters.copy_gradients_from_model()
    parameters: list[torch.Tensor] = [p for group in parts.optimizer.param_groups for p in group["params"]]
    update = _scaled_update if parts.precision.scales_loss else _plain_update
    skipped = update(parts, parameters)
    if parts.masters is not None:
        parts.masters.copy_weights_to_model()
    parts.optimizer.zero_grad(set_to_none=True)
    return skipped


def _scaled_update(parts: StepParts, parameters: list[torch.Tensor]) -> torch.Tensor:
    if parts.clip_norm is not None:
        parts.scaler.unscale_(parts.optimizer)
        nn.utils.clip_grad_norm_(parameters, parts.clip_norm)
    parts.scaler.step(parts.optimizer)
    # Private, but the only flag on the device: comparing scales before and after would make the host wait.
    flags = parts.scaler._found_inf_per_device(parts.optimizer).values()
    skipped = torch.stack([flag.to(parts.device) for flag in flags]).amax()
    parts.scaler.update()
    return skipped


def _plain_update(parts: StepParts, parameters: list[torch.Tensor]) -> torch.Tensor:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm(gradients)  # not finite if any gradient is not
    if parts.clip_norm is not None:
        nn.utils.clip_grads_with_norm_(parameters, parts.clip_norm, norm)
    skipped = (~norm.isfinite()).float()
    if getattr(parts.optimizer, "_step_supports_amp_scaling", False):
        parts.optimizer.found_inf = skipped  # type: ignore[attr-defined] # read by torch._fused_sgd_, _fused_adam(w)_
        parts.optimizer.step()
        del parts.optimizer.found_inf  # type: ignore[attr-defined]
    elif not skipped.item():  # the host waits: an optimizer without a fused kernel cannot skip on the device
        parts.optimizer.step()
    return skipped
