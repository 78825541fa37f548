"""Planted costs are the first row, with their time; the command."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cl_train import classify, convert
from cl_train.commands.audit import main
from cl_train.errors import ConfigError
from cl_train.measure import audit as audit_module
from cl_train.measure import operator_times, time_recorder
from cl_train.measure.operator_times import time_operators
from cl_train.measure.times_report import COPY_KIND, OperatorTimes, Row, TimedCall
from cl_train.step.precision import cast_model, resolve_precision
from cl_train.system.machine import DeviceClock
from tests.memory_format.test_audit import Call, with_gradient

SLEEP_MS = 20.0
clock = SimpleNamespace(now_s=0.0)  # replaces the processor's


def sleep_if(tensor, layout):
    if classify(tensor) == layout:
        clock.now_s += SLEEP_MS / 1000


class PlantedTimes(TorchDispatchMode):
    """Every operator takes 0.1 ms, `detach` nothing, and Python only what sleeps."""

    def __torch_dispatch__(self, function, _, args=(), kwargs=None):
        if function is not torch.ops.aten.detach.default:
            clock.now_s += 1e-4
        return function(*args, **(kwargs or {}))


def model_with(*planted):
    torch.manual_seed(0)
    body = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
    model = nn.Sequential(*body, *map(Call, planted), nn.Conv2d(8, 8, 3))
    convert(model)
    return model


def times_of(model, batch=None, **options):
    def timer(*arguments):
        with PlantedTimes():
            return time_operators(*arguments)

    if batch is None:
        batch = torch.randn(2, 3, 12, 12).to(memory_format=torch.channels_last)
    with (
        patch.object(operator_times.ThreadClock, "mark", lambda self: clock.now_s),
        patch.object(audit_module, "time_operators", timer),
    ):
        times = audit_module.audit(model, batch, time=True, time_limit_s=0.2, **options).times
    assert isinstance(times, OperatorTimes)
    return times


@pytest.mark.slow
def test_planted_sleeps_are_the_first_rows_with_their_time():
    model = model_with(
        lambda x: sleep_if(x, "channels_last") or x * 1,
        lambda x: sleep_if(x, "contiguous") or x * 1,
    )
    in_backward = with_gradient(lambda gradient: sleep_if(gradient, "channels_last") or gradient)
    model.append(nn.Sequential(nn.Identity(), Call(in_backward)))
    times = times_of(model)
    for rows in (times.tables["modules"], times.tables["operators"]):
        planted = {row.calls[0].module: row for row in rows[:3]}
        for module, sign in (("3", 1), ("4", -1), ("6.1", 1)):
            row = planted[module]
            assert sign * row.difference_ms == pytest.approx(SLEEP_MS)
            assert row.sign == sign
    calls = {row.calls[0].module: row.calls[0] for row in times.tables["operators"][:3]}
    assert {call.operator for call in calls.values()} == {"python"}
    directions = [calls[module].direction for module in ("3", "4", "6.1")]
    assert directions == ["forward", "forward", "backward"]
    # the first line names all three, and so does the advice
    saved, lost = times.conclusions()[0].split(". It loses ")
    assert (saved.count("python"), lost.count("python")) == (1, 2)
    assert sum("python" in line for line in times.advice()) == 3


def small(rank=2):
    conv, norm = (nn.Conv2d, nn.BatchNorm2d) if rank == 2 else (nn.Conv3d, nn.BatchNorm3d)
    return nn.Sequential(conv(3, 8, 3), norm(8), nn.ReLU(), conv(8, 8, 3))


class Gpu(TorchDispatchMode):
    """A queue and the host that fills it, in ms: an operator takes the host 0.1 and the device
    0.001, `detach` takes it nothing.
    """

    host = device = 0.0

    def launch(self, ms):
        self.host += 0.01
        self.device = max(self.host, self.device) + ms

    def event(self, **words):
        def record(stream=None):
            self.host += 0.002
            event.at = max(self.host, self.device)

        event = SimpleNamespace(record=record, synchronize=lambda: None)
        event.elapsed_time = lambda end: end.at - event.at
        return event

    def __torch_dispatch__(self, function, _, args=(), kwargs=None):
        self.host += 0.1
        if function is not torch.ops.aten.detach.default:
            self.launch(0.001)
        return function(*args, **(kwargs or {}))


def test_on_a_gpu_the_time_of_an_operator_is_the_devices(monkeypatch):
    """The host's launches, which take 100 times as long here, do not count."""
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: gpu.launch(cycles / 2e6))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    device_clock = DeviceClock(torch.device("cuda"))
    recorder = time_recorder.TimeRecorder("contiguous", True, device_clock, {})
    with gpu, recorder.watching():
        for _ in range(5):
            torch.ones(3).detach().relu()
    relus_s = [seconds for key, seconds in recorder.seconds().items() if "relu" in key[2]]
    assert relus_s == pytest.approx([1e-6] * 5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["video", "frozen", "no backward", "fp16_o2"])
def test_batches_are_timed_and_the_model_is_unchanged(name):
    precision = resolve_precision("fp16_o2" if name == "fp16_o2" else "fp32", torch.device("cpu"))
    trains = name not in ("frozen", "no backward")
    model = small(3 if name == "video" else 2).requires_grad_(name != "frozen")
    model = cast_model(model, precision)
    convert(model)
    state = {key: (value.clone(), value.stride()) for key, value in model.state_dict().items()}
    modes = set()
    model[0].register_forward_hook(lambda *_: modes.add(torch.is_inference_mode_enabled()))
    batch = torch.randn(2, 3, *([6] if name == "video" else []), 8, 8).to(precision.input_dtype)
    times = times_of(model, batch, precision=precision, backward=name != "no backward")
    directions = {"forward", "backward", "update"} if trains else {"forward"}
    assert {call.direction for call in times.calls} == directions
    assert modes == {False}  # there, composite operators would arrive whole
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key][0]) and value.stride() == state[key][1]
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.slow
def test_copies_are_a_row_and_calls_have_their_shapes_and_strides():
    model = model_with(lambda x: x.contiguous()).append(nn.Conv2d(8, 8, 3, groups=8))
    convert(model)
    times = times_of(model, loss=lambda output: output.sum())
    copies = {row.name: row for row in times.tables["kinds"]}["layout copies forward"]
    assert copies.contiguous_ms == 0 and copies.channels_last_ms == pytest.approx(0.1)
    assert len(copies.calls) == 1
    depthwise = "convolution forward of `5` (2x8x8x8, 8x1x3x3)"
    (row,) = [row for row in times.to_dict()["operators"] if row["name"] == depthwise]
    assert row["contiguous_ms"] == row["channels_last_ms"] == pytest.approx(0.1)
    assert {layout: inputs[0] for layout, inputs in row["inputs"].items()} == {
        "contiguous": "float32 [2, 8, 8, 8], strides [512, 64, 8, 1]",
        "channels_last": "float32 [2, 8, 8, 8], strides [512, 1, 64, 8]",
    }
    forward = [call for call in times.calls if call.direction == "forward"]
    assert [call.module for call in forward if call.gets_contiguous] == ["4"], "after the copy"
    assert len(times.conclusions()[1]) < 130
    assert json.loads(json.dumps(times.to_dict()))["rounds"] >= 4


def times_with(*calls):
    return OperatorTimes(list(calls), np.array([[10.0, 10.0]] * 9))


def shifted(call, difference_ms, **fields):
    ms = np.array([[1.0, 1.0 + difference_ms + index / 1e4] for index in range(9)])
    return replace(call, ms=ms, **fields)


def test_the_first_line_names_calls_or_kinds_and_advice_leaves_out_what_is_small():
    relu = call_of([], "aten.relu.default")
    many = [shifted(relu, 0.5, module=f"m{index}", kind="element-wise") for index in range(4)]
    copy = shifted(relu, 0.02, module="copy", kind=COPY_KIND, source="net.py:7")
    pause = {"operator": "python", "module": "pause", "kind": "Python"}
    python = shifted(relu, -0.9, **pause)
    fed = shifted(relu, 0.3, module="fed", kind="pooling", gets_contiguous=True)
    pays = shifted(relu, 0.2, module="pays", kind="pooling")
    times = times_with(*many, copy, python, fed, pays)
    first = times.conclusions()[0]
    assert "0.9 ms in python forward of `pause`" in first
    assert "ms in element-wise (most in `m" in first and "a total of" in first
    assert "relu forward of `fed`" in first and "`copy`" not in first
    advice = "\n".join(times.advice())
    assert "`copy`" not in advice and "`pause` slows the contiguous run" in advice
    assert "gets a contiguous image" in fed.remedy() and "its kernel" in pays.remedy()
    times.charge({("forward", "pays", "aten.relu.default"): "net.py:9 `x.mean()`"})
    assert "net.py:9" in pays.remedy()
    assert "contiguous gradient of net.py:9" in {
        row.name.rsplit(" ", 1)[0] for row in times.tables["kinds"]
    }


def call_of(ms, name="aten.relu.default"):
    return TimedCall(name, "forward", name, "element-wise", ms=np.array(ms))


def test_rows_have_the_interval_of_ranks_and_the_summary_says_what_is_not_explained():
    differences = (-3, -1, 1, 2, 3, 4, 5, 6, 7)
    noisy = call_of([(1, 1 + difference) for difference in differences], "aten.noisy.default")
    certain = call_of([(1, 2 + index / 10) for index in range(9)], "aten.certain.default")
    row = Row("", [noisy])
    # P(at most 4 of 17) = 2.45 %
    assert Row("", [call_of([(0, index) for index in range(17)])]).interval_ms == (4, 12)
    assert row.interval_ms == (-1, 6) and row.difference_ms == 3 and row.sign == 0
    times = OperatorTimes([noisy, certain], np.array([[10.0, 8.0]] * 9))
    names = [row.name for row in times.tables["modules"]]
    assert names == ["aten.certain.default", "aten.noisy.default"]
    assert times.speed_ratio == 1.25
    assert times.explained_pct == pytest.approx(20) and "do not trust" in times.conclusions()[2]


@pytest.mark.slow
def test_the_command_tells_all_and_writes_its_files(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["model=shufflenet_v2_x0_5", "data.image_size=64", "precision=fp32"]
    files = ["chart=times.png", "out=audit.json"]
    assert main([*words, "time=true", "time_limit_s=1", "max_lost=0", *files]) == 1
    output = capsys.readouterr().out
    for words_of_it in ("more than max_lost=0", "cat (forward)", "shufflenetv2.py:95"):
        assert words_of_it in output
    report = json.loads(Path("audit.json").read_text())
    assert report["times"]["modules"] and report["exceeded"] is True
    assert report["totals"]["lost"] == 32 and report["moved_pct"] > 0
    assert Path("times.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="exists"):
        main([*words, "time=true", "chart=times.png"])
    with pytest.raises(ConfigError, match="needs time=true"):
        main([*words, "chart=a.png"])
    assert main([*words, "max_lost=40"]) == 0
