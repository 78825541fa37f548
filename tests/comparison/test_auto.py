"""channels_last=auto: chooses the layout that is faster beyond noise, caches it, and does not change the run."""

import copy
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cl_train.comparison import auto
from cl_train.comparison.auto import Choice, choose_memory_format
from cl_train.comparison.paired import Comparison, LayoutSpeed
from cl_train.comparison.statistics import Interval, verdict_of
from cl_train.comparison.timed_model import CHANNELS_LAST, CHANNELS_LAST_CONV, CONTIGUOUS, Workload
from cl_train.config.schema import ConfigError
from cl_train.step.precision import resolve_precision

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "cl_train"


def network(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, width, 3),
        nn.BatchNorm2d(width),
        nn.Dropout(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 5),
    )


def choose(model: nn.Module, **changes: Any) -> Choice:
    settings: dict[str, Any] = {"image_size": 16, "batch_size": 4, "precision": "fp32", "time_limit_s": 0.1}
    return choose_memory_format(model, **(settings | changes))


def measured(ratio: float, half: float) -> Comparison:
    """The outcome of a benchmark."""
    speeds = []
    for layout, interval in (
        (CONTIGUOUS, Interval(1, 1, 1, 5)),
        (CHANNELS_LAST, Interval(ratio, ratio - half, ratio + half, 5)),
    ):
        speeds.append(LayoutSpeed(layout.name, 100 * interval.ratio, 1.0, 0.1, interval, verdict_of(interval)))
    return Comparison(tuple(speeds), "fp32", 4, 4, 5, 1.0, "target_ci")


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces the measurement: `result` is its result, `calls` the number of calls."""
    state: dict[str, Any] = {"result": measured(1.5, 0.01), "calls": 0}

    def benchmark_layouts(*args: Any, **kwargs: Any) -> Comparison:
        state["calls"] += 1
        if isinstance(state["result"], Exception):
            raise state["result"]
        return state["result"]

    monkeypatch.setattr(auto, "benchmark_layouts", benchmark_layouts)
    monkeypatch.setattr(auto, "release_memory", lambda: None)
    return state


def test_the_run_is_left_as_it_was() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    generators = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    choice = choose(model)
    assert not choice.cached and choice.seconds > 0
    assert random.getstate() == generators[0]
    assert np.array_equal(np.random.get_state()[1], generators[1])
    assert torch.equal(torch.get_rng_state(), generators[2])
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items()), "weights and statistics"
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model[0].weight.requires_grad and model.training
    assert [parameter.stride() for parameter in model.parameters()] == [p.stride() for p in network().parameters()]


@pytest.mark.parametrize(
    ("ratio", "half", "channels_last"),
    [(1.5, 0.01, True), (0.8, 0.01, False), (1.02, 0.03, False), (1.004, 0.001, False)],
)
def test_the_faster_one_beyond_noise_and_contiguous_on_a_tie(
    outcome: dict[str, Any], ratio: float, half: float, channels_last: bool
) -> None:
    outcome["result"] = measured(ratio, half)
    choice = choose(network())
    assert (choice.channels_last, choice.conversion) == (channels_last, "full")
    assert f"channels_last is {ratio:.2f}x" in choice.reason
    assert choice.reason.startswith("channels_last" if channels_last else "contiguous")


def test_a_choice_is_measured_once(outcome: dict[str, Any], cache: Path) -> None:
    first, second = choose(network()), choose(network())
    assert outcome["calls"] == 1
    assert second.cached and second.channels_last == first.channels_last
    assert str(cache) in second.reason


@pytest.mark.parametrize(
    "change",
    [{"batch_size": 8}, {"image_size": 32}, {"image_size": (3, 16, 24)}, {"precision": "bf16"}, {"compile": True},
     {"cuda_graph": True}, {"optimizer": "adamw"}],
)  # fmt: skip
def test_what_could_change_the_answer_is_measured_anew(outcome: dict[str, Any], change: dict[str, Any]) -> None:
    choose(network())
    assert not choose(network(), **change).cached
    assert not choose(network(width=16)).cached, "other shapes under the same name"
    assert not choose(nn.Sequential(*network(), nn.ReLU())).cached, "other modules of the same shapes"
    assert choose(network()).cached


def test_a_damaged_cache_is_measured_over(outcome: dict[str, Any], cache: Path) -> None:
    choose(network())
    [path] = cache.iterdir()
    path.write_text('{"key": ')
    assert not choose(network()).cached
    assert json.loads(path.read_text())["channels_last"] is True


def test_an_inconclusive_measurement_is_not_cached(outcome: dict[str, Any], cache: Path) -> None:
    outcome["result"] = measured(1.1, 0.6)
    assert "too noisy" in choose(network()).reason
    assert not cache.exists() or not list(cache.iterdir())


def test_an_unwritable_cache_does_not_stop_the_run(
    outcome: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    assert choose(network()).channels_last
    assert "cannot be cached" in caplog.text


def test_what_cannot_be_measured_means_contiguous_and_is_said(outcome: dict[str, Any], cache: Path) -> None:
    outcome["result"] = ConfigError("a batch of 1 does not fit into the memory of cpu")
    choice = choose(network())
    assert not choice.channels_last and "does not fit" in choice.reason
    assert not choose(network()).cached, "the next run tries again"


@pytest.mark.parametrize(
    ("change", "problem"), [({"optimizer": "sdg"}, "did you mean sgd"), ({"precision": "fp61"}, "did you mean fp16")]
)
def test_wrong_arguments_are_refused(outcome: dict[str, Any], change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        choose(network(), **change)
    assert outcome["calls"] == 0


def test_a_choice_becomes_json(outcome: dict[str, Any]) -> None:
    values = json.loads(json.dumps(choose(network()).to_dict()))
    assert (values["memory_format"], values["conversion"], values["cached"]) == ("channels_last", "full", False)


def test_the_cuda_graph_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def benchmark_layouts(model: nn.Module, workload: Any, *args: Any, **kwargs: Any) -> Comparison:
        seen.append(workload.cuda_graph)
        return measured(1.5, 0.01)

    monkeypatch.setattr(auto, "benchmark_layouts", benchmark_layouts)
    choose(network(), cuda_graph=True)
    assert seen and all(seen)


def test_without_convolutions_there_is_nothing_to_measure(outcome: dict[str, Any]) -> None:
    choice = choose(nn.Sequential(nn.Flatten(), nn.Linear(768, 5)))
    assert not choice.channels_last and "no convolutions" in choice.reason
    assert outcome["calls"] == 0


def test_convolution_weights_alone_are_measured_where_they_differ() -> None:
    class WithPlane(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = network()
            self.plane = nn.Parameter(torch.zeros(1, 3, 16, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x + self.plane)

    workload = Workload(4, (3, 16, 16), resolve_precision("fp32", CPU), CPU)
    assert auto._layouts(WithPlane(), workload) == [CONTIGUOUS, CHANNELS_LAST, CHANNELS_LAST_CONV]
    assert auto._layouts(network(), workload) == [CONTIGUOUS, CHANNELS_LAST]
    assert auto._layouts(WithPlane(), replace(workload, compile=True)) == [CONTIGUOUS, CHANNELS_LAST]
