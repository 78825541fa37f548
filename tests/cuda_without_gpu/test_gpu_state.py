"""What nvidia-smi says of a GPU, and what becomes of it: records, and verdicts that are refused."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cl_train.measure import paired
from cl_train.sweeps import verdict
from cl_train.sweeps.runs import read_run
from cl_train.system import machine
from cl_train.system.machine import gpu_state, problem_of_gpu
from cl_train.training import loop
from tests.conftest import Run
from tests.cuda_without_gpu.fake_cuda import CUDA
from tests.networks import small

CPU = torch.device("cpu")


def state_of(
    monkeypatch: pytest.MonkeyPatch, state: str | None, pids: str | None = "7"
) -> dict[str, Any] | None:
    def answer(command: list[str]) -> str | None:
        assert command[:2] == ["nvidia-smi", "--id=GPU-0a"]
        return pids if "compute-apps" in command[2] else state

    properties = SimpleNamespace(uuid="0a")
    with monkeypatch.context() as patch:
        patch.setattr(machine, "_output_of", answer)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return gpu_state(CUDA)


@pytest.mark.parametrize(
    ("state", "pids", "problem"),
    [
        ("1980, 1980, 45, 612.30, 0x0000000000000000", "7", None),
        ("1400, 1980, 60, 700.00, 0x0000000000000004", "", None),  # its power limit is usual
        ("1005, 1980, 87, 500.00, 0x0000000000000040", "7", "slowed the GPU to 1005 MHz"),
        ("1980, 1980, 45, 612.30, 0x0000000000000000", "7\n8\n9", "2 other processes"),
        ("[N/A], 1980, 45, 612.30, 0x0000000000000000", "7", None),
        (None, None, None),
    ],
)
def test_heat_and_other_processes_are_problems(
    state: str | None, pids: str | None, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = state_of(monkeypatch, state, pids)
    assert (found is None) == (state is None or "N/A" in state) and gpu_state(CPU) is None
    assert (problem or "None") in str(problem_of_gpu(found))


def test_a_shared_gpu_makes_a_comparison_untrusted(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = state_of(monkeypatch, "1980, 1980, 45, 612.30, 0x0", "7\n8")
    monkeypatch.setattr(paired, "gpu_state", lambda device: shared)
    done = paired.compare_layouts(small(3), 4, image_size=16, target_ci=9.0, time_limit_s=0.0)
    assert done.verdict == "not_comparable" and "1 other processes used the GPU" in str(done)
    assert done.to_dict()["gpu"]["clock_mhz"] == 1980


def test_a_run_records_it_and_its_first_step(
    train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    slowed = state_of(monkeypatch, "1005, 1980, 87, 500.00, 0x40")
    monkeypatch.setattr(loop, "gpu_state", lambda device: slowed)
    run = train("log_to=[]", "epochs=1")
    summary = run.summary
    assert summary["first_step_s"] >= 0
    assert summary["gpu"]["is_slowed"] and summary["reserved_memory_gib"] is None
    runs = [read_run(run.folder)] * 2
    obstacles = list(verdict._obstacles(*([each] for each in runs), "channels_last", ("a", "b")))
    assert any("slowed the GPU" in obstacle for obstacle in obstacles)
