"""What a tiny run leaves in its folder, and how it is compared with an undisturbed one."""

import json
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from cl_train.system.checkpoints import CheckpointStore, load

STEPS_PER_EPOCH, EPOCHS = 6, 2
STEPS = STEPS_PER_EPOCH * EPOCHS
# What a record says about time (and how many images were timed); everything else must be equal.
CLOCKS = "images time seconds images_per_s step_ms data_wait_pct warmup peak_memory_gib"


def summary(run: Path) -> dict[str, Any]:
    path = run / "summary.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def newest_step(run: Path) -> int:
    found = CheckpointStore(run / "checkpoints").newest()
    return found[1]["progress"]["step"] if found else 0


def final_state(run: Path) -> dict[str, Any]:
    """The newest checkpoint, without what names the machine or the minute."""
    found = CheckpointStore(run / "checkpoints").newest()
    assert found is not None and not found[2], f"{run}: {found and found[2]}"
    return {key: found[1][key] for key in ("model", "optimizer", "scaler", "average", "progress")}


def records(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what a clock says, and without the notes of resumes."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [line for line in lines if line["kind"] != "resume"]
    clocks = CLOCKS.split()
    return [{key: value for key, value in line.items() if key not in clocks} for line in kept]


def check_equal(run: Path, reference: Path) -> None:
    """The final state and every logged number, bit by bit."""
    problems = differences(final_state(run), final_state(reference))
    assert not problems, f"{run.name}: {problems[:3]}"
    assert records(run) == records(reference), f"{run.name}: records differ"


def differences(ours: Any, theirs: Any) -> list[str]:
    """Where two states differ by as much as a bit."""
    (leaves, structure), (others, other_structure) = map(tree_flatten_with_path, (ours, theirs))
    assert structure == other_structure, (structure, other_structure)

    def is_same(one: Any, other: Any) -> bool:
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            return one.dtype == other.dtype and torch.equal(one, other)
        return type(one) is type(other) and bool(one == other)

    return [
        keystr(path)
        for (path, one), (_, other) in zip(leaves, others, strict=True)
        if not is_same(one, other)
    ]


def check_loadable(run: Path) -> None:
    """Only whole checkpoints may have their names."""
    for path in (run / "checkpoints").glob("*.pt"):
        load(path)
