"""Memory that is free, and memory that a step needs."""

import pytest
import torch

from cl_train.system.memory import available_bytes, peak_memory_of_step_gib

CPU = torch.device("cpu")


def test_free_memory_is_between_nothing_and_all() -> None:
    free = available_bytes(CPU)
    assert free is not None and 0 < free < 2**50


def test_peak_memory_of_a_known_allocation() -> None:
    def step() -> None:
        first = torch.empty(2**22)  # 16 MiB
        del first
        torch.empty(2**21)

    assert peak_memory_of_step_gib(step, 2**30, 0, CPU) == pytest.approx(1 + 16 / 1024, rel=1e-3)
