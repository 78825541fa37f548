"""A run small enough to be killed a hundred times: its command line, models that fail, and what it leaves."""

import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from cl_train.system.checkpoints import CheckpointStore, load
from tests.networks import Fault, dropout

STEPS_PER_EPOCH, EPOCHS = 6, 2
STEPS = STEPS_PER_EPOCH * EPOCHS
# What a record says about time (and how many images were timed); everything else must be equal.
CLOCK_FIELDS = {"images", "time", "seconds", "images_per_s", "step_ms", "data_wait_pct", "warmup", "peak_memory_gib"}


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
    """Sleeps PLANT_MS per training batch and PLANT_EVAL_MS per validation batch.

    In the evaluation it creates PLANT_MARKER, or for the moving average of the weights PLANT_MARKER.ema.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = dropout(num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        time.sleep(int(os.environ.get("PLANT_MS" if self.training else "PLANT_EVAL_MS", 0)) / 1000)
        marker = os.environ.get("PLANT_MARKER")
        if marker and not self.training and len(images) > 2:  # not in the trial before the first step
            is_ema = not next(self.parameters()).requires_grad
            Path(f"{marker}.ema" if is_ema else marker).touch()
        return self.body(images)


def words(images: Path, run: Path, **settings: Any) -> list[str]:
    """The command line of a tiny run; `settings` with `__` for the dot of a key."""
    values: dict[str, Any] = {
        "model": "tests.networks:dropout", "data": "folder", "data.root": f"'{images}'", "data.image_size": 32,
        "data.workers": 0, "batch_size": 8, "epochs": EPOCHS, "precision": "fp32", "device": "cpu", "ema_decay": 0.9,
        "log_every": 2, "warmup_steps": 2, "optim.lr": 0.5, "checkpoint.every_steps": 1, "checkpoint.keep": 3,
        "resume": "auto", "hydra.run.dir": f"'{run}'",
    }  # fmt: skip
    values |= {key.replace("__", "."): value for key, value in settings.items()}
    return [f"{key}={value}" for key, value in values.items() if value is not None]


def records(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what a clock says, and without the notes of resumes."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [line for line in lines if line["kind"] != "resume"]
    return [{key: value for key, value in line.items() if key not in CLOCK_FIELDS} for line in kept]


def losses(run: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in records(run) if record["kind"] == "train"}


def check_losses(run: Path, reference: Path, tolerance: float) -> None:
    """The same steps, and losses that differ by at most `tolerance`, relative."""
    ours, theirs = losses(run), losses(reference)
    assert ours.keys() == theirs.keys(), f"{run.name}: steps {sorted(ours)}"
    gap = max(abs(ours[step] - theirs[step]) / theirs[step] for step in ours)
    assert gap <= tolerance, f"{run.name}: losses differ by {gap:.1e}"


def final_state(run: Path) -> dict[str, Any]:
    """The newest checkpoint, without what names the machine or the minute."""
    found = CheckpointStore(run / "checkpoints").newest()
    assert found is not None, f"{run} has no checkpoint"
    _, state, skipped = found
    assert not skipped, skipped
    return {key: state[key] for key in ("model", "optimizer", "scaler", "average", "progress")}


def differences(ours: Any, theirs: Any) -> list[str]:
    """Where two states differ by as much as a bit."""
    (leaves, structure), (others, other_structure) = map(tree_flatten_with_path, (ours, theirs))
    assert structure == other_structure
    return [keystr(path) for (path, one), (_, other) in zip(leaves, others, strict=True) if not is_same(one, other)]


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def check_loadable(run: Path) -> None:
    """Only whole checkpoints may have their names."""
    for path in (run / "checkpoints").glob("*.pt"):
        load(path)
