"""The benchmark of many combinations: its results, its refusals, and the check against a baseline."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cl_train.comparison import paired, suite
from cl_train.comparison.parity import ParityReport
from cl_train.comparison.suite import check_gate, check_settings, describe, run_suite
from cl_train.config.benchmarks import BenchmarkSettings
from cl_train.config.schema import ConfigError
from cl_train.config.validation import settings_from_arguments

ROOT = Path(__file__).resolve().parents[2]


def settings(**changes: Any) -> BenchmarkSettings:
    return replace(
        BenchmarkSettings(
            model=["tests.networks:small"], batch_size=[2], image_size=32, precision=["fp32"], device="cpu",
            time_limit_s=0.1, target_ci=5.0, detail=False, parity=False,
        ),
        **changes,
    )  # fmt: skip


def test_a_result_has_speeds_pairs_and_parity() -> None:
    document = run_suite(settings(detail=True, parity=True, mode=["train", "infer"]))
    assert [result["mode"] for result in document["results"]] == ["train", "infer"]
    result = document["results"][0]
    assert result["parity"]["passed"] is True
    assert [speed["layout"] for speed in result["speeds"]] == ["contiguous", "channels_last"]
    assert 0 < result["mfu_pct"]["contiguous"] < 100
    assert result["pairs"][0]["ci95"][0] <= result["pairs"][0]["ratio"] <= result["pairs"][0]["ci95"][1]
    assert "convolution" in result["milliseconds_by_kind"]["channels_last"]
    assert "images/s" in describe(result)
    json.dumps(document, allow_nan=False)


def test_a_parity_failure_makes_the_verdict_not_comparable(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = ParityReport(False, "fp32", "[4, 3, 32, 32]", "features.0 (Conv2d)")
    monkeypatch.setattr(suite, "check_parity", lambda *args, **kwargs: failed)
    monkeypatch.setattr(paired.MachineLoad, "others_pct", lambda self: 0.0)
    [result] = run_suite(settings(parity=True))["results"]
    assert result["pairs"][0]["verdict"] == "not_comparable"
    assert "features.0 (Conv2d)" in describe(result)


def test_details_are_profiled_with_the_kernels_that_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(suite, "_detail", lambda *args: seen.append(torch.backends.cudnn.benchmark) or {})
    before = torch.backends.cudnn.benchmark
    run_suite(settings(detail=True))
    assert seen == [True, True] and torch.backends.cudnn.benchmark == before


def test_a_model_that_fails_leaves_the_results_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = suite.measure, iter((True, False))

    def fails_once(*arguments: Any) -> dict[str, Any]:
        if next(calls):
            raise AssertionError("wrong size")
        return original(*arguments)

    monkeypatch.setattr(suite, "measure", fails_once)
    first, second = run_suite(settings(model=["tests.networks:small", "tests.networks:without_batchnorm"]))["results"]
    assert "wrong size" in first["error"] and second["pairs"]


def test_wrong_settings_are_all_named() -> None:
    with pytest.raises(ConfigError) as error:
        check_settings(settings(model=["resnt18"], layouts=["contiguous"]))
    assert len(error.value.problems) == 2
    assert all(word in str(error.value) for word in ("resnet18", "layouts"))
    with pytest.raises(ConfigError) as error:
        settings_from_arguments(BenchmarkSettings, ["precision=fp61", "mode=train,trian", "batch_size=0"])
    assert len(error.value.problems) == 3 and "fp16" in str(error.value)


# --- the check against a baseline -------------------------------------------------------------------------------------


def document(ratio: float, low: float, high: float, device_name: str = "a GPU") -> dict[str, Any]:
    pair = {"candidate": "channels_last", "ratio": ratio, "ci95": [low, high], "verdict": "faster"}
    result = {"model": "resnet50", "mode": "train", "precision": "fp16", "batch_size": 256, "image_size": 224}
    return {"schema_version": 1, "device_name": device_name, "settings": {}, "results": [{**result, "pairs": [pair]}]}


def test_the_gate() -> None:
    baseline = document(1.8, 1.78, 1.82)
    assert check_gate(baseline, document(1.79, 1.77, 1.81)) == []
    assert check_gate(baseline, document(2.5, 2.4, 2.6)) == []
    [line] = check_gate(baseline, document(1.5, 1.48, 1.52))
    assert "1.500x" in line and "1.800x" in line and "resnet50" in line
    [coarse] = check_gate(baseline, document(1.5, 1.1, 2.0))
    assert "coarse" in coarse, "too noisy for a regression, and that is said"
    with pytest.raises(ConfigError, match="another"):
        check_gate(baseline, document(1.8, 1.7, 1.9, "another"))
    with pytest.raises(ConfigError, match="none of these"):
        check_gate(baseline, {**document(1.8, 1.7, 1.9), "results": []})


def test_the_gate_does_not_pass_what_it_could_not_compare() -> None:
    baseline, busy = document(1.8, 1.78, 1.82), document(1.8, 1.78, 1.82)
    busy["results"][0]["pairs"][0]["verdict"] = "not_comparable"
    assert "not comparable" in check_gate(baseline, busy)[0]
    other = document(1.8, 1.78, 1.82)
    other["results"].append({**other["results"][0], "model": "alexnet"})
    [line] = check_gate(other, baseline)
    assert "alexnet" in line


@pytest.mark.slow
def test_the_command_runs_and_refuses() -> None:
    words = (
        "model=squeezenet1_1 data.image_size=32 batch_size=2 precision=fp32 time_limit_s=1 detail=false parity=false"
    )
    done = run_command(*words.split(), "json=true")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["results"][0]["pairs"]
    assert "channels_last" in done.stderr.splitlines()[-1]
    assert run_command("model=resnt").returncode == 2


def run_command(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/benchmark.py", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
