"""The meter against a made-up device that works behind the host, with loaders faster and slower than the device."""

from collections import deque

import pytest
import torch

from cl_train.system.machine import DeviceClock
from cl_train.training import log_lines
from cl_train.training.log_lines import ThroughputMeter

STEP_S = 0.060  # of the device
HOST_S = 0.004  # to submit a step


class Machine(DeviceClock):
    """A host, a device with a queue, and a loader with six slots that works while the host does anything else."""

    def __init__(self, loader_s: float, slots: int = 6) -> None:
        super().__init__(torch.device("cuda", 0))
        self.loader_s, self.slots = loader_s, slots
        self.now = self.device_free_at = self.idle_s = self.ahead_s = 0.0
        self.loaded_at = loader_s
        self.taken: deque[float] = deque()

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
        self.idle_s += max(0.0, self.now - self.device_free_at)
        self.device_free_at = max(self.now, self.device_free_at) + STEP_S
        self.now += HOST_S


def run(loader_s: float, steps: int = 200) -> tuple[Machine, float, float]:
    """The largest errors of `Data %` in points and of images/s in percent, after the first window."""
    machine = Machine(loader_s)
    meter = ThroughputMeter(0, machine, lambda: machine.now)
    meter.start(224)
    windows, records, truth = [], [], [(0.0, 0.0)]
    for step in range(1, steps + 1):
        with meter.waiting():
            machine.next_batch()
        machine.submit()
        meter.tick(256)
        machine.ahead_s = max(machine.ahead_s, machine.device_free_at - machine.now)
        if step % 10 == 0:
            truth.append((machine.device_free_at, machine.idle_s))
            windows.append(meter.close())
            records += [meter.measured(window) for window in windows[-2:-1]]  # one window late, as in a run
    points, percent = [], []
    for record, (start, idle), (end, more_idle) in zip(records, truth, truth[1:], strict=False):
        points.append(abs(record["data_wait_pct"] - 100 * (more_idle - idle) / (end - start)))
        percent.append(abs(100 * record["images_per_s"] * (end - start) / 2560 - 100))
    return machine, max(points[1:]), max(percent[1:])


@pytest.mark.parametrize("speed", [2.0, 1.25, 1.05, 1.0, 0.95, 0.83, 0.5])
def test_data_and_speed_are_those_of_the_device(speed: float) -> None:
    _, points, percent = run(STEP_S / speed)
    assert points <= 3 and percent <= 3


def test_the_host_stays_two_steps_ahead() -> None:
    machine, _, _ = run(0.001)
    assert machine.ahead_s <= log_lines.LEAD_STEPS * STEP_S
    assert machine.idle_s < 0.01, "the bound leaves the device busy"


def test_planted_the_hosts_clock_gives_a_wrong_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was reported before: the host's wait, however busy the device is meanwhile."""
    monkeypatch.setattr(log_lines, "LEAD_STEPS", 1000)
    monkeypatch.setattr(log_lines, "min", lambda host_waited_s, _: host_waited_s, raising=False)
    assert run(STEP_S / 1.05)[1] > 20 and run(STEP_S / 0.83)[1] > 20
