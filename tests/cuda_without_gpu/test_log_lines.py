"""Log lines and speeds as on a GPU, which works behind the host: read one window late, whatever
ends the run.
"""

from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from cl_train.config.schema import BenchmarkSettings
from cl_train.errors import TrainingFault
from cl_train.measure import paired, suite, timed_step
from cl_train.measure.alternate import Block
from cl_train.measure.paired import timed_block
from cl_train.measure.statistics import HOST_BOUND_PCT
from cl_train.measure.timed_step import TimedStep
from cl_train.sweeps.report import Report, _to_decide
from cl_train.sweeps.verdict import compare_runs
from cl_train.system import machine as system_machine
from cl_train.system.machine import DeviceClock
from cl_train.training import active_run
from cl_train.training.throughput import ThroughputMeter
from tests.conftest import Run
from tests.faults import tiny
from tests.sweeps.run_folders import run_of

# Two epochs of twelve steps.
WORDS = ["data.image_size=16", "batch_size=8", "log_to=[]", "log_every=5"]
slow = pytest.mark.slow


def read_late(monkeypatch):
    monkeypatch.setattr(active_run, "READ_AT_ONCE", ())


@pytest.mark.parametrize(
    "words",
    [
        "model=tests.networks:nan_at_third_step",
        "model=tests.networks:nan_at_third_step on_nonfinite=skip",
        pytest.param("precision=fp16 checkpoint.every_steps=7", marks=slow),
        pytest.param("model=tests.networks:terminated_in_evaluation", marks=slow),
    ],
)
def test_the_records_and_the_end_are_the_same(train, monkeypatch, tmp_path, words):
    def end_of(folder):
        try:
            return train(*WORDS, *words.split(), folder=folder).exit_code
        except TrainingFault as fault:  # which names its step
            return str(fault)

    at_once, late = tmp_path / "at_once", tmp_path / "late"
    expected = end_of(at_once)
    read_late(monkeypatch)
    assert end_of(late) == expected
    assert tiny.records(late) == tiny.records(at_once)
    steps = Run(late, 0).steps
    assert steps and steps == sorted(set(steps)), "one record per window, in order"


def test_the_sums_are_read_after_their_copy(train, monkeypatch):
    """Until the host has waited for the mark after it, the pinned memory holds something else."""
    at_once = train(*WORDS)
    read_late(monkeypatch)
    log_pending = active_run.ActiveRun.log_pending

    def arrive_late(run):
        if run.pending is not None:
            totals, copied = run.pending.totals, run.pending.copied
            sums = totals.clone()
            totals.fill_(float("nan"))
            run.meter.clock.wait = lambda mark: totals.copy_(sums) if mark is copied else None
        log_pending(run)

    monkeypatch.setattr(active_run.ActiveRun, "log_pending", arrive_late)
    assert train(*WORDS).losses == at_once.losses


# --- the meter against a made-up device, with loaders faster and slower than it -------------------

STEP_S = 0.060  # of the device
HOST_S = 0.004  # to submit a step
SLOTS = 6  # of the loader, which works while the host does anything else


class Machine(DeviceClock):
    """A host, a device with a queue, and a loader."""

    def __init__(self, loader_s=0.0, host_s=HOST_S, queue_s=1e9):
        self.host_s, self.queue_s = host_s, queue_s  # queue_s: of work that its queue can hold
        super().__init__(torch.device("cuda", 0))
        self.now = self.device_free_at = self.idle_s = self.ahead_s = 0.0
        self.loader_s = self.loaded_at = loader_s
        self.taken = deque([0.0] * SLOTS, SLOTS)

    def mark(self):
        return max(self.now, self.device_free_at)

    def has_reached(self, mark):
        return mark <= self.now

    def wait(self, mark):
        self.now = max(self.now, mark)

    def seconds(self, start, end):
        assert max(start, end) <= self.now, "the device has not reached the mark"
        return end - start

    def next_batch(self):
        self.now = max(self.now, self.loaded_at)
        self.taken.append(self.now)
        # The loader begins its next batch when a slot is free.
        self.loaded_at = max(self.loaded_at, self.taken[0]) + self.loader_s

    def submit(self):
        self.idle_s += max(0.0, self.now - self.device_free_at)
        self.device_free_at = self.mark() + STEP_S
        self.now += self.host_s
        self.now = max(self.now, self.device_free_at - self.queue_s)
        self.ahead_s = max(self.ahead_s, self.device_free_at - self.now)


@pytest.mark.parametrize(
    ("loader_s", "host_s"),
    [(STEP_S / 2, HOST_S), (STEP_S / 0.95, HOST_S), (0.2, HOST_S), (0.0, 0.08)],
)
def test_data_and_speed_are_those_of_the_device(loader_s, host_s):
    """Windows are read one late, as in a run."""
    machine = Machine(loader_s, host_s)
    meter = ThroughputMeter(0, machine, lambda: machine.now)
    meter.start(224)
    truth, closed = [(0.0, 0.0)], []
    for window in range(20):
        for _ in range(10):
            with meter.waiting():
                machine.next_batch()
            machine.submit()
            meter.tick(256)
        truth.append((machine.device_free_at, machine.idle_s))
        closed.append(meter.close())
        if window > 1:
            record = meter.measured(closed[-2])
            (start, idle), (end, more_idle) = truth[-3:-1]
            assert record["images_per_s"] == pytest.approx(2560 / (end - start), rel=0.03)
            assert (record["host_bound_pct"] >= HOST_BOUND_PCT) is (host_s > STEP_S)
            if host_s < STEP_S:
                waited_pct = 100 * (more_idle - idle) / (end - start)
                assert record["data_wait_pct"] == pytest.approx(waited_pct, abs=3)
    assert machine.ahead_s <= 2 * STEP_S, "the batch of each submitted step is in memory"
    if loader_s == STEP_S / 2:
        assert machine.idle_s < 0.05, "the host is far enough ahead to keep the device busy"


@pytest.mark.parametrize(
    ("host_s", "queue_s", "pct"), [(0.004, 1e9, 7), (0.004, 0.09, 7), (0.08, 1e9, 100)]
)
def test_the_time_until_the_last_launch_is_that_of_the_host(host_s, queue_s, pct, monkeypatch):
    """Also where the device's queue is full, and the host waits for it."""
    machine = Machine(host_s=host_s, queue_s=queue_s)
    monkeypatch.setattr(system_machine, "DeviceClock", lambda device: machine)
    monkeypatch.setattr(timed_step.time, "perf_counter", lambda: machine.now)
    step = TimedStep.__new__(TimedStep)
    step.step, step.workload = machine.submit, SimpleNamespace(device=machine._device)
    block = timed_block(step, 20, None)
    assert 100 * block.host_share == pytest.approx(pct, abs=1)
    assert block.seconds == pytest.approx(max(host_s, STEP_S))


@pytest.mark.parametrize(("pct", "verdict"), [(50, "no_difference"), (95, "inconclusive")])
def test_equal_speeds_of_the_host_are_no_equal_speeds_of_the_layouts(
    pct, verdict, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    block = Block(0.01, host_share=pct / 100)
    monkeypatch.setattr(paired, "timed_block", lambda step, steps, taken: block)
    monkeypatch.setattr(suite, "choose_device", lambda name: torch.device("cpu"))
    settings = BenchmarkSettings(model=["tests.networks:small"], batch_size=[2], image_size=16)
    settings = replace(settings, parity="false", precision=["fp32"], cuda_graph=["false"])
    [result] = suite.run_suite(settings)["results"]
    assert result["pairs"][0]["verdict"] == verdict
    is_told = "cuda_graph=true or a larger batch" in result["text"]
    assert is_told is (pct > 90) and ("cuda_graph=true" in (result["to_decide"] or "")) is is_told


def test_a_sweep_of_host_bound_runs_is_not_no_difference(tmp_path):
    runs = [run_of(tmp_path, channels_last=value) for value in 4 * ("false", "true")]
    for pct, verdict in ((0.0, "no_difference"), (95.0, "inconclusive")):
        bound = [
            replace(run, windows=[replace(each, host_bound_pct=pct) for each in run.windows])
            for run in runs
        ]
        [pair] = compare_runs(bound)
        assert pair.verdict == verdict and pair.bottleneck == ("host" if pct else "compute")
        assert any("cuda_graph=true" in note for note in pair.notes) is bool(pct)
        assert ("cuda_graph=true" in (_to_decide(pair, Report([pair])) or "")) is bool(pct)
