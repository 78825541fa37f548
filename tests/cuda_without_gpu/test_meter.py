"""The meter against a made-up device that works behind the host, with loaders faster and slower than the device."""

import itertools
from collections import deque
from typing import Any

import pytest
import torch

from cl_train.system.machine import DeviceClock
from cl_train.training import progress
from cl_train.training.progress import ThroughputMeter

STEP_S = 0.060  # of the device
HOST_S = 0.004  # to submit a step


class Machine(DeviceClock):
    """A host, a device with a queue, and a loader with six slots that works while the host does anything else."""

    def __init__(self, loader_s: float, slots: int = 6) -> None:
        super().__init__(torch.device("cuda", 0))
        self.loader_s, self.slots = loader_s, slots
        self.now = self.device_free_at = 0.0
        self.loaded_at = loader_s
        self.taken: deque[float] = deque()
        self.idle_s = 0.0

    def mark(self) -> list[float]:
        return [max(self.now, self.device_free_at)]

    def wait(self, mark: list[float]) -> None:
        self.now = max(self.now, mark[0])

    def seconds(self, start: list[float], end: list[float]) -> float:
        assert max(start[0], end[0]) <= self.now, "the device has not reached the mark"
        return end[0] - start[0]

    def next_batch(self) -> None:
        self.now = max(self.now, self.loaded_at)
        self.taken.append(self.now)
        # The loader begins its next batch when a slot is free: at most `slots` are loaded and not taken.
        slot_free_at = self.taken[-self.slots] if len(self.taken) >= self.slots else 0.0
        self.loaded_at = max(self.loaded_at, slot_free_at) + self.loader_s

    def submit(self) -> None:
        self.now += HOST_S
        self.idle_s += max(0.0, self.now - HOST_S - self.device_free_at)
        self.device_free_at = max(self.now - HOST_S, self.device_free_at) + STEP_S


def run(loader_s: float, steps: int = 200, log_every: int = 10) -> list[tuple[dict[str, Any], float, float]]:
    """For each window: its record, read one window late as in a run, and the true seconds and idle share."""
    machine = Machine(loader_s)
    meter = ThroughputMeter(0, machine, lambda: machine.now)
    meter.start(224)
    found, submitted, truth = [], None, [(0.0, 0.0)]
    for step in range(1, steps + 1):
        with meter.waiting():
            machine.next_batch()
        machine.submit()
        meter.tick(256)
        if step % log_every == 0:
            truth.append((machine.device_free_at, machine.idle_s))
            window = meter.close()
            if submitted is not None:
                found.append(meter.measured(submitted))
            submitted = window
    assert submitted is not None
    found.append(meter.measured(submitted))
    pairs = itertools.pairwise(truth)
    return [(record, b[0] - a[0], b[1] - a[1]) for record, (a, b) in zip(found, pairs, strict=True)]


def errors(loader_s: float) -> tuple[float, float]:
    """The largest errors of `Data %` in points, and of images/s in percent, after the first window."""
    windows = run(loader_s)[1:]
    points = [abs(record["data_wait_pct"] - 100 * idle_s / seconds) for record, seconds, idle_s in windows]
    percent = [abs(100 * record["images_per_s"] * seconds / 2560 - 100) for record, seconds, _ in windows]
    return max(points), max(percent)


@pytest.mark.parametrize("speed", [2.0, 1.25, 1.05, 1.0, 0.95, 0.83, 0.5])
def test_data_and_speed_are_those_of_the_device(speed: float) -> None:
    points, percent = errors(STEP_S / speed)
    assert points <= 3 and percent <= 3


def test_the_host_stays_two_steps_ahead() -> None:
    machine = Machine(0.001)
    meter = ThroughputMeter(0, machine, lambda: machine.now)
    for step in range(30):
        with meter.waiting():
            machine.next_batch()
        machine.submit()
        meter.tick(256)
        ahead = (machine.device_free_at - machine.now) / STEP_S
        assert ahead <= progress.LEAD_STEPS, step
    assert machine.idle_s < 0.01, "the bound leaves the device busy"


def test_planted_the_hosts_clock_gives_a_wrong_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was reported before: the host's wait, however busy the device is meanwhile."""
    monkeypatch.setattr(progress, "LEAD_STEPS", 1000)
    monkeypatch.setattr(progress, "min", lambda host_waited_s, _: host_waited_s, raising=False)
    assert errors(STEP_S / 1.05)[0] > 20 and errors(STEP_S / 0.83)[0] > 20
