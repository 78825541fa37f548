"""Windows and averages, with a clock that only moves when told."""

import pytest

from cl_train.training.summary import speed, spread
from cl_train.training.throughput import ThroughputMeter


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_window_counts_images_waits_and_no_pauses() -> None:
    clock = Clock()
    meter = ThroughputMeter(warmup_steps=0, clock=clock)
    for _ in range(4):
        clock.now += 0.5
        meter.tick(images=32, wait_s=0.1)
    with meter.paused():
        clock.now += 60
    window = meter.window()
    assert (window["images"], window["seconds"]) == (128, pytest.approx(2.0))
    assert window["images_per_s"] == pytest.approx(64)
    assert window["step_ms"] == pytest.approx(500)
    assert window["data_wait_pct"] == pytest.approx(20)


def test_warmup_is_left_out_of_what_was_measured() -> None:
    clock = Clock()
    meter = ThroughputMeter(warmup_steps=3, clock=clock)
    windows = []
    for seconds in (9.0, 5.0, 1.0, 1.0):
        for _ in range(2):
            clock.now += seconds
            meter.tick(images=10, wait_s=0)
        windows.append(meter.window())
    assert [window["warmup"] for window in windows] == [True, True, False, False]
    end_to_end = speed(windows)["images_per_s"]["end_to_end"]
    assert (end_to_end["median"], end_to_end["windows"]) == (10, 2)


def test_a_run_of_warmup_alone_is_still_reported() -> None:
    clock = Clock()
    meter = ThroughputMeter(warmup_steps=100, clock=clock)
    clock.now += 1
    meter.tick(images=10, wait_s=0)
    assert speed([meter.window()])["images_per_s"]["end_to_end"]["windows"] == 1


def test_the_first_steps_of_a_new_image_size_are_warmup() -> None:
    clock = Clock()
    meter = ThroughputMeter(warmup_steps=2, clock=clock)
    windows = []
    for size in (64, 64, 96):
        meter.start(size)
        for _ in range(2):
            clock.now += 1
            meter.tick(images=size, wait_s=0)
            windows.append(meter.window())
    assert [(window["image_size"], window["warmup"]) for window in windows] == [
        (64, True), (64, True), (64, False), (64, False), (96, True), (96, True)
    ]  # fmt: skip


def test_start_drops_what_lay_between() -> None:
    clock = Clock()
    meter = ThroughputMeter(warmup_steps=0, clock=clock)
    clock.now += 1000  # an evaluation
    meter.start(0)
    clock.now += 1
    meter.tick(images=10, wait_s=0)
    assert meter.window()["images_per_s"] == pytest.approx(10)


def test_spread() -> None:
    values = spread([float(value) for value in range(101)])
    assert values == {"median": 50, "p5": 5, "p95": 95, "windows": 101}
    assert spread([3.0])["p95"] == 3.0
