"""Faults planted inside a training process: hooks that it calls before train.py, and models.

As a program: train.py with slower steps.
"""

import errno
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Container
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import cl_train.data.transforms
import cl_train.step.train_step
import cl_train.system.checkpoints
import cl_train.system.distributed
import cl_train.system.files
import cl_train.training.checkpointing
import cl_train.training.setup
from tests.faults.forkserver import Function, train_script
from tests.networks import Fault, dropout
from tests.processes import is_signal_received, wait_until

TORCHRUN_STEP_MS = 300  # the 12 steps outlast the search for the ranks, also on a busy machine
EIGHT_MB = 2_000_000  # float32 values


def failing(num_classes: int, how: str) -> nn.Module:
    """A model whose job fails as long as the file PLANT_BROKEN is there."""

    def fail(module: Fault, images: torch.Tensor, number: int) -> None:
        if os.path.exists(os.environ.get("PLANT_BROKEN", "")):
            if how == "raise":
                raise RuntimeError("planted in the forward pass")
            if how == "memory":
                raise torch.OutOfMemoryError("planted: tried to allocate 2.00 GiB")
            os.kill(os.getpid(), signal.SIGKILL)

    return nn.Sequential(Fault(fail), dropout(num_classes))


raising = partial(failing, how="raise")
killed = partial(failing, how="kill")
out_of_memory = partial(failing, how="memory")


class Slow(nn.Module):
    """Sleeps PLANT_MS per training batch and PLANT_EVAL_MS per validation batch, in which it
    creates PLANT_MARKER, or for the moving average of the weights PLANT_MARKER.ema.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = dropout(num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        time.sleep(int(os.environ.get("PLANT_MS" if self.training else "PLANT_EVAL_MS", 0)) / 1000)
        marker = os.environ.get("PLANT_MARKER")
        is_trial = len(images) <= 2  # before the first step
        if marker and not self.training and not is_trial:
            is_ema = not next(self.parameters()).requires_grad
            Path(f"{marker}.ema" if is_ema else marker).touch()
        return self.body(images)


def on_rank(rank: int, hook: Function) -> None:
    if os.environ["RANK"] == str(rank):
        hook()


def short_retries() -> None:
    """A disk that stays full ends the run after a second instead of a minute."""
    cl_train.system.files.RETRY_S = 1.0


def before_step(act: Callable[[int, Any, Any], None]) -> None:
    """Call `act(number of the step, its parts, its batches)` before each step of the run."""
    original, numbers = cl_train.training.setup.build_train_state, itertools.count(1)

    def build_train_state(*arguments: Any) -> Any:
        state = original(*arguments)

        def train_step(micro_batches: Any) -> Any:
            act(next(numbers), state.parts, micro_batches)
            return state.train_step(micro_batches)

        return replace(state, train_step=train_step)

    cl_train.training.setup.build_train_state = build_train_state


def slow_steps(ms: int, answer_s: int = 3) -> None:
    """Each step takes `ms` milliseconds more, so that a signal finds the run at work."""
    before_step(lambda *_: time.sleep(ms / 1000))
    cl_train.system.distributed.ANSWER_S = answer_s


def hold_step(hold: Path) -> None:
    """The third step makes this file and waits until somebody deletes it."""

    def wait(step: int, *_: Any) -> None:
        if step == 3:
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


def bad_loss(value: float, steps: Container[int]) -> None:
    """The loss of these steps is `value`."""
    original, step = cl_train.step.train_step.loss_of, [0]
    before_step(lambda now, *_: step.__setitem__(0, now))

    def loss_of(*arguments: Any) -> torch.Tensor:
        loss = original(*arguments)
        return loss * value if torch.is_grad_enabled() and step[0] in steps else loss

    cl_train.step.train_step.loss_of = loss_of


def bad_gradient(value: float, steps: Container[int]) -> None:
    """One gradient of these steps holds `value`, before ranks exchange them."""
    step = [0]

    def plant(now: int, parts: Any, micro_batches: Any) -> None:
        step[0] = now
        if now == 1:
            next(iter(parts.wrapped_model.parameters())).register_hook(spoil)

    def spoil(gradient: torch.Tensor) -> torch.Tensor | None:
        return gradient.fill_(value) if step[0] in steps else None

    before_step(plant)


def bad_images(steps: Container[int]) -> None:
    """The images of these steps are NaN: loss, gradients and BatchNorm's statistics go bad."""

    def spoil(step: int, parts: Any, micro_batches: Any) -> None:
        for batch in micro_batches if step in steps else ():
            batch.images.fill_(float("nan"))

    before_step(spoil)


def full_disk(steps: Container[int], minutes: float = 30) -> None:
    """Writing checkpoints of these steps fails; the run gives up after `minutes`."""
    cl_train.system.checkpoints.MAX_MINUTES_WITHOUT_CHECKPOINT = minutes
    original = cl_train.system.checkpoints.os.fsync

    def fsync(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        digits = "".join(letter for letter in name.split(".pt")[0] if letter.isdigit())
        if ".pt" in name and int(digits or 0) in steps:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(descriptor)

    cl_train.system.checkpoints.os.fsync = fsync


def bad_worker(number: int, leaves: bool) -> None:
    """Reading this image of a worker's life raises, or the worker `leaves` as by exit()."""
    original, calls, parent = cl_train.data.transforms.ImageReader.read, [0], os.getpid()

    def read(self: Any, *arguments: Any, **named: Any) -> int:
        calls[0] += 1
        if calls[0] == number and os.getpid() != parent:
            if leaves:
                os._exit(3)
            raise MemoryError("planted")
        return original(self, *arguments, **named)

    cl_train.data.transforms.ImageReader.read = read


def check_layout(layout: torch.memory_format) -> None:
    """Each step: 4-D weights have the strides of this format, and optimizer state those of its
    weight.
    """

    def check(step: int, parts: Any, micro_batches: Any) -> None:
        for parameter in parts.wrapped_model.parameters():
            strides = parameter.stride()
            assert parameter.dim() != 4 or parameter.is_contiguous(memory_format=layout), strides
            for value in parts.optimizer.state.get(parameter, {}).values():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    assert value.stride() == strides, (value.stride(), strides)

    before_step(check)


def clock_jumps_back() -> None:
    """The wall clock goes back an hour at each reading."""
    original, hours = time.time, itertools.count(1)
    time.time = lambda: original() - 3600.0 * next(hours)


def slow_data() -> None:
    """Reading the list of images takes hours."""

    def build_data(*arguments: Any, **named: Any) -> Any:
        print("reading the data", flush=True)
        time.sleep(10_000)

    cl_train.training.setup.build_data = build_data


def write_for_ever(folder: Path, background: bool) -> None:
    """Save 8 MB checkpoints whose values are their step, and note each finished save."""
    store = cl_train.system.checkpoints.CheckpointStore(folder, keep=3, background=background)
    values = torch.empty(EIGHT_MB)
    confirmed = os.open(folder.with_suffix(".confirmed"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    step = 0
    while True:
        step += 1
        state = {"values": values.fill_(step), "progress": {"step": step}}
        store.write_step(state, step, best=step % 4 == 1)
        if background and step % 3:
            continue  # let saves overlap with the next step
        store.wait()
        os.write(confirmed, f"{step}\n".encode())


if __name__ == "__main__":
    train_script(sys.argv[1:], partial(slow_steps, TORCHRUN_STEP_MS))
