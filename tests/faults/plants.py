"""Faults planted inside a training process: hooks that it calls before train.py."""

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import cl_train.system.checkpoints
import cl_train.training.checkpointing
import cl_train.training.parts
import cl_train.training.setup
from tests.faults.forkserver import Function
from tests.processes import is_signal_received, wait_until


def on_rank(rank: int, hook: Function) -> None:
    if os.environ["RANK"] == str(rank):
        hook()


def before_step(act: Callable[[int, Any, Any], None]) -> None:
    """Call `act(number of the step, its parts, its batches)` before each step of the run."""
    original, numbers = cl_train.training.setup.build_state, itertools.count(1)

    def build_state(*arguments: Any, **named: Any) -> Any:
        state = original(*arguments, **named)

        def train_step(micro_batches: Any) -> Any:
            act(next(numbers), state.parts, micro_batches)
            return state.train_step(micro_batches)

        return replace(state, train_step=train_step)

    cl_train.training.setup.build_state = build_state


def hold_step(hold: Path, at_step: int) -> None:
    """This step of the process makes the file and waits until somebody deletes it."""

    def wait(step: int, *_: Any) -> None:
        if step == at_step:
            hold.touch()
            wait_until(lambda: not hold.exists())

    before_step(wait)


def signal_after_save(step: int, signum: int) -> None:
    """Send the signal to this process when the checkpoint of this step is on the disk."""
    original = cl_train.training.checkpointing.Checkpoints.save

    def save(self: Any, progress: Any, *rest: Any, **named: Any) -> None:
        original(self, progress, *rest, **named)
        if progress.step == step:
            self.store.wait()
            os.kill(os.getpid(), signum)
            wait_until(is_signal_received)

    cl_train.training.checkpointing.Checkpoints.save = save


def bad_gradient(at_step: int) -> None:
    """One gradient of this step is NaN, before ranks exchange them."""
    step = [0]

    def plant(now: int, parts: Any, micro_batches: Any) -> None:
        step[0] = now
        if now == 1:
            next(iter(parts.wrapped_model.parameters())).register_hook(spoil)

    def spoil(gradient: torch.Tensor) -> torch.Tensor | None:
        return gradient.fill_(torch.nan) if step[0] == at_step else None

    before_step(plant)


def clock_jumps_back() -> None:
    """The wall clock goes back an hour at each reading."""
    original, hours = time.time, itertools.count(1)
    time.time = lambda: original() - 3600.0 * next(hours)


def slow_data() -> None:
    """Reading the list of images takes hours."""

    def build_data(*arguments: Any, **named: Any) -> Any:
        print("reading the data", flush=True)
        time.sleep(10_000)

    cl_train.training.parts.build_data = build_data
