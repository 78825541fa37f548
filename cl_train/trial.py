"""One step on blank images before the first epoch, so that a batch that does not fit fails in seconds."""

from __future__ import annotations

import torch

from cl_train.assembly import Assembly
from cl_train.config import Config
from cl_train.health import dry_run
from cl_train.precision import autocast
from cl_train.run_state import random_state, restore_random_state
from cl_train.step import loss_of


def try_one_step(cfg: Config, assembly: Assembly, num_classes: int) -> None:
    """On a GPU, run forward and backward once on blank images, so that a batch that does not fit fails in seconds.

    Weights, statistics and random numbers are as before. A CPU has no memory of its own to run out of.

    Raises:
        TrainingFault: with a batch size that was tried and fits.
    """
    device = assembly.parts.device
    if device.type == "cuda" and not cfg.evaluate_only:
        channels = 4 if cfg.data.pad_channels else 3
        dry_run(
            lambda size: blank_step(assembly, size, cfg.data.image_size, num_classes, channels), cfg.batch_size, device
        )
        torch.cuda.reset_peak_memory_stats(device)


def blank_step(assembly: Assembly, batch_size: int, image_size: int, num_classes: int, channels: int = 3) -> None:
    """Forward and backward of the bare model on zeros; leaves no trace but memory in torch's cache."""
    model, parts = assembly.model, assembly.parts
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    generators = random_state(parts.device)
    images = torch.zeros(batch_size, channels, image_size, image_size, device=parts.device)
    images = images.to(parts.precision.input_dtype, memory_format=assembly.memory_format)
    try:
        with autocast(parts.precision, parts.device):
            targets = torch.zeros(batch_size, dtype=torch.int64, device=parts.device)
            loss = loss_of(model(images), targets)
        parts.scaler.scale(loss).backward()
    finally:
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        restore_random_state(generators, parts.device)
