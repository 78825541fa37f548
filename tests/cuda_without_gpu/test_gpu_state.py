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

USUAL = "1980, 1980, 45, 612.30, 0x0000000000000000"
SLOWED = "1005, 1980, 87, 500.00, 0x0000000000000040"


def state_of(state: str | None, pids: str | None = "7") -> dict[str, Any] | None:
    def answer(command: list[str]) -> str | None:
        assert command[:2] == ["nvidia-smi", "--id=GPU-0a"]
        return pids if "compute-apps" in command[2] else state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "_output_of", answer)
        properties = SimpleNamespace(uuid="0a")
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return gpu_state(CUDA)


@pytest.mark.parametrize(
    ("state", "pids", "problem"),
    [
        (USUAL, "7", None),
        ("1400, 1980, 60, 700.00, 0x4", "", None),  # its power limit is usual
        (SLOWED, "7", "slowed the GPU to 1005 MHz"),
        (USUAL, "7\n8\n9", "2 other processes"),
        ("[N/A], 1980, 45, 612.30, 0x0", "7", None),
        (None, None, None),
    ],
)
def test_heat_and_other_processes_are_problems(
    state: str | None, pids: str | None, problem: str | None
) -> None:
    found = state_of(state, pids)
    assert (found is None) == (state is None or "N/A" in state)
    assert (problem or "None") in str(problem_of_gpu(found))
    assert gpu_state(torch.device("cpu")) is None


def test_a_shared_gpu_makes_a_comparison_untrusted(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = state_of(USUAL, "7\n8")
    monkeypatch.setattr(paired, "gpu_state", lambda device: shared)
    done = paired.compare_layouts(small(3), 4, image_size=16, target_ci=9.0, time_limit_s=0.0)
    assert done.verdict == "not_comparable" and "1 other processes used the GPU" in str(done)
    assert done.to_dict()["gpu"]["clock_mhz"] == 1980


def test_a_run_records_it_and_its_first_step(
    train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    slowed = state_of(SLOWED)
    monkeypatch.setattr(loop, "gpu_state", lambda device: slowed)
    run = train("log_to=[]", "epochs=1")
    assert run.summary["gpu"]["is_slowed"] and run.summary["reserved_memory_gib"] is None
    assert run.summary["first_step_s"] >= 0
    runs = [read_run(run.folder)]
    obstacles = list(verdict._obstacles(runs, runs, "channels_last", ("a", "b")))
    assert any("slowed the GPU" in obstacle for obstacle in obstacles)
