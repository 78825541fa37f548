"""Windows and averages, with a clock that only moves when told. A device behind the host: tests/cuda_without_gpu."""

import pytest
import torch

from cl_train.system.machine import DeviceClock
from cl_train.training.progress import ThroughputMeter
from cl_train.training.records import speed, spread


class Clock(DeviceClock):
    """The time of host and device."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.now = 100.0

    def mark(self) -> float:
        return self.now


def meter_of(warmup_steps: int) -> tuple[ThroughputMeter, Clock]:
    clock = Clock()
    return ThroughputMeter(warmup_steps, clock, clock.mark), clock


def steps(meter: ThroughputMeter, clock: Clock, count: int, seconds: float, wait_s: float = 0.0, images: int = 10):
    for _ in range(count):
        with meter.waiting():
            clock.now += wait_s
        clock.now += seconds - wait_s
        meter.tick(images)


def test_windows_count_images_waits_and_no_pauses_also_if_they_are_read_late() -> None:
    meter, clock = meter_of(0)
    clock.now += 1000  # an evaluation
    meter.start(0)
    closed = []
    for wait_s in (0.1, 0.4):
        steps(meter, clock, 2, 0.5, wait_s, images=32)
        with meter.paused():
            clock.now += 60
        steps(meter, clock, 2, 0.5, wait_s, images=32)
        closed.append(meter.close())
    windows = [meter.measured(window) for window in closed]
    for name, expected in (
        ("images", [128, 128]), ("seconds", [2.0, 2.0]), ("images_per_s", [64, 64]), ("step_ms", [500, 500]),
        ("data_wait_pct", [20, 80]),
    ):  # fmt: skip
        assert [window[name] for window in windows] == pytest.approx(expected), name


def test_warmup_is_left_out_unless_there_is_nothing_else() -> None:
    meter, clock = meter_of(3)
    windows = []
    for seconds in (9.0, 5.0, 1.0, 1.0):
        steps(meter, clock, 2, seconds)
        windows.append(meter.measured(meter.close()))
    assert [window["warmup"] for window in windows] == [True, True, False, False]
    end_to_end = speed(windows)["images_per_s"]["end_to_end"]
    assert (end_to_end["median"], end_to_end["windows"]) == (10, 2)
    assert speed(windows[:1])["images_per_s"]["end_to_end"]["windows"] == 1


def test_the_first_steps_of_a_new_image_size_are_warmup() -> None:
    meter, clock = meter_of(2)
    windows = []
    for size in (64, 64, 96):
        meter.start(size)
        for _ in range(2):
            steps(meter, clock, 1, 1.0)
            windows.append(meter.measured(meter.close()))
    sizes = [(window["image_size"], window["warmup"]) for window in windows]
    assert sizes == [(64, True), (64, True), (64, False), (64, False), (96, True), (96, True)]


def test_spread() -> None:
    values = spread([float(value) for value in range(101)])
    assert values == {"median": 50, "p5": 5, "p95": 95, "windows": 101}
    assert spread([3.0])["p95"] == 3.0
