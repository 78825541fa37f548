"""When to stop a run that is going wrong, and what to say. Decisions only: the loop measures and acts.

Every decision is a function of numbers that are equal on all ranks (gathered or summed before), so that all ranks take
the same one at the same step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


class TrainingFault(RuntimeError):
    """The run cannot go on in a sensible way; the message has the reason and what to try."""


@dataclass(frozen=True)
class Trouble:
    """A step whose loss or gradient was not finite. Its update was not taken: see `step.train_step`."""

    step: int
    rank: int
    what: str  # "the loss is nan", "a gradient is not finite"


def find_trouble(
    losses: Sequence[float], skipped: Sequence[float], *, first_step: int, rank: int, scales_loss: bool
) -> list[Trouble]:
    """What went wrong in a window of steps on this rank.

    With loss scaling an overflowing gradient is how the scale is found, so only a bad loss counts there.

    Args:
        losses: one per step, of this rank's own images.
        skipped: 1 where the update was left out, one per step.
    """
    troubles = []
    for offset, (loss, left_out) in enumerate(zip(losses, skipped, strict=True)):
        if not math.isfinite(loss):
            troubles.append(Trouble(first_step + offset, rank, f"the loss is {loss}"))
        elif left_out and not scales_loss:
            troubles.append(Trouble(first_step + offset, rank, "a gradient is not finite"))
    return troubles


ADVICE = (
    "Lower optim.lr, add schedule.warmup_epochs or optim.clip_norm, or try precision=bf16; "
    "on_nonfinite=skip goes on without such steps"
)


class NonFinitePolicy:
    """`on_nonfinite`: stop at the first bad step, skip up to `limit` of them, or roll back to the last checkpoint.

    A run is reproducible, so a step that fails again after a rollback is the data's or the model's doing and no glitch:
    it is skipped then, and counted.
    """

    def __init__(self, policy: str, limit: int) -> None:
        assert policy in ("stop", "skip", "rollback"), policy
        self._policy = policy
        self._limit = limit
        self._count = 0
        self._rolled_back: set[int] = set()

    def decide(self, troubles: Sequence[Trouble]) -> str:
        """`go on` or `roll back`, from the troubles of all ranks since the last call.

        Raises:
            TrainingFault: the policy is to stop, or the limit is passed.
        """
        if not troubles:
            return "go on"
        steps = sorted({trouble.step for trouble in troubles})
        self._count += len(steps)
        first = min(troubles, key=lambda trouble: (trouble.step, trouble.what.startswith("a gradient"), trouble.rank))
        said = f"{first.what} at step {first.step} on rank {first.rank}; the weights did not take it in"
        if self._policy == "stop":
            raise TrainingFault(f"{said}. {ADVICE}")
        if self._count > self._limit:
            raise TrainingFault(f"{said}; that is {self._count} such steps, max_nonfinite={self._limit}. {ADVICE}")
        if self._policy == "rollback" and not self._rolled_back.issuperset(steps):
            self._rolled_back.update(steps)
            return "roll back"
        return "go on"


def check_loss_scale(scale: float | None, min_scale: float, step: int) -> None:
    """GradScaler has no floor (pytorch/pytorch#99640): below it a run goes on without learning.

    Raises:
        TrainingFault: the scale is below `min_scale`.
    """
    if scale is not None and scale < min_scale:
        raise TrainingFault(
            f"the loss scale fell to {scale:g} at step {step} (amp.min_scale={min_scale:g}): gradients overflow "
            "fp16 at every scale. Lower optim.lr, add optim.clip_norm or schedule.warmup_epochs, or use precision=bf16"
        )


def check_skipped_share(skipped: int, steps: int) -> None:
    """A run that left out most of its updates did not train, whatever its last loss says.

    Raises:
        TrainingFault: more than half of at least 20 steps were skipped.
    """
    if steps >= 20 and skipped > steps / 2:
        raise TrainingFault(f"{skipped} of {steps} updates were left out for gradients that overflowed. {ADVICE}")


def dry_run(try_step: Callable[[int], object], batch_size: int, device: torch.device) -> None:
    """Run one step before the first epoch, so that a batch that does not fit fails in seconds, with a batch that does.

    The smaller batch is found by trying, not by a formula: what a failed step had allocated says little about what it
    still needed.

    Args:
        try_step: runs one training step on a batch of the given size and leaves the run's state as it was.

    Raises:
        TrainingFault: the batch does not fit.
    """
    try:
        try_step(batch_size)
    except torch.OutOfMemoryError as error:
        facts = oom_message(error, batch_size, device)
    else:
        return
    fits = largest_that_fits(try_step, batch_size, device)
    advice = f"batch_size={fits} was tried and fits" if fits else "not even batch_size=1 fits"
    raise TrainingFault(
        f"{facts} {advice}; accumulate_steps keeps the global batch, data.image_size and precision change the need"
    )


def largest_that_fits(try_step: Callable[[int], object], batch_size: int, device: torch.device) -> int:
    """The largest of batch * 3/4, 1/2, 3/8, 1/4, ... (multiples of 8 where above 8) that can be run; 0 if none."""
    candidates = sorted({_round(batch_size * share * 0.5**halvings) for halvings in range(24) for share in (0.75, 0.5)})
    for candidate in reversed(candidates):
        if not 1 <= candidate < batch_size:
            continue
        if device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            try_step(candidate)
        except torch.OutOfMemoryError:
            continue
        return candidate
    return 0


def _round(size: float) -> int:
    return int(size) // 8 * 8 if size >= 8 else int(size)


def oom_message(error: BaseException, batch_size: int, device: torch.device) -> str:
    """Batch, peak and free memory, in one or two sentences. Also for an out-of-memory error in the middle of a run."""
    said = str(error).splitlines()[0].split(". GPU")[0].rstrip(".")
    if device.type != "cuda":
        return f"batch_size={batch_size} does not fit in memory: {said}."
    free, total = torch.cuda.mem_get_info(device)
    peak = torch.cuda.max_memory_allocated(device)
    gib = 2.0**30
    return (
        f"batch_size={batch_size} does not fit in the memory of {torch.cuda.get_device_name(device)}: {said}. "
        f"This process's peak was {peak / gib:.2f} GiB; {free / gib:.2f} of {total / gib:.2f} GiB are free."
    )
