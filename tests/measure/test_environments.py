"""`benchmark against=ENV`: one model in two environments, each in a process of its own."""

import itertools
import json
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from cl_train.commands.benchmark import measure_against
from cl_train.config.schema import BenchmarkSettings
from cl_train.errors import ConfigError
from cl_train.measure import environments
from cl_train.measure.environment_runner import Measured
from cl_train.measure.environments import Runner, _files, parse_environment

# Another operator in each ReLU, in one environment only: a sitecustomize module.
SLOW_RELU = """
import importlib.abc, sys, time

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torchvision.models.resnet":
            sys.meta_path.remove(self)
            import torch
            relu = torch.nn.functional.relu
            def slow(x, inplace=False):
                torch.erfinv(x.detach() * 0.5)
                return relu(x, inplace)
            torch.nn.functional.relu = slow

sys.meta_path.insert(0, Finder())
"""
WRONG_RELU = SLOW_RELU.replace("return relu(x, inplace)", "return relu(x, inplace) * 1.5")


def compared(against, **changes):
    settings = {"model": ["resnet18"], "batch_size": [2], "image_size": 64}
    settings |= {"precision": ["fp32"], "device": "cpu", "layouts": ["channels_last"]}
    settings |= {"against": against, "time_limit_s": 4.0} | changes
    document, text = measure_against(BenchmarkSettings(**settings))
    (pair,) = document["results"][0]["pairs"]
    return pair, text


def test_a_python_or_variables():
    both = parse_environment([sys.executable, "OMP_NUM_THREADS=4", "A="])
    assert (both.python, both.variables) == (sys.executable, {"OMP_NUM_THREADS": "4", "A": ""})
    assert parse_environment(["A=1"]).python == sys.executable
    for words in (["/no/such/python"], [str(Path.cwd())], [sys.executable, sys.executable]):
        with pytest.raises(ConfigError, match="name one Python"):
            parse_environment(words)


def test_several_values_are_refused():
    with pytest.raises(ConfigError, match="against= compares one batch_size"):
        compared(["A=1"], batch_size=[2, 4])
    with pytest.raises(ConfigError, match="layouts="):
        compared(["A=1"], layouts=["channels_last_conv"])


def test_videos_are_compared(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # `Measured` sets it
    settings = BenchmarkSettings(frames=4, image_size=8, batch_size=[2])
    arguments = (settings, "tests.networks:UNet3d", "channels_last", torch.device("cpu"), "fp32")
    with _files(*arguments) as request:
        measured = Measured(request)
    assert measured.images.shape == (2, 3, 4, 8, 8)
    for tensor in (measured.images, measured.model.bottom[0].weight):
        assert tensor.is_contiguous(memory_format=torch.channels_last_3d)
    before = measured.model.head.weight.clone()
    measured.step()
    assert not torch.equal(before, measured.model.head.weight)
    measured.model.bottom[0].weight.requires_grad_(False)
    norms = measured.result()["gradient_norms"]
    assert len(norms) == len(list(measured.model.parameters())) and norms.count(0.0) == 1


def test_a_benchmark_that_is_stopped_keeps_its_pairs(monkeypatch, tmp_path):
    pair = {"verdict": "faster", "ratio": 2.0}
    planted = Mock(side_effect=[pair, KeyboardInterrupt])
    monkeypatch.setattr(environments, "compare_environments", planted)
    monkeypatch.setattr(environments, "describe", str)
    out = tmp_path / "benchmark.json"
    with pytest.raises(KeyboardInterrupt):
        compared(["A=1"], layouts=["contiguous", "channels_last"], out=str(out))
    document = json.loads(out.read_text())
    assert document["complete"] is False and document["results"] == [{"pairs": [pair]}]


def test_processes_that_differ_are_no_difference_of_their_environments(monkeypatch):
    """Planted: each process has a speed of its own, within 8 %, which all its blocks repeat."""
    speeds = itertools.cycle([1.0, 1.08, 1.03, 0.99, 1.06, 1.01, 0.98, 1.02])
    started = []

    def start(runner, environment):
        runner.environment = environment
        runner.step_s = 0.01 / next(speeds)
        started.append(environment.name)

    def ask(runner, do=None, **request):
        versions = {"threads": 1, "torch": "2", "python": "3", "cuda": None, "cudnn": None}
        result = {"versions": versions, "logits": [1.0], "gradient_norms": [1.0]}
        return runner.step_s if do == "block_s" else result

    monkeypatch.setattr(Runner, "__init__", start)
    monkeypatch.setattr(Runner, "ask", ask)
    monkeypatch.setattr(Runner, "close", lambda runner: None)
    pair, text = compared(["A=1"], time_limit_s=0.1)
    assert (pair["n"], pair["verdict"]) == (4, "inconclusive") and "inconclusive" in text
    assert started == ["A=1", "here", "here", "A=1"] * 2


@pytest.fixture
def two_pairs(monkeypatch):
    """Of processes with one thread each: starting them takes nearly all of the time."""
    monkeypatch.setattr(environments, "_LEAST_PAIRS", 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.slow
def test_a_slow_operator_of_an_environment_is_named(two_pairs, tmp_path, monkeypatch, capfd):
    """The operators are those that ran; the times are planted, as noise is no part of this test."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_RELU)
    ask = Runner.ask

    def planted(runner, **request):
        do = request.get("do")
        if do == "block_s":
            return 0.03 if runner.environment.variables else 0.01
        answer = ask(runner, **request)
        if do == "operator_ms":
            return {name: 10.0 if name == "aten::erfinv" else 0.1 for name in answer}
        return answer

    monkeypatch.setattr(Runner, "ask", planted)
    pair, text = compared([f"PYTHONPATH={tmp_path}"], time=True)
    assert pair["n"] == 2, "pairs of processes"
    assert pair["verdict"] == "faster" and pair["ratio"] == 3.0 and "faster" in text
    assert pair["operators"][0]["operator"] == "aten::erfinv"
    assert pair["operators"][0]["baseline_ms"] == 10.0
    assert pair["operators"][0]["candidate_ms"] == 0.0
    assert pair["versions"]["baseline"] == pair["versions"]["candidate"]
    assert "aten::erfinv" in capfd.readouterr().out


@pytest.mark.slow
def test_other_results_are_not_comparable(two_pairs, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WRONG_RELU)
    pair, text = compared([f"PYTHONPATH={tmp_path}"], time_limit_s=1.0)
    assert pair["verdict"] == "not_comparable" and "not comparable" in text
    assert pair["parity"]["relative_distance"] > pair["parity"]["limit"]


@pytest.mark.slow
def test_an_environment_without_torch_is_refused(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    with pytest.raises(ConfigError, match=r"torch 2\.4 and torchvision"):
        compared([f"PYTHONPATH={tmp_path}"])
