"""Measure how long work takes on a device."""

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch


def wait_for(device: torch.device) -> None:
    """Block the host until `device` has finished all work; on a CPU, work is finished when its call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed_s(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call of `work`. The host waits for the device before and after."""
    wait_for(device)
    started_at = time.perf_counter()
    work()
    wait_for(device)
    return time.perf_counter() - started_at


def step_times_s(step: Callable[[], object], steps: int, device: torch.device) -> list[float]:
    """Seconds of each of `steps` consecutive calls. On a GPU the host waits once, after the last call."""
    if device.type != "cuda":
        return [timed_s(step, device) for _ in range(steps)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    events[-1].synchronize()
    return [start.elapsed_time(end) / 1000 for start, end in pairwise(events)]


class DeviceClock:
    """Marks in the work that a device was given, and the seconds between them.

    A GPU reaches a mark (a CUDA event) later than the host sets it. On a CPU a mark is a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"

    def mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # blocking: a waiting host leaves its core free
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, mark: Any) -> None:
        """Block the host until the device has reached `mark`."""
        if self._is_cuda:
            mark.synchronize()

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks that the device has reached."""
        return start.elapsed_time(end) / 1000 if self._is_cuda else end - start
