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


def test_a_window_counts_images_waits_and_no_pauses() -> None:
    meter, clock = meter_of(0)
    steps(meter, clock, 2, 0.5, wait_s=0.1, images=32)
    with meter.paused():
        clock.now += 60
    steps(meter, clock, 2, 0.5, wait_s=0.1, images=32)
    window = meter.measured(meter.close())
    assert (window["images"], window["seconds"]) == (128, pytest.approx(2.0))
    assert window["images_per_s"] == pytest.approx(64)
    assert window["step_ms"] == pytest.approx(500)
    assert window["data_wait_pct"] == pytest.approx(20)


def test_windows_that_are_read_late_keep_their_own_steps() -> None:
    meter, clock = meter_of(0)
    closed = []
    for wait_s in (0.1, 0.4):
        steps(meter, clock, 3, 0.5, wait_s)
        closed.append(meter.close())
        with meter.paused():
            clock.now += 7
    assert [meter.measured(window)["data_wait_pct"] for window in closed] == pytest.approx([20, 80])
    assert [meter.measured(window)["seconds"] for window in closed] == pytest.approx([1.5, 1.5])


def test_warmup_is_left_out_of_what_was_measured() -> None:
    meter, clock = meter_of(3)
    windows = []
    for seconds in (9.0, 5.0, 1.0, 1.0):
        steps(meter, clock, 2, seconds)
        windows.append(meter.measured(meter.close()))
    assert [window["warmup"] for window in windows] == [True, True, False, False]
    end_to_end = speed(windows)["images_per_s"]["end_to_end"]
    assert (end_to_end["median"], end_to_end["windows"]) == (10, 2)


def test_a_run_of_warmup_alone_is_still_reported() -> None:
    meter, clock = meter_of(100)
    steps(meter, clock, 1, 1.0)
    assert speed([meter.measured(meter.close())])["images_per_s"]["end_to_end"]["windows"] == 1


def test_the_first_steps_of_a_new_image_size_are_warmup() -> None:
    meter, clock = meter_of(2)
    windows = []
    for size in (64, 64, 96):
        meter.start(size)
        for _ in range(2):
            steps(meter, clock, 1, 1.0)
            windows.append(meter.measured(meter.close()))
    assert [(window["image_size"], window["warmup"]) for window in windows] == [
        (64, True), (64, True), (64, False), (64, False), (96, True), (96, True)
    ]  # fmt: skip


def test_start_drops_what_lay_between() -> None:
    meter, clock = meter_of(0)
    clock.now += 1000  # an evaluation
    meter.start(0)
    steps(meter, clock, 1, 1.0)
    assert meter.measured(meter.close())["images_per_s"] == pytest.approx(10)


def test_spread() -> None:
    values = spread([float(value) for value in range(101)])
    assert values == {"median": 50, "p5": 5, "p95": 95, "windows": 101}
    assert spread([3.0])["p95"] == 3.0
