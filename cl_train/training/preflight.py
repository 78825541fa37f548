"""One forward and backward pass on noise before the first epoch: a model that cannot train fails in seconds."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import nn

from cl_train.config.schema import ConfigError
from cl_train.data.device import DeviceFormat
from cl_train.memory_format.crashes import crash_safe
from cl_train.memory_format.model_call import explain_failure, state_restored
from cl_train.step.loss import logits_of, loss_of
from cl_train.step.precision import Precision, autocast
from cl_train.system.machine import describe_out_of_memory, is_out_of_memory
from cl_train.training.progress import TrainingFault


def check_batch_fits(
    model: nn.Module,
    precision: Precision,
    batch_format: DeviceFormat,
    *,
    batch_size: int,
    image_size: int,
    num_classes: int,
    compiled: bool,
) -> None:
    """On a GPU, train the whole batch once, before `model` is wrapped in DDP, whose hooks would count it.

    With two images if the model will be `compiled`, which takes less memory than this eager pass.

    Raises:
        TrainingFault: the batch does not fit into memory.
        ConfigError: as `check_runs`.
    """
    if batch_format.device.type == "cuda":
        shape = (min(batch_size, 2) if compiled else batch_size, 3, image_size, image_size)
        with _failures_explained(batch_size, image_size):
            trial_step(model, precision, batch_format, shape, num_classes)
        torch.cuda.reset_peak_memory_stats(batch_format.device)


@crash_safe
def check_runs(
    model: nn.Module,
    precision: Precision,
    batch_format: DeviceFormat,
    *,
    image_size: int,
    num_classes: int,
    training: bool,
    evaluation: bool,
) -> None:
    """Train and evaluate two images in a forked process, because a kernel that crashes would end this one.

    Raises:
        Crash: the process was killed; the message names the module.
        ConfigError: the model cannot take the images, or has fewer outputs than there are classes.
    """
    shape, device = (2, 3, image_size, image_size), batch_format.device
    if training:
        with _failures_explained(2, image_size):
            trial_step(model, precision, batch_format, shape, num_classes)
    if evaluation:
        was_training = model.training
        # Only crashes matter: what else can fail in evaluation is told there.
        with state_restored(model, device), suppress(Exception), torch.no_grad(), autocast(precision, device):
            model.eval()(_noise(shape, batch_format))
        model.train(was_training)


@contextmanager
def _failures_explained(batch_size: int, image_size: int) -> Iterator[None]:
    """Turn any exception of the model, the user's code, into a TrainingFault, if memory ran out, or a ConfigError."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise TrainingFault(
                f"batch_size={batch_size}: {describe_out_of_memory(error)}. Use a smaller batch_size or "
                "batch_size=auto; accumulate_steps keeps the global batch"
            ) from None
        raise ConfigError(f"the model cannot train on {image_size} px images: {explain_failure(error)}") from error


def trial_step(
    model: nn.Module,
    precision: Precision,
    batch_format: DeviceFormat,
    shape: tuple[int, int, int, int],
    num_classes: int,
) -> None:
    """Forward and backward on noise; afterwards only torch's caches have changed."""
    device = batch_format.device
    with state_restored(model, device):
        images = _noise(shape, batch_format)
        targets = torch.randint(num_classes, (shape[0],), device=device)
        with autocast(precision, device):
            output = model(images)
            logits = logits_of(output)
            if logits.ndim != 2 or logits.shape[1] < num_classes:
                shape_found = list(logits.shape)
                raise ValueError(f"outputs of shape {shape_found}; expected [N, classes] for {num_classes} classes")
            loss = loss_of(output, targets)
        loss.backward()


def _noise(shape: tuple[int, ...], batch_format: DeviceFormat) -> torch.Tensor:
    """cuDNN times its algorithms on it, and training uses its choice: zeros would be faster than images."""
    noise = torch.randn(shape, device=batch_format.device)
    return noise.to(batch_format.dtype, memory_format=batch_format.memory_format)
