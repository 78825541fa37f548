"""One forward and backward pass on noise before the first epoch: a model that cannot train fails in seconds."""

import torch
from torch import nn

from cl_train.config.schema import ConfigError
from cl_train.data.batch import DeviceFormat
from cl_train.memory_format.model_call import explain_failure, state_restored
from cl_train.models.sources import copy_model
from cl_train.step.loss import logits_of, loss_of
from cl_train.step.precision import Precision, autocast
from cl_train.system.memory import describe_out_of_memory, is_out_of_memory
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
    compiled: bool,
) -> None:
    """Run forward and backward once on noise, before `model` is wrapped in DDP, whose hooks would count it.

    On a GPU with the whole batch, to detect that it does not fit; with two images if the model will be `compiled`,
    which takes less memory than this eager pass. On a CPU with two images, and only for a user's own model: zoo models
    were run on the meta device.

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
    images = batch_size if on_gpu and not compiled else min(batch_size, 2)
    shape = (images, 3, image_size, image_size)
    try:
        trial_step(tried, precision, batch_format, shape, num_classes)
    except Exception as error:  # any exception of the user's code
        if is_out_of_memory(error):
            raise TrainingFault(
                f"batch_size={batch_size}: {describe_out_of_memory(error)}. Use a smaller batch_size or "
                "batch_size=auto; accumulate_steps keeps the global batch"
            ) from None
        reason = explain_failure(error)
        raise ConfigError(f"model={model_name} cannot train on {image_size} px images: {reason}") from error
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(batch_format.device)


def trial_step(
    model: nn.Module,
    precision: Precision,
    batch_format: DeviceFormat,
    shape: tuple[int, int, int, int],
    num_classes: int,
) -> None:
    """Forward and backward on noise; afterwards only torch's caches have changed.

    cuDNN times its algorithms here, and training uses its choice: zeros would be faster than images.
    """
    device = batch_format.device
    with state_restored(model, device):
        images = torch.randn(shape, device=device).to(batch_format.dtype, memory_format=batch_format.memory_format)
        targets = torch.randint(num_classes, (shape[0],), device=device)
        with autocast(precision, device):
            output = model(images)
            logits = logits_of(output)
            if logits.ndim != 2 or logits.shape[1] < num_classes:
                shape_found = list(logits.shape)
                raise ValueError(f"outputs of shape {shape_found}; expected [N, classes] for {num_classes} classes")
            loss = loss_of(output, targets)
        loss.backward()
