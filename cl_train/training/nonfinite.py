"""Non-finite losses and gradients: decide whether a run stops or skips steps.

Every decision depends on numbers that are equal on all ranks (gathered or summed before), so all ranks decide equally.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class TrainingFault(RuntimeError):
    """The run cannot continue; the message has the reason and what to try."""


@dataclass(frozen=True)
class NonFiniteStep:
    """A step whose loss or gradient was not finite, and whose update was skipped."""

    step: int
    rank: int
    what: str  # "the loss is nan", "a gradient is not finite"


def find_nonfinite_steps(
    losses: Sequence[float], skipped: Sequence[float], first_step: int, rank: int, *, scales_loss: bool
) -> list[NonFiniteStep]:
    """The non-finite ones of consecutive steps on this rank, from the loss and the skipped flag (0 or 1) of each.

    With loss scaling, overflowing gradients are expected, because they determine the scale: only a non-finite loss
    counts.
    """
    found = []
    for step, (loss, was_skipped) in enumerate(zip(losses, skipped, strict=True), first_step):
        if not math.isfinite(loss):
            found.append(NonFiniteStep(step, rank, f"the loss is {loss}"))
        elif was_skipped and not scales_loss:
            found.append(NonFiniteStep(step, rank, "a gradient is not finite"))
    return found


ADVICE = (
    "Lower optim.lr, add schedule.warmup_epochs or optim.clip_norm, or try precision=bf16; "
    "on_nonfinite=skip continues without such steps"
)


class NonFinitePolicy:
    """`on_nonfinite`: stop at the first such step, or skip up to `limit` of them."""

    def __init__(self, policy: str, limit: int) -> None:
        assert policy in ("stop", "skip"), policy
        self._policy = policy
        self._limit = limit
        self._count = 0

    def check(self, found: Sequence[NonFiniteStep]) -> None:
        """Raises TrainingFault if the non-finite steps of all ranks must stop the run."""
        if not found:
            return
        self._count += len({item.step for item in found})
        first = min(found, key=lambda item: (item.step, item.what.startswith("a gradient"), item.rank))
        what = f"{first.what} at step {first.step} on rank {first.rank}; the update was skipped"
        if self._policy == "stop":
            raise TrainingFault(f"{what}. {ADVICE}")
        if self._count > self._limit:
            raise TrainingFault(f"{what}; {self._count} such steps exceed max_nonfinite={self._limit}. {ADVICE}")


def check_loss_scale(scale: float | None, min_scale: float, step: int) -> None:
    """Raises TrainingFault: GradScaler has no minimum (pytorch/pytorch#99640) and would continue without learning."""
    if scale is not None and scale < min_scale:
        raise TrainingFault(
            f"the loss scale fell to {scale:g} at step {step} (amp.min_scale={min_scale:g}): gradients overflow "
            "fp16 at every scale. Lower optim.lr, add optim.clip_norm or schedule.warmup_epochs, or use precision=bf16"
        )


def check_skipped_share(skipped: int, steps: int) -> None:
    """Raises TrainingFault if more than half of at least 20 updates were skipped: the run did not train."""
    if steps >= 20 and skipped > steps / 2:
        raise TrainingFault(f"{skipped} of {steps} updates were skipped because gradients overflowed. {ADVICE}")


def check_evaluation(result: Mapping[str, float] | None) -> None:
    """Raises TrainingFault: the last evaluation's loss is not finite, and then its accuracy is arbitrary."""
    if result is not None and not math.isfinite(result["loss"]):
        raise TrainingFault(f"the loss of the evaluation is {result['loss']}: weights or outputs hold NaN or Inf")
