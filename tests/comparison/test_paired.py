"""Comparing the layouts of a small model, and channels_last=auto: measurement, report, cache, refusals."""

import copy
import json
import math
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from cl_train.comparison import paired
from cl_train.comparison.paired import CHANNELS_LAST, CONTIGUOUS, Choice, TimedModel, benchmark_layouts, compare_layouts
from cl_train.comparison.statistics import Interval, alternate, verdict_of
from cl_train.config.schema import ConfigError
from cl_train.memory_format import crashes, operator_times
from cl_train.memory_format.layout import classify, model_memory_format
from cl_train.step.precision import resolve_precision
from tests.comparison.conftest import unchanged

CPU = torch.device("cpu")
QUICK: dict[str, Any] = {"target_ci": 0.5, "time_limit_s": 0.0}


def network(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout())
    return nn.Sequential(*stem, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5))


def workload(precision: str = "fp32", **changes: Any) -> paired.Workload:
    return replace(paired.Workload(4, (3, 16, 16), resolve_precision(precision, CPU), CPU), **changes)


def test_blocks_alternate_until_the_interval_is_narrow_or_time_is_over() -> None:
    blocks = Mock(**{"a.return_value": 0.02, "b.return_value": 0.01})
    done = alternate([blocks.a, blocks.b])
    assert [name for name, *_ in blocks.mock_calls] == ["a", "b", "b", "a"] * 8
    assert (done.rounds, done.stopped_by, done.blocks[1]) == (8, "target_ci", [0.01] * 16)
    assert [ratio.ratio for ratio in done.speed_ratios()] == pytest.approx([1.0, 2.0])
    done = alternate([Mock(side_effect=[1.0, 1.0, 5.0, 1.0]), lambda: 1.0], time_limit_s=0.0)
    assert (done.rounds, done.stopped_by) == (2, "time_limit")
    slower = iter(0.01 * 1.01**n for n in range(1000))  # by 1 % from block to block: cancels within a round
    done = alternate([lambda: next(slower)] * 3)
    assert [ratio.ratio for ratio in done.speed_ratios()] == pytest.approx([1.0] * 3)
    assert done.round_ratios(2) == pytest.approx([1.0] * done.rounds)


@pytest.mark.slow
def test_equal_blocks_are_rarely_called_different() -> None:
    """Heavy-tailed noise; stopping as soon as the interval is narrow costs about 1 % of false verdicts."""
    for noise in (0.01, 0.015):
        rng = np.random.default_rng(0)
        blocks = [lambda: 0.01 * math.exp(noise * rng.standard_t(4))] * 2  # noqa: B023
        ratios = [alternate(blocks, time_limit_s=math.inf).speed_ratios()[1] for _ in range(300)]
        assert sum(verdict_of(ratio) in ("faster", "slower") for ratio in ratios) <= 24


def test_both_sides_have_the_same_weights_and_images_in_their_layout() -> None:
    plain, converted = (TimedModel(network(), layout, workload()) for layout in (CONTIGUOUS, CHANNELS_LAST))
    assert plain._batch is not None and converted._batch is not None
    for one, other in ((plain.inputs, converted.inputs), (plain._batch.targets, converted._batch.targets)):
        assert torch.equal(one, other)
    assert (plain.inputs.stride(), converted.inputs.stride()) == ((768, 256, 16, 1), (768, 1, 48, 3))
    assert [model_memory_format(side.model) for side in (plain, converted)] == ["contiguous", "channels_last"]
    assert all(torch.equal(a, b) for a, b in zip(plain.model.parameters(), converted.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("precision", "changes"),
    [("fp32", {}), ("fp16", {}), ("fp32", {"loss": lambda out: out.square().mean()}), ("fp32", {"cuda_graph": True})],
)
def test_a_training_step_trains_and_an_inference_does_not(precision: str, changes: dict[str, Any]) -> None:
    for mode, trains in (("train", True), ("infer", False)):
        timed = TimedModel(network(), CHANNELS_LAST, workload(precision, mode=mode, **changes))
        before = copy.deepcopy(timed.model.state_dict())
        timed.warm_up()
        after = timed.model.state_dict()
        assert any(not torch.equal(after[key], before[key]) for key in before) is trains
        assert bool(getattr(timed.step, "replay", None)) is timed.workload.cuda_graph
        assert timed._parts is None or timed._parts.scaler.is_enabled() is (precision == "fp16")


@pytest.mark.parametrize(
    ("precision", "mode"), [("fp32", "train"), ("bf16", "infer"), ("fp16", "train"), ("fp16_o2", "train")]
)
def test_the_model_and_the_generators_stay_as_they_are(precision: str, mode: str) -> None:
    model = network()
    with unchanged(model):
        done = benchmark_layouts(model, workload(precision, mode=mode), **QUICK)
    assert [speed.layout for speed in done.speeds] == ["contiguous", "channels_last"]
    assert all(speed.images_per_s > 0 and speed.peak_memory_gib > 0 for speed in done.speeds)


def test_a_comparison_prints_and_becomes_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired.MachineLoad, "others_pct", lambda self: 60.0)
    done = compare_layouts(network(), 4, image_size=16, target_ci=5.0, time_limit_s=0.1)
    [pair] = json.loads(json.dumps(done.to_dict(), allow_nan=False))["pairs"]
    assert pair["candidate"] == "channels_last" and pair["ratio"] == pytest.approx(done.ratio.ratio, abs=1e-3)
    assert done.ratio.ratio == pytest.approx(done.speeds[1].images_per_s / done.speeds[0].images_per_s)
    assert done.verdict == pair["verdict"] == "not_comparable", "on a busy machine"
    assert "60 %" in str(done) and "images/s" in str(done)


@pytest.mark.slow
def test_out_of_memory_halves_the_batch_of_all_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the rounds, after a warm-up that fitted."""
    sizes: list[int] = []

    def block_times_s(self: TimedModel, steps: int) -> list[float]:
        sizes.append(len(self.inputs))
        if self.layout is CHANNELS_LAST and (sizes[-1] > 4 or (sizes[-1] > 2 and sizes.count(4) > 6)):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")
        return [0.01]

    monkeypatch.setattr(TimedModel, "block_times_s", block_times_s)
    monkeypatch.setattr(crashes, "_is_child", True)  # `sizes` would stay in the child
    done = benchmark_layouts(network(), workload(batch_size=8), **QUICK)
    assert (done.batch_size, done.batch_size_requested) == (2, 8)
    assert sizes.count(4) == 7 and set(sizes[-8:]) == {2}, "both layouts"
    with pytest.raises(ConfigError, match="a batch of 5"):
        benchmark_layouts(network(), workload(batch_size=5, batch=torch.randn(5, 3, 16, 16)), **QUICK)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"image_size": (5, 16, 16)}, "expected input"),
        ({"mode": "trian"}, "mode"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"model": "resnet18"}, r"torch\.nn\.Module"),
        ({"precision": "fp61"}, "precision=fp61; use .*did you mean fp16"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as error:
        compare_layouts(**{"model": network(), "batch_size": 4, **arguments})
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.slow
def test_compiled_copies_of_three_layouts_are_measured_against_the_first(without_inductor: None) -> None:
    layouts = (CONTIGUOUS, CHANNELS_LAST, paired.CHANNELS_LAST_CONV)
    done = benchmark_layouts(network(), workload(compile=True), layouts, **QUICK)
    assert [pair["baseline"] for pair in done.to_dict()["pairs"]] == ["contiguous"] * 2
    assert done.speeds[2].layout == "channels_last_conv" and done.speeds[2].images_per_s > 0


def choose(model: nn.Module, **changes: Any) -> Choice:
    settings: dict[str, Any] = {"image_size": 16, "batch_size": 4, "precision": "fp32", "time_limit_s": 0.1}
    return paired.choose_memory_format(model, **(settings | changes))


def measured(ratio: float, half: float) -> paired.Comparison:
    """The outcome of a benchmark."""
    intervals = {"contiguous": Interval(1, 1, 1, 5), "channels_last": Interval(ratio, ratio - half, ratio + half, 5)}
    speeds = [(name, 100 * one.ratio, 1.0, 0.1, one, verdict_of(one)) for name, one in intervals.items()]
    return paired.Comparison(tuple(paired.LayoutSpeed(*one) for one in speeds), "fp32", 4, 4, 5, 1.0, "target_ci")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Replaces the measurement."""
    monkeypatch.setattr(paired, "benchmark_layouts", replaced := Mock(return_value=measured(1.5, 0.01)))
    monkeypatch.setattr(paired, "_mixed_layout", lambda *_: None)
    monkeypatch.setattr(paired, "release_memory", lambda: None)
    return replaced


class Sleepy(nn.Conv2d):
    """Takes longer in the layout `slow`."""

    slow, seconds = "channels_last", 0.02

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds if classify(x) == self.slow else 0.0)
        return super().forward(x)


class SleepyContiguous(Sleepy):
    slow = "contiguous"


@pytest.mark.slow
def test_a_convolution_that_is_slow_in_channels_last_alone_is_left_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rounds decide: the planted sleeps are long, so that a busy machine needs no more of them."""
    monkeypatch.setattr(paired.MachineLoad, "others_pct", lambda self: 0.0)
    monkeypatch.setattr(paired, "benchmark_layouts", partial(benchmark_layouts, target_ci=10.0))
    monkeypatch.setattr(operator_times, "_MAX_ROUNDS", 6)
    monkeypatch.setattr(Sleepy, "seconds", 0.08)
    body = [SleepyContiguous(3, 4, 3), SleepyContiguous(4, 4, 3), Sleepy(4, 4, 3)]
    model = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    first, again = choose(model, time_limit_s=60.0), choose(model)
    assert (first.conversion, first.select, first.channels_last) == ("mixed", ("2",), True)
    assert again.cached and again.select == ("2",) and first.reason.startswith("mixed: ")


@pytest.mark.parametrize(("ratio", "conversion"), [(1.1, "mixed"), (1.001, "full"), (0.9, "full")])
def test_mixed_layouts_must_be_faster(benchmark: Mock, monkeypatch: Any, ratio: float, conversion: str) -> None:
    benchmark.side_effect = [measured(1.5, 0.01), measured(ratio, 0.005)]
    mixed = paired.Layout("mixed", torch.channels_last, "mixed", ("2",))
    monkeypatch.setattr(paired, "_mixed_layout", lambda *_: mixed)
    choice = choose(network(), time_limit_s=1.0)
    assert choice.channels_last and choice.conversion == conversion and f"{ratio:.3f}x" in choice.reason


def test_auto_leaves_the_run_as_it_was() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    with unchanged(model):
        choice = choose(model)
    assert not choice.cached and choice.seconds > 0 and not model[0].weight.requires_grad


@pytest.mark.parametrize(
    ("ratio", "half", "name"),
    [*((1.5, 0.01, "channels_last"), (0.8, 0.01, "contiguous"), (1.02, 0.03, "contiguous")),
     *((1.004, 0.001, "contiguous"), (1.1, 0.6, "contiguous"))],
)  # fmt: skip
def test_the_faster_one_beyond_noise_is_chosen_and_remembered(
    benchmark: Mock, ratio: float, half: float, name: str
) -> None:
    benchmark.return_value, cached = measured(ratio, half), half < 0.6
    first, second = choose(network()), choose(network())
    values = json.loads(json.dumps(first.to_dict()))
    assert (values["memory_format"], values["conversion"]) == (name, "full") and first.reason.startswith(name)
    assert f"channels_last is {ratio:.3f}x" in first.reason
    assert ("too noisy" in first.reason) is not cached
    assert second.cached is cached and second.channels_last == (name == "channels_last")
    assert ("measured before: /" in second.reason) is cached and benchmark.call_count == (1 if cached else 2)


@pytest.mark.parametrize(
    "change",
    [{"batch_size": 8}, {"image_size": 32}, {"image_size": (3, 16, 24)}, {"precision": "bf16"}, {"compile": True},
     {"cuda_graph": True}, {"optimizer": "adamw"}],
)  # fmt: skip
def test_what_could_change_the_answer_is_measured_anew(benchmark: Mock, change: dict[str, Any]) -> None:
    choose(network())
    assert not choose(network(), **change).cached
    assert benchmark.call_args.args[1].cuda_graph is ("cuda_graph" in change)
    assert not choose(network(width=16)).cached, "other shapes under the same name"
    assert not choose(nn.Sequential(*network(), nn.ReLU())).cached, "other modules of the same shapes"
    assert choose(network()).cached


def test_a_cache_that_is_damaged_or_cannot_be_written(
    benchmark: Mock, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    choose(network())
    [path] = (tmp_path / "cache" / "cl_train").iterdir()
    for damaged in ('{"memory_format": ', "[]", "{}", '{"memory_format": "channels_last"}'):
        path.write_text(damaged)
        assert not choose(network()).cached
    assert json.loads(path.read_text())["memory_format"] == "channels_last"
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    assert choose(network()).channels_last
    assert "cannot be cached" in caplog.text


def test_what_cannot_be_measured_means_contiguous_and_is_said(benchmark: Mock) -> None:
    benchmark.side_effect = ConfigError("a batch of 1 does not fit into the memory of cpu")
    choice = choose(network())
    assert not choice.channels_last and "does not fit" in choice.reason
    assert not choose(network()).cached and benchmark.call_count == 2, "the next run tries again"
    choice = choose(nn.Sequential(nn.Flatten(), nn.Linear(768, 5)))
    assert not choice.channels_last and "no convolutions" in choice.reason
    for change, problem in (({"optimizer": "sdg"}, "did you mean sgd"), ({"precision": "fp61"}, "did you mean fp16")):
        with pytest.raises(ConfigError, match=problem):
            choose(network(), **change)
    assert benchmark.call_count == 2
