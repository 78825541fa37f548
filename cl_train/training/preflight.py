"""One step on blank images before the first epoch: what cannot train fails in seconds, with one message."""

from __future__ import annotations

import copy
import dataclasses
import traceback

import torch

from cl_train.config.schema import Config, ConfigError
from cl_train.step.precision import autocast
from cl_train.step.train_step import logits_of, loss_of
from cl_train.training.nonfinite import TrainingFault, dry_run
from cl_train.training.run_state import random_state, restore_random_state
from cl_train.training.setup import Assembly


def try_one_step(cfg: Config, assembly: Assembly, num_classes: int) -> None:
    """Run forward and backward once on blank images; weights, statistics and random numbers are as before.

    On a GPU with the whole batch, so that one that does not fit fails in seconds. On a CPU, which has no memory of its
    own to run out of, two images do, and only for a user's own model: the zoo's are tried on shapes alone.

    Raises:
        TrainingFault: with a batch size that was tried and fits.
        ConfigError: the model cannot take the images, or has fewer outputs than there are classes.
    """
    device = assembly.parts.device
    is_own = ":" in cfg.model
    if cfg.evaluate_only or not (device.type == "cuda" or is_own):
        return

    def step(batch_size: int) -> None:
        blank_step(assembly, batch_size, cfg.data.image_size, num_classes)

    try:
        if device.type == "cuda":
            dry_run(step, cfg.batch_size, device)
            torch.cuda.reset_peak_memory_stats(device)
        else:
            twin = _twin(assembly)
            if twin is not None:
                blank_step(twin, min(cfg.batch_size, 2), cfg.data.image_size, num_classes)
    except (TrainingFault, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever the user's own code raises
        raise ConfigError(
            f"model={cfg.model} cannot train on {cfg.data.image_size} px images: {type(error).__name__}: {error} "
            f"({_place(error)})"
        ) from error


def _twin(assembly: Assembly) -> Assembly | None:
    """With a copy of the model, as one's own may keep count of its calls; None where it cannot be copied."""
    try:
        return dataclasses.replace(assembly, model=copy.deepcopy(assembly.model))
    except Exception:  # tensors that are results, handles of files, locks: the run needs no copy
        return None


def _place(error: BaseException) -> str:
    """The last line of Python that is not torch's."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno}"


def blank_step(assembly: Assembly, batch_size: int, image_size: int, num_classes: int) -> None:
    """Forward and backward of the bare model on zeros; leaves no trace but memory in torch's cache."""
    model, parts = assembly.model, assembly.parts
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    generators = random_state(parts.device)
    images = torch.zeros(batch_size, 3, image_size, image_size, device=parts.device)
    images = images.to(parts.precision.input_dtype, memory_format=assembly.memory_format)
    try:
        with autocast(parts.precision, parts.device):
            targets = torch.zeros(batch_size, dtype=torch.int64, device=parts.device)
            output = model(images)
            outputs = logits_of(output).shape[1]
            if outputs < num_classes:
                raise ValueError(f"{outputs} outputs for {num_classes} classes")
            loss = loss_of(output, targets)
        parts.scaler.scale(loss).backward()
    finally:
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        restore_random_state(generators, parts.device)
