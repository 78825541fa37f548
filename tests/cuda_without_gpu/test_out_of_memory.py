"""Every message of torch that means "out of memory", and what becomes of it."""

import gc
import weakref
from unittest.mock import patch

import pytest
import torch
from torch import nn

from cl_train.data.device import DeviceFormat
from cl_train.step.precision import BY_NAME
from cl_train.step.train_step import StepSettings
from cl_train.system.machine import is_out_of_memory
from cl_train.training import build
from cl_train.training.console import describe_failure
from tests.networks import small

FULL = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.1 GiB of"
    " which 5 MiB is free"
)
ERRORS = [
    torch.OutOfMemoryError(f"{FULL}. Process 7 has 78 GiB memory in use."),
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
    MemoryError(),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("FIND was unable to find an engine to execute this computation"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 99 bytes."),
]
OTHERS = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
    ValueError("out of memory"),  # of a user's code: not an error of torch
]


def test_each_message_is_understood_and_described_in_one_line():
    assert str(describe_failure(ERRORS[0])).startswith(f"out of memory: {FULL}. Lower batch_size")
    for error in ERRORS:
        said = describe_failure(error) or ""
        assert is_out_of_memory(error), error
        assert said.startswith("out of memory") and "Lower batch_size" in said and "\n" not in said
    assert [error for error in OTHERS if is_out_of_memory(error)] == []


class Full(nn.Module):
    """Remembers its activations weakly."""

    def forward(self, images):
        activations = images * 2
        self.held = weakref.ref(activations)
        raise torch.OutOfMemoryError(FULL)


def test_the_memory_of_the_trial_step_is_released():
    model = nn.Sequential(small(3), Full())
    form = DeviceFormat(torch.device("cpu"), torch.float32, torch.channels_last)
    with (
        patch.object(build.models, "copy_model", lambda model: model),
        pytest.raises(torch.OutOfMemoryError),
    ):
        build.try_model(model, StepSettings(BY_NAME["fp32"]), form, (2, 3, 16, 16), 3)
    gc.collect()
    assert model[1].held() is None
