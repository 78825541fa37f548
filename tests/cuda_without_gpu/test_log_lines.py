"""Log lines and speeds as on a GPU, which works behind the host: read one window late, whatever
ends the run.
"""

import signal
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from cl_train.system.machine import DeviceClock
from cl_train.training import active_run
from cl_train.training.active_run import ThroughputMeter
from cl_train.training.state import TrainingFault
from tests import networks
from tests.conftest import Run
from tests.faults import tiny

SHARED = [
    "data.image_size=16",
    "batch_size=8",
    "log_to=[]",
    "log_every=5",
]  # two epochs of twelve steps


def read_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active_run, "READ_AT_ONCE", ())


@pytest.mark.parametrize(
    "words",
    [
        ["model=tests.networks:nan_at_third_step", "on_nonfinite=skip"],
        pytest.param(["precision=fp16", "checkpoint.every_steps=7"], marks=pytest.mark.slow),
        pytest.param(["model=tests.networks:terminated_in_evaluation"], marks=pytest.mark.slow),
        pytest.param(["max_steps=7"], marks=pytest.mark.slow),
    ],
)
def test_the_records_are_the_same(
    train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    at_once = train(*SHARED, *words)
    read_late(monkeypatch)
    late = train(*SHARED, *words)
    assert (tiny.records(late.folder), late.exit_code) == (
        tiny.records(at_once.folder),
        at_once.exit_code,
    )
    steps = [record["step"] for record in late.records("train")]
    assert steps == sorted(set(steps)), "one record per window, in order"


@pytest.mark.slow
def test_a_resumed_run_logs_the_same_lines(
    train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal at a log line, between two of them, and at the end of an epoch."""

    def train_until(step: int, **more: Any) -> Run:
        network = partial(
            networks.signalling, signum=signal.SIGTERM, in_training=True, at_call=step
        )
        monkeypatch.setattr(networks, "terminated_in_training", network)
        return train(*SHARED, "model=tests.networks:terminated_in_training", "resume=auto", **more)

    whole = train_until(1000)
    read_late(monkeypatch)
    for stop_at in (5, 7, 12):
        part = train_until(stop_at)
        assert part.exit_code == 143 and part.summary["steps"] == stop_at
        assert tiny.records(train_until(1000, folder=part.folder).folder) == tiny.records(
            whole.folder
        )


def test_a_fault_is_named_with_its_step_and_the_lines_before_it_are_there(
    train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    read_late(monkeypatch)
    with pytest.raises(TrainingFault, match="at step 3 on rank 0"):
        train(*SHARED, "model=tests.networks:nan_at_third_step", folder=tmp_path)
    assert [record["step"] for record in Run(tmp_path, 1).records("train")] == [5]
    assert Run(tmp_path, 1).summary["status"] == "failed"


def test_the_sums_are_read_after_their_copy(
    train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the host has waited for the mark after it, the pinned memory holds something else."""
    at_once = train(*SHARED)
    read_late(monkeypatch)
    log_submitted = active_run.ActiveRun.log_submitted

    def arrive_late(run: Any) -> None:
        if run.submitted is not None:
            _, _, totals, copied, _ = run.submitted
            sums = totals.clone()
            totals.fill_(float("nan"))
            run.meter.clock.wait = lambda mark: totals.copy_(sums) if mark is copied else None
        log_submitted(run)

    monkeypatch.setattr(active_run.ActiveRun, "log_submitted", arrive_late)
    assert train(*SHARED).losses == at_once.losses


# --- the meter against a made-up device, with loaders faster and slower than it -------------------

STEP_S = 0.060  # of the device
HOST_S = 0.004  # to submit a step
SLOTS = 6  # of the loader, which works while the host does anything else


class Machine(DeviceClock):
    """A host, a device with a queue, and a loader."""

    def __init__(self, loader_s: float) -> None:
        super().__init__(torch.device("cuda", 0))
        self.now = self.device_free_at = self.idle_s = self.ahead_s = 0.0
        self.loader_s = self.loaded_at = loader_s
        self.taken = deque([0.0] * SLOTS, SLOTS)

    def mark(self) -> float:
        return max(self.now, self.device_free_at)

    def wait(self, mark: float) -> None:
        self.now = max(self.now, mark)

    def seconds(self, start: float, end: float) -> float:
        assert max(start, end) <= self.now, "the device has not reached the mark"
        return end - start

    def next_batch(self) -> None:
        self.now = max(self.now, self.loaded_at)
        self.taken.append(self.now)
        # The loader begins its next batch when a slot is free.
        self.loaded_at = max(self.loaded_at, self.taken[0]) + self.loader_s

    def submit(self) -> None:
        self.idle_s += max(0.0, self.now - self.device_free_at)
        self.device_free_at = self.mark() + STEP_S
        self.now += HOST_S
        self.ahead_s = max(self.ahead_s, self.device_free_at - self.now)


def measure(loader_s: float) -> tuple[Machine, float, float]:
    """The largest errors of `Data %` in points and of images/s in percent, after the first
    windows.
    """
    machine = Machine(loader_s)
    meter = ThroughputMeter(0, machine, lambda: machine.now)
    meter.start(224)
    truth, closed, points, percent = [(0.0, 0.0)], [], [], []
    for window in range(20):
        for _ in range(10):
            with meter.waiting():
                machine.next_batch()
            machine.submit()
            meter.tick(256)
        truth.append((machine.device_free_at, machine.idle_s))
        closed.append(meter.close())
        if window > 1:  # one window late, as in a run
            record, ((start, idle), (end, more_idle)) = meter.measured(closed[-2]), truth[-3:-1]
            points.append(abs(record["data_wait_pct"] - 100 * (more_idle - idle) / (end - start)))
            percent.append(abs(100 * record["images_per_s"] * (end - start) / 2560 - 100))
    return machine, max(points), max(percent)


@pytest.mark.parametrize("speed", [2.0, 1.25, 1.05, 1.0, 0.95, 0.83, 0.5])
def test_data_and_speed_are_those_of_the_device(speed: float) -> None:
    assert max(measure(STEP_S / speed)[1:]) <= 3


def test_the_host_stays_two_steps_ahead() -> None:
    machine, _, _ = measure(0.001)
    assert machine.ahead_s <= active_run.LEAD_STEPS * STEP_S
    assert machine.idle_s < 0.01, "the bound leaves the device busy"


def test_planted_the_hosts_clock_gives_a_wrong_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was reported before: the host's wait, however busy the device is meanwhile."""
    monkeypatch.setattr(active_run, "LEAD_STEPS", 1000)
    monkeypatch.setattr(active_run, "min", lambda host_waited_s, _: host_waited_s, raising=False)
    assert measure(STEP_S / 1.05)[1] > 20 and measure(STEP_S / 0.83)[1] > 20
