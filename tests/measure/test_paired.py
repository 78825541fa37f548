"""Comparing the layouts of a small model, and channels_last=auto."""

import copy
import itertools
import json
from dataclasses import fields, replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from cl_train.errors import ConfigError
from cl_train.measure import alternate, auto, paired, timed_step
from cl_train.measure.alternate import Block, MachineLoad, Stop, TakenTime
from cl_train.measure.paired import benchmark, compare_layouts, timed_block, variants_of
from cl_train.measure.parity_gate import Parity
from cl_train.measure.timed_step import TimedStep, Workload
from cl_train.memory_format.convert import CHANNELS_LAST, CONTIGUOUS
from cl_train.memory_format.layout import model_memory_format
from cl_train.step.precision import resolve_precision
from cl_train.step.train_step import StepSettings
from tests.measure.conftest import planted_comparison, unchanged

CPU = torch.device("cpu")
QUICK = Stop.after(1)


def network(width=8):
    torch.manual_seed(0)
    stem = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout()
    return nn.Sequential(*stem, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5))


def workload(precision="fp32", **changes):
    names = {field.name for field in fields(Workload)}
    settings = {name: changes.pop(name) for name in set(changes) - names}
    step = StepSettings(resolve_precision(precision, CPU), **settings)
    return replace(Workload(4, (3, 16, 16), step, CPU), **changes)


def test_both_sides_have_the_same_weights_and_images_in_their_layout():
    layouts = (CONTIGUOUS, CHANNELS_LAST)
    plain, converted = (TimedStep(network(), layout, workload()) for layout in layouts)
    assert torch.equal(plain.inputs, converted.inputs)
    assert plain.targets is not None and torch.equal(plain.targets, converted.targets)
    strides = plain.inputs.stride(), converted.inputs.stride()
    assert strides == ((768, 256, 16, 1), (768, 1, 48, 3))
    formats = [model_memory_format(side.model) for side in (plain, converted)]
    assert formats == ["contiguous", "channels_last"]
    pairs = zip(plain.model.parameters(), converted.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(
    ("precision", "changes"),
    [
        ("fp16", {}),
        ("fp32", {"loss": lambda out: out.square().mean()}),
        ("fp32", {"cuda_graph": True}),
    ],
)
def test_a_training_step_trains_and_an_inference_does_not(precision, changes):
    for mode, trains in (("train", True), ("infer", False)):
        timed = TimedStep(network(), CHANNELS_LAST, workload(precision, mode=mode, **changes))
        before = copy.deepcopy(timed.model.state_dict())
        timed.first_step()
        timed.record()
        timed.block_times_s(1)
        after = timed.model.state_dict()
        assert any(not torch.equal(after[key], before[key]) for key in before) is trains
        assert timed.parts is None or timed.parts.scaler.is_enabled() is (precision == "fp16")


def test_no_eager_work_follows_a_recording(monkeypatch):
    """The memory of a graph cannot serve eager steps, so a GPU would have to hold both."""
    recorded = []

    def record(recorder, work):
        recorded.append(work)
        return lambda: None

    def refuse(*_):
        assert not recorded, "eager work beside a graph"

    monkeypatch.setattr(timed_step.Recorder, "record", record)
    monkeypatch.setattr(timed_step, "peak_memory_of_step_gib", lambda *_: refuse() or 1.0)
    model = network()
    model.register_forward_pre_hook(refuse)
    done = benchmark(variants_of(model), workload(cuda_graph=True), stop=QUICK)
    assert all(speed.peak_memory_gib > 0 for speed in done.speeds) and done.utilisation


@pytest.mark.parametrize(("precision", "mode"), [("bf16", "infer"), ("fp16_o2", "train")])
def test_the_model_and_the_generators_stay_as_they_are(precision, mode):
    model = network()
    with unchanged(model):
        done = benchmark(variants_of(model), workload(precision, mode=mode), stop=QUICK)
    assert [speed.layout for speed in done.speeds] == ["contiguous", "channels_last"]
    assert all(speed.images_per_s > 0 and speed.peak_memory_gib > 0 for speed in done.speeds)


def test_threads_that_end_between_two_steps_leave_what_they_waited(monkeypatch):
    times = [{1: (5.0, 0.5), 2: (1.0, 0.25)}, {1: (6.0, 1.0), 2: (2.0, 0.5)}, {1: (7.0, 1.5)}]
    monkeypatch.setattr(alternate, "thread_times", Mock(side_effect=times))
    taken = TakenTime()
    assert taken.is_known and [taken.seconds() for _ in "ab"] == [1.5, 2.0]


class Disturbed:
    """Other processes take half a second from each thread of one step of `every`."""

    is_known = True

    def __init__(self, every=1):
        self.every, self.calls = every, 0

    def seconds(self):
        self.calls += 1
        return 0.5 * (self.calls // 2 // self.every)


def test_steps_that_other_processes_disturbed_are_left_out(monkeypatch):
    """One step in five takes half a second longer; on one thread that time is subtracted, but for
    steps of which less than a tenth would be left.
    """
    timed = TimedStep(network(), CONTIGUOUS, workload())
    durations = itertools.cycle([0.01, 0.01, 0.01, 0.01, 0.51])
    monkeypatch.setattr(timed, "block_times_s", lambda steps: [next(durations)])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert timed_block(timed, 10, Disturbed(5)) == Block(0.01)
    assert timed_block(timed, 5, Disturbed()) == Block(0.01, pytest.approx(50.0)), "all of them"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert timed_block(timed, 5, Disturbed(5)) == Block(0.01), "98 % of a step"
    durations = itertools.repeat(0.51)
    assert timed_block(timed, 5, Disturbed()) == Block(0.51, pytest.approx(0.5 / 0.51))
    durations = itertools.cycle([2.0, 2.0, 2.5])
    assert timed_block(timed, 3, Disturbed(3)) == Block(2.0, subtracted_share=0.5 / 6.5)


def test_rounds_of_a_busy_machine_without_disturbed_blocks_are_trusted(monkeypatch):
    """In the second of each four rounds channels_last has a disturbed block, ten times as slow."""
    monkeypatch.setattr(MachineLoad, "others_pct", lambda self: 60.0)
    calls = itertools.count()

    def block(step, steps, others):
        is_disturbed = next(calls) % 16 == 5
        seconds = 0.01 if step.layout is CONTIGUOUS else 0.005
        taken_share = 0.9 if is_disturbed else 0.0
        return Block(seconds * (10 if is_disturbed else 1), taken_share, subtracted_share=0.3)

    monkeypatch.setattr(paired, "timed_block", block)
    done = benchmark(variants_of(network()), workload(), stop=Stop())
    assert (done.verdict, done.rounds, done.rounds_left_out) == ("faster", 8, 3)
    assert done.ratio.ratio == pytest.approx(2.0) and "3 of 11 rounds are left out" in str(done)
    assert "unknown here" in str(replace(done, lost_pct=None))
    assert done.to_dict()["subtracted_pct"] == 30 and "core (30 % of the time)" in str(done)
    assert "subtracted" not in str(replace(done, subtracted_pct=4.9))
    assert done.ratio.ratio == pytest.approx(done.speeds[0].step_ms / done.speeds[1].step_ms)


def test_a_comparison_prints_and_becomes_json(monkeypatch):
    monkeypatch.setattr(MachineLoad, "others_pct", lambda self: 60.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(paired, "TakenTime", Disturbed)
    monkeypatch.setattr(alternate, "time", Mock(perf_counter=itertools.count(0, 20).__next__))
    done = compare_layouts(network(), 4, image_size=16, target_ci=5.0)
    [pair] = json.loads(json.dumps(done.to_dict(), allow_nan=False))["pairs"]
    ratio = done.ratio.ratio
    assert pair["candidate"] == "channels_last" and pair["ratio"] == pytest.approx(ratio, abs=1e-3)
    assert ratio == pytest.approx(done.speeds[1].images_per_s / done.speeds[0].images_per_s)
    assert done.verdict == pair["verdict"] == "not_comparable", "all steps lost most of their time"
    assert "60 %" in str(done) and "of the time of the rounds" in str(done)
    first_line = f"  precision {done.precision}, batch_size 4, images 3x16x16"
    assert str(done).splitlines()[0] == first_line and "images/s" in str(done)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"image_size": (5, 16, 16)}, "expected input"),
        ({"mode": "trian"}, "mode"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"precision": "fp61"}, "precision=fp61; use .*did you mean fp16"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(arguments, problem):
    with pytest.raises(ConfigError, match=problem) as error:
        compare_layouts(**{"model": network(), "batch_size": 4, **arguments})
    assert len(str(error.value).splitlines()) == 1


def test_both_layouts_are_compiled_with_their_own_strides(monkeypatch):
    """Symbolic ones, which the second layout gets from torch by default, make slower code."""
    strides = []

    def backend(graph, inputs):
        strides.extend(value.stride() for value in inputs if value.dim() == 4)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    for layout in (CONTIGUOUS, CHANNELS_LAST):
        settings = workload(compile=True, mode="infer")
        TimedStep(network(), layout, settings).warm_up()
    assert {(768, 256, 16, 1), (768, 1, 48, 3)} <= set(strides)
    assert all(isinstance(stride, int) for each in strides for stride in each)


# --- auto -----------------------------------------------------------------------------------------


def choose(model, **changes):
    settings = {"image_size": 16, "batch_size": 4, "precision": "fp32"}
    return auto.choose_memory_format(model, **(settings | {"time_limit_s": 0.1} | changes))


def measured(ratio, spread=0.001):
    """Every second round is so much faster, the others are slower."""
    return planted_comparison([ratio * (1 + spread), ratio / (1 + spread)] * 2)


@pytest.fixture
def measuring(monkeypatch):
    replaced = Mock(return_value=measured(1.5))
    monkeypatch.setattr(auto, "benchmark", replaced)
    monkeypatch.setattr(auto, "parity_before_use", lambda *_: Parity(True))
    monkeypatch.setattr(auto, "release_memory", lambda: None)
    return replaced


@pytest.mark.parametrize(
    ("ratio", "spread", "name"),
    [
        (1.5, 0.001, "channels_last"),
        (0.8, 0.001, "contiguous"),
        (1.02, 0.01, "contiguous"),
        (1.1, 0.08, "contiguous"),
    ],
)
def test_the_faster_one_beyond_noise_is_chosen_and_remembered(measuring, ratio, spread, name):
    measuring.return_value, is_cached = measured(ratio, spread), spread < 0.05
    first, second = choose(network()), choose(network())
    values = json.loads(json.dumps(first.to_dict()))
    assert (values["memory_format"], values["conversion"]) == (name, "full")
    undecided = "" if is_cached else ", not decided"
    assert first.reason.startswith(f"{name}{undecided}: channels_last is {ratio:.3f}x")
    assert ("measures again" in first.reason) is not is_cached
    assert second.cached is is_cached and second.channels_last == (name == "channels_last")
    assert second.verdict == first.verdict
    assert ("measured before: /" in second.reason) is is_cached
    assert measuring.call_count == (1 if is_cached else 2)


def test_what_could_change_the_answer_is_measured_anew(measuring):
    choose(network())
    for change in (
        {"batch_size": 8},
        {"image_size": (3, 16, 24)},
        {"precision": "bf16"},
        {"compile": True},
        {"cuda_graph": True},
        {"optimizer": "adamw"},
    ):
        assert not choose(network(), **change).cached, change
        assert measuring.call_args.args[1].settings.cuda_graph is ("cuda_graph" in change)
    assert not choose(network(width=16)).cached, "other shapes under the same name"
    assert not choose(nn.Sequential(*network(), nn.ReLU())).cached, "other modules, same shapes"
    frozen = network()
    next(frozen.parameters()).requires_grad_(False)
    assert not choose(frozen).cached, "a shorter backward pass"
    torch.use_deterministic_algorithms(True)
    try:
        assert not choose(network()).cached, "other kernels"
    finally:
        torch.use_deterministic_algorithms(False)
    assert choose(network()).cached


@pytest.mark.parametrize(
    ("gpu", "reason"),
    [
        (None, "other processes used the cores"),
        ({"other_processes": 0, "is_slowed": True, "clock_mhz": 900.0}, "heat"),
    ],
)
def test_a_disturbed_measurement_is_used_once_and_says_why(measuring, gpu, reason):
    measuring.return_value = replace(measured(1.5), lost_pct=None if gpu else 10.0, gpu=gpu)
    choice = choose(network())
    assert choice.channels_last and not choice.conclusive
    assert reason in choice.reason and "measures again" in choice.reason


@pytest.mark.parametrize(
    ("ratio", "spread", "by_itself_pct", "said"),
    [
        (1.004, 0.0001, 95.0, True),
        (1.0, 0.08, 95.0, False),
        (1.004, 0.0001, 0.0, False),
    ],
)
def test_a_model_that_is_channels_last_by_itself_is_as_fast_if_the_interval_says_so(
    measuring, ratio, spread, by_itself_pct, said
):
    measuring.return_value = replace(measured(ratio, spread), by_itself_pct=by_itself_pct)
    reason = choose(network()).reason
    assert ("does it by itself, and either setting is as fast" in reason) is said
    assert ("by itself" in reason) is (by_itself_pct > 0)


def test_a_cache_that_is_damaged_or_cannot_be_written(measuring, tmp_path, monkeypatch, caplog):
    choose(network())
    [path] = (tmp_path / "cache" / "cl_train").glob("layout-*")
    for damaged in ('{"memory_format": ', "[]", '{"memory_format": "channels_last"}'):
        path.write_text(damaged)
        assert not choose(network()).cached
    assert json.loads(path.read_text())["memory_format"] == "channels_last"
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    assert choose(network()).channels_last
    assert "not cached" in caplog.text


def test_what_cannot_be_measured_means_contiguous_and_is_said(measuring):
    measuring.side_effect = ConfigError("a batch of 1 does not fit into the memory of cpu")
    choice = choose(network())
    assert not choice.channels_last and "does not fit" in choice.reason
    assert not choose(network()).cached and measuring.call_count == 2, "the next run tries again"
    greedy = network()
    greedy.register_forward_pre_hook(Mock(side_effect=torch.OutOfMemoryError("planted")))
    assert "out of memory" in choose(greedy, batch_size=32).reason
    choice = choose(nn.Sequential(nn.Flatten(), nn.Linear(768, 5)))
    assert not choice.channels_last and "no convolutions" in choice.reason
    with pytest.raises(ConfigError, match="did you mean sgd"):
        choose(network(), optimizer="sdg")
    assert measuring.call_count == 2
