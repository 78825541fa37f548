"""One forward and backward pass on blank images before the first epoch: a model that cannot train fails in seconds."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable

import torch
from torch import nn

from cl_train.config.schema import ConfigError
from cl_train.data.batch import DeviceFormat
from cl_train.step.precision import Precision, autocast
from cl_train.step.train_step import logits_of, loss_of
from cl_train.training.nonfinite import TrainingFault
from cl_train.training.run_state import random_state, restore_random_state


def check_model_trains(
    model: nn.Module,
    precision: Precision,
    batch_format: DeviceFormat,
    *,
    model_name: str,
    batch_size: int,
    image_size: int,
    num_classes: int,
) -> None:
    """Run forward and backward once on blank images. Call it before `model` is wrapped in DDP, whose hooks would count
    the pass. Weights, statistics and random numbers stay as they are.

    On a GPU with the whole batch, to find one that does not fit. On a CPU with two images, and for a user's own model
    only: models of the zoo have been run on the meta device.

    Raises:
        TrainingFault: the batch does not fit; the message has a size that does.
        ConfigError: the model cannot take the images, or has fewer outputs than there are classes.
    """
    on_gpu = batch_format.device.type == "cuda"
    if not on_gpu and ":" not in model_name:
        return

    def try_step(model: nn.Module, batch_size: int) -> None:
        blank_step(model, precision, batch_format, (batch_size, 3, image_size, image_size), num_classes)

    try:
        if on_gpu:
            check_batch_fits(lambda size: try_step(model, size), batch_size, batch_format.device)
            torch.cuda.reset_peak_memory_stats(batch_format.device)
            return
        try:
            copied = copy.deepcopy(model)  # a user's model may count its calls
        except Exception:  # it holds tensors with a gradient, open files or locks; it is not checked
            return
        try_step(copied, min(batch_size, 2))
    except (TrainingFault, torch.OutOfMemoryError):
        raise
    except Exception as error:  # any exception of the user's code
        raise ConfigError(
            f"model={model_name} cannot train on {image_size} px images: {type(error).__name__}: {error} "
            f"({_last_line_outside_torch(error)})"
        ) from error


def _last_line_outside_torch(error: Exception) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno}"


def blank_step(
    model: nn.Module,
    precision: Precision,
    batch_format: DeviceFormat,
    shape: tuple[int, int, int, int],
    num_classes: int,
) -> None:
    """Forward and backward on zeros; afterwards only torch's memory cache has changed."""
    device = batch_format.device
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    generators = random_state(device)
    images = torch.zeros(shape, device=device).to(batch_format.dtype, memory_format=batch_format.memory_format)
    targets = torch.zeros(shape[0], dtype=torch.int64, device=device)
    try:
        with autocast(precision, device):
            output = model(images)
            outputs = logits_of(output).shape[1]
            if outputs < num_classes:
                raise ValueError(f"{outputs} outputs for {num_classes} classes")
            loss = loss_of(output, targets)
        loss.backward()
    finally:
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        restore_random_state(generators, device)


def check_batch_fits(try_step: Callable[[int], object], batch_size: int, device: torch.device) -> None:
    """Run one step, and if it does not fit, find a batch size that does by trying.

    Args:
        try_step: runs one step on a batch of the given size and leaves the run's state as it was.

    Raises:
        TrainingFault: the batch does not fit.
    """
    try:
        try_step(batch_size)
        return
    except torch.OutOfMemoryError as error:
        problem = memory_problem(error, device)
    fits = largest_that_fits(try_step, batch_size, device)
    advice = f"batch_size={fits} was tried and fits" if fits else "not even batch_size=1 fits"
    raise TrainingFault(
        f"batch_size={batch_size}: {problem}. {advice}; accumulate_steps keeps the global batch, and a smaller "
        "data.image_size or another precision needs less"
    )


def largest_that_fits(try_step: Callable[[int], object], batch_size: int, device: torch.device) -> int:
    """The largest of batch * 3/4, 1/2, 3/8, 1/4, ... (multiples of 8 from 8 on) that can be run; 0 if none."""
    shares = (share * 0.5**halvings for halvings in range(24) for share in (0.75, 0.5))
    sizes = {int(batch_size * share) // 8 * 8 or int(batch_size * share) for share in shares}
    for size in sorted(sizes & set(range(1, batch_size)), reverse=True):
        if device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            try_step(size)
        except torch.OutOfMemoryError:
            continue
        return size
    return 0


def memory_problem(error: BaseException, device: torch.device) -> str:
    """What an out-of-memory error says, with the peak and the free memory of a GPU; no full stop at the end."""
    reason = (str(error).splitlines() or [type(error).__name__])[0].split(". GPU")[0].rstrip(".")
    if device.type != "cuda":
        return f"out of memory: {reason}"
    free, total = torch.cuda.mem_get_info(device)
    peak = torch.cuda.max_memory_allocated(device)
    return (
        f"out of memory on {torch.cuda.get_device_name(device)}: {reason}; the peak of this process was "
        f"{peak / 2**30:.2f} GiB, {free / 2**30:.2f} of {total / 2**30:.2f} GiB are free"
    )
