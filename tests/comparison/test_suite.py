"""The benchmark of many combinations: its results and refusals."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cl_train.commands import benchmark
from cl_train.comparison import suite
from cl_train.comparison.parity import ParityReport
from cl_train.comparison.suite import run_suite
from cl_train.comparison.timed_model import TimedModel
from cl_train.config.benchmarks import BenchmarkSettings
from cl_train.config.schema import ConfigError
from tests.processes import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one step."""
    original = TimedModel.block_times_s
    monkeypatch.setattr(TimedModel, "block_times_s", lambda self, steps: original(self, 1))


def settings(**changes: Any) -> BenchmarkSettings:
    return replace(
        BenchmarkSettings(
            model=["tests.networks:small"], batch_size=[2], image_size=32, precision=["fp32"], device="cpu",
            time_limit_s=0.0, target_ci=5.0, parity=False,
        ),
        **changes,
    )  # fmt: skip


def test_a_result_has_speeds_pairs_and_parity(capsys: pytest.CaptureFixture[str]) -> None:
    document = run_suite(settings(parity=True, mode=["train", "infer"]))
    assert [result["mode"] for result in document["results"]] == ["train", "infer"]
    result = document["results"][0]
    assert result["parity"]["channels_last"]["passed"] is True
    assert [speed["layout"] for speed in result["speeds"]] == ["contiguous", "channels_last"]
    assert result["pairs"][0]["ci95"][0] <= result["pairs"][0]["ratio"] <= result["pairs"][0]["ci95"][1]
    assert "images/s" in capsys.readouterr().out
    json.dumps(document, allow_nan=False)


def test_a_parity_failure_makes_the_verdict_not_comparable(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = ParityReport(False, "fp32", "[4, 3, 32, 32]", "features.0 (Conv2d)")
    monkeypatch.setattr(suite, "check_parity", lambda *args, **kwargs: failed)
    [result] = run_suite(settings(parity=True))["results"]
    assert result["pairs"][0]["verdict"] == "not_comparable"
    assert "features.0 (Conv2d)" in result["text"] and "not comparable" in result["text"]


def test_a_model_that_fails_leaves_the_results_of_the_others() -> None:
    names = ["tests.networks:raising", "tests.networks:small"]
    first, second = run_suite(settings(model=names))["results"]
    assert "planted" in first["error"] and first["pairs"] == [] and second["pairs"]


@pytest.mark.parametrize("changes", [{"model": ["resnt18"]}, {"layouts": ["contiguous"]}, {"model": []}, {"mode": []}])
def test_wrong_settings_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"resnet18|layouts|is empty"):
        run_suite(settings(**changes))


@pytest.mark.slow
def test_the_command_runs_and_refuses() -> None:
    words = "model=squeezenet1_1 data.image_size=32 batch_size=2 precision=fp32 time_limit_s=1 parity=false json=true"
    command = [sys.executable, "scripts/benchmark.py", *words.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["results"][0]["pairs"]
    assert "channels_last" in done.stderr.splitlines()[-1]
    with pytest.raises(ConfigError, match="resnt"):
        benchmark.main(["model=resnt"])
