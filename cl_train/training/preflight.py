"""One forward and backward pass on blank images before the first epoch: a model that cannot train fails in seconds."""

import torch
from torch import nn

from cl_train.comparison.alternation import is_out_of_memory
from cl_train.config.schema import ConfigError
from cl_train.data.batch import DeviceFormat
from cl_train.memory_format.model_call import explain_failure, state_restored
from cl_train.models.copies import copy_model
from cl_train.step.loss import logits_of, loss_of
from cl_train.step.precision import Precision, autocast
from cl_train.training.nonfinite import TrainingFault


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
    """Run forward and backward once on blank images, before `model` is wrapped in DDP, whose hooks would count it.

    On a GPU with the whole batch, to detect that it does not fit. On a CPU with two images, and only for a user's own
    model: zoo models were run on the meta device.

    Raises:
        TrainingFault: the batch does not fit into memory.
        ConfigError: the model cannot take the images, or has fewer outputs than there are classes.
    """
    on_gpu = batch_format.device.type == "cuda"
    if not on_gpu and ":" not in model_name:
        return
    try:
        tried = model if on_gpu else copy_model(model)  # a user's model may count its calls
    except ConfigError:  # an attribute that cannot be copied, such as an open file or a lock
        tried = model
    shape = (batch_size if on_gpu else min(batch_size, 2), 3, image_size, image_size)
    try:
        blank_step(tried, precision, batch_format, shape, num_classes)
    except Exception as error:  # any exception of the user's code
        if is_out_of_memory(error):
            raise TrainingFault(
                f"batch_size={batch_size}: {memory_problem(error, batch_format.device)}. Use a smaller batch_size or "
                "batch_size=auto; accumulate_steps keeps the global batch"
            ) from None
        reason = explain_failure(error)
        raise ConfigError(f"model={model_name} cannot train on {image_size} px images: {reason}") from error
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(batch_format.device)


def blank_step(
    model: nn.Module,
    precision: Precision,
    batch_format: DeviceFormat,
    shape: tuple[int, int, int, int],
    num_classes: int,
) -> None:
    """Forward and backward on zeros; afterwards only torch's memory cache has changed."""
    device = batch_format.device
    images = torch.zeros(shape, device=device).to(batch_format.dtype, memory_format=batch_format.memory_format)
    targets = torch.zeros(shape[0], dtype=torch.int64, device=device)
    with state_restored(model, device):
        with autocast(precision, device):
            output = model(images)
            logits = logits_of(output)
            if logits.ndim != 2 or logits.shape[1] < num_classes:
                shape_found = list(logits.shape)
                raise ValueError(f"outputs of shape {shape_found}; expected [N, classes] for {num_classes} classes")
            loss = loss_of(output, targets)
        loss.backward()


def memory_problem(error: BaseException, device: torch.device) -> str:
    """The text of an out-of-memory error, with the peak and the free memory of a GPU; no full stop at the end."""
    reason = (str(error).splitlines() or [type(error).__name__])[0].split(". GPU")[0].rstrip(".")
    if device.type != "cuda":
        return f"out of memory: {reason}"
    free, total = torch.cuda.mem_get_info(device)
    peak = torch.cuda.max_memory_allocated(device)
    return (
        f"out of memory on {torch.cuda.get_device_name(device)}: {reason}; the peak of this process was "
        f"{peak / 2**30:.2f} GiB, {free / 2**30:.2f} of {total / 2**30:.2f} GiB are free"
    )
