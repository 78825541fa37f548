"""Comparing the layouts of a small model: measurement, report, unchanged state and refusals."""

import copy
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cl_train.comparison import paired
from cl_train.comparison.alternation import alternate
from cl_train.comparison.paired import benchmark_layouts, compare_layouts
from cl_train.comparison.statistics import verdict_of
from cl_train.comparison.timed_model import CHANNELS_LAST, CHANNELS_LAST_CONV, CONTIGUOUS, TimedModel, Workload
from cl_train.config.schema import ConfigError
from cl_train.memory_format import crashes
from cl_train.memory_format.layout import model_memory_format
from cl_train.step.precision import resolve_precision

CPU = torch.device("cpu")
QUICK: dict[str, Any] = {"target_ci": 0.5, "time_limit_s": 0.2}


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired, "BLOCK_S", 0.0)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


def workload(precision: str = "fp32", **changes: Any) -> Workload:
    return replace(Workload(4, (3, 16, 16), resolve_precision(precision, CPU), CPU), **changes)


# --- the alternation --------------------------------------------------------------------------------------------------


def test_blocks_alternate_until_the_interval_is_narrow() -> None:
    order: list[str] = []

    def block(name: str, seconds: float) -> float:
        order.append(name)
        return seconds

    done = alternate([lambda: block("a", 0.02), lambda: block("b", 0.01)])
    assert order == ["a", "b", "b", "a"] * 8
    assert (done.rounds, done.stopped_by) == (8, "target_ci")
    assert [ratio.ratio for ratio in done.speed_ratios()] == pytest.approx([1.0, 2.0])
    assert done.median_s(1) == 0.01


@pytest.mark.parametrize("noise", [0.01, 0.015])
def test_equal_blocks_are_rarely_called_different(noise: float) -> None:
    """Heavy-tailed noise; stopping as soon as the interval is narrow costs about 1 % of false verdicts."""
    rng = np.random.default_rng(0)
    verdicts = []
    for _ in range(300):
        blocks = [lambda: 0.01 * math.exp(noise * rng.standard_t(4))] * 2
        verdicts.append(verdict_of(alternate(blocks, time_limit_s=math.inf).speed_ratios()[1]))
    assert sum(verdict in ("faster", "slower") for verdict in verdicts) <= 24


def test_linear_drift_cancels_within_a_round() -> None:
    """The machine slows down by 1 % from block to block; the variants are equal all the same."""
    slower = iter(0.01 * 1.01**n for n in range(1000))
    done = alternate([lambda: next(slower)] * 3)
    assert [ratio.ratio for ratio in done.speed_ratios()] == pytest.approx([1.0] * 3)
    assert done.round_ratios(2) == pytest.approx([1.0] * done.rounds)


def test_the_time_limit_leaves_two_rounds() -> None:
    noise = iter([1.0, 1.0, 5.0, 1.0] * 10)
    done = alternate([lambda: next(noise), lambda: next(noise)], time_limit_s=0.0)
    assert (done.rounds, done.stopped_by) == (2, "time_limit")


def test_out_of_memory_drops_the_last_variant_and_keeps_the_others() -> None:
    calls = iter(range(100))

    def third() -> float:
        if next(calls) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 0.01

    done = alternate([lambda: 0.02, lambda: 0.01, third])
    assert len(done.blocks) == 2 and done.rounds == 8
    assert done.speed_ratios()[1].ratio == pytest.approx(2.0)
    with pytest.raises(torch.OutOfMemoryError):
        alternate([lambda: 0.02, third])


# --- the timed model --------------------------------------------------------------------------------------------------


def test_both_sides_have_the_same_weights_and_images_in_their_layout() -> None:
    plain, converted = (TimedModel(network(), layout, workload()) for layout in (CONTIGUOUS, CHANNELS_LAST))
    assert torch.equal(plain.inputs, converted.inputs)
    assert plain._batch is not None and converted._batch is not None
    assert torch.equal(plain._batch.targets, converted._batch.targets)
    assert plain.inputs.stride() == (768, 256, 16, 1)
    assert converted.inputs.stride() == (768, 1, 48, 3)
    assert model_memory_format(plain.model) == "contiguous"
    assert model_memory_format(converted.model) == "channels_last"
    assert all(torch.equal(a, b) for a, b in zip(plain.model.parameters(), converted.model.parameters(), strict=True))


@pytest.mark.parametrize("changes", [{}, {"loss": lambda out: out.square().mean()}, {"cuda_graph": True}])
def test_a_training_step_trains_and_an_inference_does_not(changes: dict[str, Any]) -> None:
    for mode, trains in (("train", True), ("infer", False)):
        timed = TimedModel(network(), CHANNELS_LAST, workload(mode=mode, **changes))
        before = copy.deepcopy(timed.model.state_dict())
        timed.step()
        after = timed.model.state_dict()
        assert any(not torch.equal(after[key], before[key]) for key in before) is trains


def test_a_graphed_step_is_recorded() -> None:
    timed = TimedModel(network(), CONTIGUOUS, workload(cuda_graph=True))
    timed.warm_up()
    assert timed.step.is_recorded  # type: ignore[attr-defined]


def test_fp16_goes_through_the_loss_scaler() -> None:
    timed = TimedModel(network(), CONTIGUOUS, workload("fp16"))
    assert timed._parts is not None and timed._parts.scaler.is_enabled()
    timed.step()
    assert timed._parts.scaler.get_scale() > 0


# --- comparisons ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "mode"), [("fp32", "train"), ("bf16", "infer"), ("fp16", "train"), ("fp16_o2", "train")]
)
def test_the_model_and_the_generators_stay_as_they_are(precision: str, mode: str) -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    generators = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()  # type: ignore[union-attr]
    done = benchmark_layouts(model, workload(precision, mode=mode), **QUICK)
    assert [speed.layout for speed in done.speeds] == ["contiguous", "channels_last"]
    assert all(speed.images_per_s > 0 and speed.peak_memory_gib > 0 for speed in done.speeds)
    assert random.getstate() == generators[0]
    assert np.array_equal(np.random.get_state()[1], generators[1])  # type: ignore[index]
    assert torch.equal(torch.get_rng_state(), generators[2])
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert model_memory_format(model) == "contiguous" and model.training


def test_a_comparison_prints_and_becomes_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired.MachineLoad, "others_pct", lambda self: 60.0)
    done = compare_layouts(network(), 4, image_size=16, target_ci=5.0, time_limit_s=0.1)
    values = json.loads(json.dumps(done.to_dict(), allow_nan=False))
    assert [pair["candidate"] for pair in values["pairs"]] == ["channels_last"]
    assert values["pairs"][0]["ratio"] == pytest.approx(done.ratio.ratio, abs=1e-3)
    assert done.ratio.ratio == pytest.approx(done.speeds[1].images_per_s / done.speeds[0].images_per_s), (
        "no contradiction"
    )
    assert done.verdict == values["pairs"][0]["verdict"] == "not_comparable", "on a busy machine"
    assert "60 %" in str(done) and "images/s" in str(done)


def test_out_of_memory_halves_the_batch_of_all_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def block_times_s(self: TimedModel, steps: int) -> list[float]:
        sizes.append(len(self.inputs))
        if sizes[-1] > 2 and self.layout is CHANNELS_LAST:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")
        return [0.01]

    monkeypatch.setattr(TimedModel, "block_times_s", block_times_s)
    monkeypatch.setattr(crashes, "_is_child", True)  # `sizes` would stay in the child
    done = benchmark_layouts(network(), workload(batch_size=8), **QUICK)
    assert (done.batch_size, done.batch_size_requested) == (2, 8)
    assert set(sizes[-8:]) == {2}, "both layouts"
    with pytest.raises(ConfigError, match="a batch of 4"):
        benchmark_layouts(network(), workload(batch=torch.randn(4, 3, 16, 16)), **QUICK)


def test_a_model_that_does_not_run_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="expected input") as error:
        compare_layouts(network(), 4, image_size=(5, 16, 16))
    assert len(error.value.problems) == 1
    with pytest.raises(ConfigError, match="mode"):
        compare_layouts(network(), 4, mode="trian")
    with pytest.raises(ConfigError, match="batch_size=0"):
        compare_layouts(network(), 0)
    with pytest.raises(ConfigError, match=r"torch\.nn\.Module"):
        compare_layouts("resnet18", 4)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"precision=fp61; use .*did you mean fp16"):
        compare_layouts(network(), 4, precision="fp61")


class SlowInChannelsLast(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_contiguous():
            time.sleep(0.05)
        return x


@pytest.mark.slow
def test_a_planted_slowdown_is_found() -> None:
    done = compare_layouts(nn.Sequential(SlowInChannelsLast(), network()), 4, image_size=16, target_ci=5.0)
    assert done.speeds[1].verdict in ("slower", "not_comparable")
    assert done.ratio.ratio < 0.9


@pytest.mark.slow
def test_compiled_copies_are_compared(without_inductor: None) -> None:
    done = compare_layouts(network(), 4, image_size=16, compile=True, time_limit_s=0.5)
    assert all(speed.images_per_s > 0 for speed in done.speeds)


def test_drift_of_three_layouts_is_measured_against_the_first() -> None:
    done = benchmark_layouts(network(), workload(), (CONTIGUOUS, CHANNELS_LAST, CHANNELS_LAST_CONV), **QUICK)
    assert [pair["baseline"] for pair in done.to_dict()["pairs"]] == ["contiguous"] * 2
    assert done.speeds[2].layout == "channels_last_conv"


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
