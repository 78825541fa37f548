"""Every message of torch that means "out of memory", wherever it may appear: the fallback, and the memory released."""

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from cl_train.comparison import paired
from cl_train.comparison.alternation import alternate
from cl_train.comparison.timed_model import CHANNELS_LAST, CHANNELS_LAST_CONV, CONTIGUOUS, TimedModel, Workload
from cl_train.step.precision import resolve_precision
from cl_train.system.memory import is_out_of_memory
from tests.networks import small

CPU = torch.device("cpu")
ERRORS: list[Callable[[], BaseException]] = [
    lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of"),
    lambda: torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported at another call"),
    lambda: RuntimeError("CUDA driver error: out of memory"),
    lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    lambda: RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    lambda: RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    lambda: RuntimeError("FIND was unable to find an engine to execute this computation"),
    lambda: RuntimeError("Unable to find an engine to execute this computation"),
    lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: 99 bytes"),
    lambda: RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 99 bytes."),
    lambda: MemoryError(),
]
OTHERS: list[Callable[[], BaseException]] = [
    lambda: RuntimeError("shapes do not fit"),
    lambda: RuntimeError("CUDA error: an illegal memory access was encountered"),
    lambda: RuntimeError("CUDA error: no kernel image is available for execution on the device"),
    lambda: RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
    lambda: ValueError("out of memory"),  # of a user's code: not an error of torch
]


@pytest.mark.parametrize("error", ERRORS)
def test_each_message_is_understood(error: Callable[[], BaseException]) -> None:
    assert is_out_of_memory(error())


@pytest.mark.parametrize("error", OTHERS)
def test_other_errors_are_not_out_of_memory(error: Callable[[], BaseException]) -> None:
    assert not is_out_of_memory(error())


@pytest.mark.parametrize("error", ERRORS)
def test_alternation_drops_the_last_variant_and_releases_it(error: Callable[[], BaseException]) -> None:
    """As `paired` calls it: the list of models, and a block of the last one that fails in its fifth step."""
    models = [nn.Linear(2, 2) for _ in range(3)]
    dropped, calls, released = weakref.ref(models[-1]), iter(range(100)), []

    def block(model: nn.Module) -> float:
        if model is models[-1] and len(models) == 3 and next(calls) == 4:
            raise error()
        released.append(dropped() is None)
        return 0.01

    done = alternate((lambda model=model: block(model) for model in models), release_last=models.pop)
    assert len(done.blocks) == len(models) == 2 and done.rounds == 8
    assert released[-1], "the others continue in the memory of the dropped one"


def test_a_comparison_of_layouts_releases_the_dropped_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired, "BLOCK_S", 0.0)
    workload = Workload(4, (3, 16, 16), resolve_precision("fp32", CPU), CPU)
    layouts = (CONTIGUOUS, CHANNELS_LAST, CHANNELS_LAST_CONV)
    timed = [TimedModel(small(3), layout, workload) for layout in layouts]
    dropped = weakref.ref(timed[-1].model)

    def fail(steps: int) -> list[float]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    timed[-1].block_times_s = fail  # type: ignore[method-assign]
    timed[-1].warm_up = lambda: 0.01  # type: ignore[method-assign]
    found = paired._compare(timed, target_ci=1.0, time_limit_s=0.0)
    assert [speed.layout for speed in found.speeds] == ["contiguous", "channels_last"]
    assert dropped() is None
