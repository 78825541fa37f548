"""Every message of torch that means "out of memory", wherever it may appear: the fallback, and the
memory released.
"""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from cl_train.data.device import DeviceFormat
from cl_train.measure import paired
from cl_train.measure.timed_step import Workload
from cl_train.step.make import StepSettings
from cl_train.step.precision import resolve_precision
from cl_train.system.machine import is_out_of_memory
from cl_train.training.build import try_model
from cl_train.training.console import describe_failure
from cl_train.training.state import TrainingFault
from tests import networks
from tests.conftest import Run
from tests.networks import small

CPU = torch.device("cpu")
SETTINGS = StepSettings(resolve_precision("fp32", CPU))
WORKLOAD = Workload(4, (3, 16, 16), SETTINGS, CPU)
FULL = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.1 GiB of"
    " which 5 MiB is free"
)
ERRORS: list[BaseException] = [
    torch.OutOfMemoryError(
        f"{FULL}. Process 7 has 78 GiB memory in use. Of the allocated memory 77 GiB is allocated"
    ),
    torch.AcceleratorError(
        "CUDA error: out of memory\nCUDA kernel errors might be reported at another call"
    ),
    MemoryError(),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("FIND was unable to find an engine to execute this computation"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: 99 bytes"
    ),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 99 bytes."),
]
OTHERS: list[BaseException] = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: no kernel image is available for execution on the device"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
    ValueError("out of memory"),  # of a user's code: not an error of torch
]


def test_each_message_is_understood_and_described_in_one_line() -> None:
    assert str(describe_failure(ERRORS[0])).startswith(f"out of memory: {FULL}. Lower batch_size")
    for error in ERRORS:
        said = describe_failure(error)
        assert is_out_of_memory(error) and said is not None, error
        assert said.startswith("out of memory") and "Lower batch_size" in said and "\n" not in said
    assert [error for error in OTHERS if is_out_of_memory(error)] == []


class Limited(nn.Module):  # the places below share the check: one error is enough
    """Is out of memory above a number of images; remembers its activations weakly."""

    def __init__(self, most: int = 0, *, when: str = "both") -> None:
        super().__init__()
        self.network, self.most, self.when = small(3), most, when
        self.held: list[weakref.ref[torch.Tensor]] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        activations = images * 2
        self.held.append(weakref.ref(activations))
        if len(images) > self.most and self.when in (
            "both",
            "training" if self.training else "evaluation",
        ):
            raise torch.OutOfMemoryError(FULL)
        return torch.as_tensor(self.network(activations))

    def is_released(self) -> bool:
        gc.collect()
        return all(reference() is None for reference in self.held)


@pytest.mark.slow
def test_a_comparison_halves_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired, "BLOCK_S", 0.0)
    model = Limited(most=2)
    found = paired.benchmark_layouts(model, WORKLOAD, target_ci=1.0, time_limit_s=0.0)
    assert found.batch_size == 2 and model.is_released()


def test_the_trial_step_names_the_batch() -> None:
    model = Limited()
    with pytest.raises(
        TrainingFault, match=r"batch_size=2: out of memory.*batch_size=auto"
    ) as caught:
        form = DeviceFormat(CPU, torch.float32, torch.channels_last)
        try_model(model, SETTINGS, form, (2, 3, 16, 16), 3)
    del caught
    assert model.is_released() and all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("when", ["training", "evaluation"])
def test_a_step_or_an_evaluation_ends_the_run_in_one_line(
    train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, when: str
) -> None:
    """Not the trial, which has fewer images here."""
    model = Limited(most=2, when=when)
    monkeypatch.setattr(networks, "small", lambda num_classes: model)
    try:
        train("log_to=[]", folder=tmp_path)
    except torch.OutOfMemoryError as error:
        said = describe_failure(error)
    assert said is not None and said.startswith(f"out of memory: {FULL}") and "\n" not in said
    assert "out of memory" in (tmp_path / "train.log").read_text()
    assert Run(tmp_path, 1).summary["status"] == "failed"
    assert model.is_released()
