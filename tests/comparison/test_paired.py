"""The benchmark on a model of a few thousand weights: what it leaves alone, what it reports, what its gate refuses."""

from __future__ import annotations

import copy
import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cl_train.comparison import model_cost as costs
from cl_train.comparison import paired as benchmark
from cl_train.comparison import suite as benchmark_suite
from cl_train.comparison.paired import (
    CHANNELS_LAST,
    CHANNELS_LAST_CONV,
    CONTIGUOUS,
    Effort,
    Trial,
    Workload,
    benchmark_layouts,
)
from cl_train.comparison.parity import fitting_image_size
from cl_train.comparison.suite import (
    BenchmarkSettings,
    blind_spots,
    check_gate,
    check_settings,
    count_verdicts,
    describe,
    run_case,
    run_suite,
)
from cl_train.config.schema import ConfigError
from cl_train.memory_format.layout import model_memory_format
from cl_train.step.precision import resolve_precision

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
QUICK = Effort(target_ci=0.5, time_limit_s=1.0, block_s=0.005)


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
    return replace(Workload(4, 16, resolve_precision(precision, CPU), CPU), **changes)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp16_o2"])
@pytest.mark.parametrize("mode", ["train", "infer"])
def test_the_model_and_the_generators_stay_as_they_are(precision: str, mode: str) -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    generator = torch.get_rng_state()
    done = benchmark_layouts(model, workload(precision, mode=mode), effort=QUICK)
    assert [speed.layout for speed in done.speeds] == ["contiguous", "channels_last"]
    assert all(speed.images_per_s > 0 for speed in done.speeds)
    assert done.rounds >= 2
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert model_memory_format(model) == "contiguous" and model.training


def test_both_sides_have_the_same_weights_and_images_in_their_layout() -> None:
    plain, converted = (Trial(network(), layout, workload()) for layout in (CONTIGUOUS, CHANNELS_LAST))
    assert torch.equal(plain.batch.images, converted.batch.images)
    assert torch.equal(plain.batch.targets, converted.batch.targets)
    assert plain.batch.images.stride() == (768, 256, 16, 1)
    assert converted.batch.images.stride() == (768, 1, 48, 3)
    assert model_memory_format(plain.model) == "contiguous"
    assert model_memory_format(converted.model) == "channels_last"
    assert all(torch.equal(a, b) for a, b in zip(plain.model.parameters(), converted.model.parameters(), strict=True))


def test_a_training_step_trains_and_an_inference_does_not() -> None:
    for mode, changes in (("train", True), ("infer", False)):
        trial = Trial(network(), CHANNELS_LAST, workload(mode=mode))
        before = copy.deepcopy(trial.model.state_dict())
        trial.step()
        after = trial.model.state_dict()
        assert any(not torch.equal(after[key], before[key]) for key in before) is changes


def test_fp16_goes_through_the_loss_scaler() -> None:
    trial = Trial(network(), CONTIGUOUS, workload("fp16"))
    assert trial._parts.scaler.is_enabled()
    trial.step()
    assert trial._parts.scaler.get_scale() > 0


def test_blocks_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    def step_times(self: Trial, steps: int) -> list[float]:
        order.append(self.layout.name)
        return [0.01 if self.layout.channels_last else 0.02] * steps

    monkeypatch.setattr(Trial, "step_times", step_times)
    done = benchmark_layouts(network(), workload(), effort=Effort(time_limit_s=60))
    measured = order[4:]  # after two calls of warm-up each
    assert measured == ["contiguous", "channels_last", "channels_last", "contiguous"] * 8
    assert done.speeds[1].versus_first.ratio == pytest.approx(2.0)
    assert done.speeds[1].verdict == "faster"
    assert (done.rounds, done.stopped_by) == (8, "target_ci")
    assert done.of(CHANNELS_LAST).step_ms == pytest.approx(10.0)


def test_drift_cancels_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine slows down by 1 % from block to block: both sides are equal all the same."""
    seconds = itertools.count()

    def step_times(self: Trial, steps: int) -> list[float]:
        return [0.01 * 1.01 ** next(seconds)]

    monkeypatch.setattr(Trial, "step_times", step_times)
    done = benchmark_layouts(network(), workload(), (CONTIGUOUS, CHANNELS_LAST, CHANNELS_LAST_CONV), Effort())
    assert [speed.verdict for speed in done.speeds] == ["no_difference"] * 3
    assert done.speeds[2].versus_first.ratio == pytest.approx(1.0)


def test_out_of_memory_lowers_the_batch_of_all_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def step_times(self: Trial, steps: int) -> list[float]:
        size = len(self.batch.images)
        sizes.append(size)
        if size > 2 and self.layout.channels_last:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")
        return [0.01]

    monkeypatch.setattr(Trial, "step_times", step_times)
    done = benchmark_layouts(network(), workload(batch_size=8), effort=QUICK)
    assert (done.batch_size, done.batch_size_requested) == (2, 8)
    assert set(sizes[-8:]) == {2}, "both sides"

    monkeypatch.setattr(benchmark, "is_out_of_memory", lambda error: True)
    monkeypatch.setattr(Trial, "step_times", lambda self, steps: [][0])
    with pytest.raises(IndexError):
        benchmark_layouts(network(), workload(), effort=QUICK)


def test_other_errors_are_not_taken_for_memory() -> None:
    assert not benchmark.is_out_of_memory(RuntimeError("shapes do not fit"))
    assert benchmark.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(RuntimeError, match="expected input"):
        benchmark_layouts(network(), workload(input_channels=5), effort=QUICK)


@pytest.mark.slow
def test_a_planted_slowdown_is_found() -> None:
    done = benchmark_layouts(
        network(), workload(batch_size=16), (CONTIGUOUS, CONTIGUOUS), Effort(time_limit_s=10), slowdown=0.5
    )
    assert done.speeds[1].verdict == "slower"
    assert done.speeds[1].versus_first.ratio < 0.8, "1 / 1.5, give or take a busy machine"


# --- costs ------------------------------------------------------------------------------------------------------------


def test_flops_of_a_known_layer() -> None:
    convolution = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, groups=4, bias=False), nn.Flatten(), nn.Linear(8 * 36, 5))
    expected = 2 * 8 * 9 * 36 + 2 * 5 * 8 * 36  # of a grouped convolution on 6x6, and of the linear layer
    assert costs.flops_per_image(convolution, 6, 4, "infer") == expected
    assert costs.flops_per_image(convolution, 6, 4, "train") == 3 * expected


def test_peak_memory_of_a_known_allocation() -> None:
    def step() -> None:
        first = torch.empty(2**22)  # 16 MiB
        del first
        torch.empty(2**21)

    assert costs.peak_memory_of_step_gib(step, 2**30, 0, CPU) == pytest.approx(1 + 16 / 1024, rel=1e-3)


def test_time_by_kind_of_layer() -> None:
    trial = Trial(network(), CONTIGUOUS, workload())
    table = costs.time_by_kind(trial.step, CPU)
    assert table["convolution"]["forward"] > 0 and table["convolution"]["backward"] > 0
    assert table["convolution"]["optimizer"] == 0
    assert table["optimizer"]["optimizer"] > 0
    assert {"normalisation", "linear"} <= table.keys()


# --- the suite and its gate -------------------------------------------------------------------------------------------


def settings(**changes: Any) -> BenchmarkSettings:
    return replace(
        BenchmarkSettings(
            model=["squeezenet1_1"], batch_size=[2], image_size=32, precision=["fp32"], device="cpu",
            num_classes=10, time_limit_s=0.5, target_ci=0.5, detail=False, parity=False,
        ),
        **changes,
    )  # fmt: skip


def test_a_result_has_speeds_pairs_and_parity() -> None:
    document = run_suite(settings(detail=True, parity=True, mode=["train", "infer"]))
    assert [result["mode"] for result in document["results"]] == ["train", "infer"]
    result = document["results"][0]
    assert result["parity"]["passed"] is True
    assert [speed["layout"] for speed in result["speeds"]] == ["contiguous", "channels_last"]
    assert 0 < result["speeds"][0]["mfu_pct"] < 100
    assert result["pairs"][0]["ci95"][0] <= result["pairs"][0]["ratio"] <= result["pairs"][0]["ci95"][1]
    assert "convolution" in result["milliseconds_by_kind"]["channels_last"]
    assert "images/s" in describe(result)
    json.dumps(document, allow_nan=False)


def test_a_busy_machine_makes_the_verdict_not_comparable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark.MachineLoad, "others_pct", lambda self: 60.0)
    document = run_suite(settings(repetitions=2))
    assert [result["pairs"][0]["verdict"] for result in document["results"]] == ["not_comparable"] * 2
    assert count_verdicts(document) == "not comparable 2"
    assert "other processes took 60 % of the cores" in describe(document["results"][0])


def test_a_parity_failure_makes_the_verdict_not_comparable(monkeypatch: pytest.MonkeyPatch) -> None:
    from cl_train.comparison import suite as benchmark_suite
    from cl_train.comparison.parity import ParityReport

    failed = ParityReport(False, "fp32", 1, "features.0 (Conv2d)", None, [])
    monkeypatch.setattr(ParityReport, "__str__", lambda self: "parity: the layouts differ")
    monkeypatch.setattr(benchmark_suite, "check_parity", lambda *args, **kwargs: failed)
    [case] = benchmark_suite.cases(settings(), CPU)
    result = run_case(case, settings(parity=True), CPU)
    assert result["pairs"][0]["verdict"] == "not_comparable"
    assert "the layouts differ" in describe(result)


def test_wrong_settings_are_all_named() -> None:
    with pytest.raises(ConfigError) as error:
        check_settings(settings(model=["resnt18"], precision=["fp61"], mode=["trian"], layouts=["contiguous"]))
    text = str(error.value)
    assert "resnet18" in text and "fp16" in text and "did you mean train" in text and "two or more" in text


def document(ratio: float, low: float, high: float, device_name: str = "a GPU") -> dict[str, Any]:
    pair = {"candidate": "channels_last", "ratio": ratio, "ci95": [low, high], "verdict": "faster"}
    case = {"model": "resnet50", "mode": "train", "precision": "fp16", "batch_size": 256, "image_size": 224}
    return {
        "schema_version": 1,
        "device_name": device_name,
        "settings": {},
        "results": [{**case, "compile": False, "pairs": [pair]}],
    }


def test_the_gate() -> None:
    baseline = document(1.8, 1.78, 1.82)
    assert check_gate(baseline, document(1.79, 1.77, 1.81)) == []
    assert check_gate(baseline, document(2.5, 2.4, 2.6)) == []
    assert check_gate(baseline, document(1.5, 1.1, 2.0)) == [], "too noisy to accuse"
    assert len(blind_spots(document(1.5, 1.1, 2.0))) == 1, "and that is said"
    assert blind_spots(document(1.5, 1.48, 1.52)) == []
    [line] = check_gate(baseline, document(1.5, 1.48, 1.52))
    assert line.startswith("resnet50 train fp16 256 224 channels_last: 1.500x")
    with pytest.raises(ConfigError, match="was measured on a GPU, this is another"):
        check_gate(baseline, document(1.8, 1.7, 1.9, "another"))
    with pytest.raises(ConfigError, match="none of these combinations"):
        check_gate(baseline, {**document(1.8, 1.7, 1.9), "results": []})


@pytest.mark.slow
def test_the_command_writes_a_file_and_passes_its_own_gate(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    words = "model=squeezenet1_1 image_size=32 batch_size=2 precision=fp32 time_limit_s=1 detail=false parity=false"
    done = run_command(*words.split(), "--output", str(path))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == json.loads(path.read_text())

    raised = json.loads(path.read_text())
    raised["results"][0]["pairs"][0] |= {"ratio": 1e9, "ci95": [0.9e9, 1.1e9]}
    path.write_text(json.dumps(raised))
    done = run_command("--baseline", str(path))
    assert done.returncode == 1
    assert "the gate is not passed: squeezenet1_1 train fp32 2 32 channels_last" in done.stdout
    assert run_command("model=resnt").returncode == 2


def run_command(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/benchmark.py", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


class OneSize(nn.Module):
    """As a transformer: built for images of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4 * 126 * 126, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        torch._assert(images.shape[-1] == 128, "wrong size")
        return self.head(self.conv(images).flatten(1))


def test_parity_takes_small_images_where_the_model_does() -> None:
    assert fitting_image_size(OneSize(), 128) == 128
    assert fitting_image_size(network(), 224) == 96
    assert fitting_image_size(network(), 32) == 32


def test_a_model_that_fails_leaves_the_others_results(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fails_once(*arguments: Any) -> dict[str, Any]:
        calls.append(1)
        if len(calls) == 1:
            raise AssertionError("wrong size")
        return original(*arguments)

    original = benchmark_suite.run_case
    monkeypatch.setattr(benchmark_suite, "run_case", fails_once)
    first, second = run_suite(settings(repetitions=2))["results"]
    assert first["error"] == "wrong size" and second["pairs"]


def test_the_gate_does_not_pass_what_it_could_not_compare() -> None:
    baseline, busy = document(1.8, 1.78, 1.82), document(1.8, 1.78, 1.82)
    busy["results"][0]["pairs"][0]["verdict"] = "not_comparable"
    assert "not comparable" in check_gate(baseline, busy)[0]
    other = document(1.8, 1.78, 1.82)
    other["results"].append({**other["results"][0], "model": "alexnet"})
    [line] = check_gate(other, baseline)
    assert "alexnet" in line and "not measured" in line
