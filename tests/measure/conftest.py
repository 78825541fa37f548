import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

from cl_train.measure.paired import Comparison, LayoutSpeed
from cl_train.measure.statistics import interval_of_rounds, verdict_of


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path) -> None:
    """Measurements have blocks of one step, and the machine for them alone; auto has a cache of
    its own.
    """
    from cl_train.measure import alternate, paired

    monkeypatch.setattr(paired, "BLOCK_S", 0.0)
    monkeypatch.setattr(alternate.MachineLoad, "others_pct", lambda self: 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """The block changes neither the model, its statistics and layout nor a random generator."""
    before = copy.deepcopy(model.state_dict())
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    generators = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    yield
    assert random.getstate() == generators[0]
    assert np.array_equal(np.random.get_state()[1], generators[1])
    assert torch.equal(torch.get_rng_state(), generators[2])
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert all(value.stride() == before[key].stride() for key, value in after.items())
    assert all(parameter.grad is None for parameter in model.parameters()) and model.training


def planted_comparison(ratios: Sequence[float]) -> Comparison:
    """The outcome of a benchmark in whose rounds channels_last was so many times as fast."""
    sides = {"contiguous": [1.0] * len(ratios), "channels_last": ratios}
    intervals = {name: interval_of_rounds(side) for name, side in sides.items()}
    speeds = tuple(
        LayoutSpeed(name, 1.0, 1.0, 0.0, interval, verdict_of(interval))
        for name, interval in intervals.items()
    )
    return Comparison(speeds, "fp32", 4, 4, len(ratios), 15.0, "time_limit")
