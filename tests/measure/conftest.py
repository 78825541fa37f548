import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

from cl_train.measure.paired import Comparison, LayoutSpeed
from cl_train.measure.statistics import Alternation, verdict_of


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path) -> None:
    """Measurements have blocks of one step; auto has a cache of its own."""
    from cl_train.measure import paired

    monkeypatch.setattr(paired, "BLOCK_S", 0.0)
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
    blocks = [[100.0] * 2 * len(ratios), [100.0 / ratio for ratio in ratios for _ in range(2)]]
    done = Alternation(blocks, 15.0, "time_limit")
    sides = zip(("contiguous", "channels_last"), done.speed_ratios(), blocks, strict=True)
    speeds = tuple(
        LayoutSpeed(name, 1.0, 1.0, 0.0, ratio, verdict_of(ratio), tuple(times))
        for name, ratio, times in sides
    )
    return Comparison(speeds, "fp32", 4, 4, done.rounds, 15.0, "time_limit")
