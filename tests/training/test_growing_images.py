"""Runs whose images grow: killed in every phase and resumed, and what their records say."""

import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cl_train.comparison.pairs import compare_pair, read_run
from cl_train.config.schema import Config
from cl_train.training import loop
from tests.conftest import Run
from tests.faults.forkserver import Forked

Train = Callable[..., Run]
GROWING = ("data.size_schedule=[[0,16],[1,24],[2,32]]", "data.val_size=40", "epochs=3", "batch_size=16")


def train_to_the_end(cfg: Config, folder: Path) -> None:
    sys.exit(loop.train(cfg, folder).exit_code)


def forked(cfg: Config, folder: Path, kill_at: str) -> int | None:
    """Train in another process, which kills itself at `kill_at`; returns its exit code, negative for a signal."""
    folder.mkdir(exist_ok=True)
    return Forked(partial(train_to_the_end, cfg, folder), folder.with_suffix(".log"), {"KILL_AT": kill_at}).wait()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("words", "kills"),
    [
        ("checkpoint.every_steps=2", "train,16,2 val,40,1 train,24,4 train,32,1"),
        (
            "cuda_graph=true data.workers=2 channels_last=true batch_size=8",
            " ".join(f"train,{size},1 train,{size},3 val,40,2" for size in (16, 24, 32)),
        ),
    ],
)
def test_killed_in_every_phase_and_resumed_to_the_same_bits(
    tiny: Callable[..., Config], tmp_path: Path, words: str, kills: str
) -> None:
    """SIGKILL in training on each size, at its first and at a later batch, and in the evaluation after each size."""
    cfg = tiny(*GROWING, "model=tests.networks:killed_at", "ema_decay=0.9", "resume=auto", *words.split())
    assert forked(cfg, tmp_path / "whole", "train,0,0") == 0
    whole = Run(tmp_path / "whole", 0)
    for kill_at in kills.split():
        assert forked(cfg, tmp_path / "killed", kill_at) == -signal.SIGKILL, kill_at
    assert forked(cfg, tmp_path / "killed", "train,0,0") == 0
    killed = Run(tmp_path / "killed", 0)
    ours, theirs = killed.checkpoint(), whole.checkpoint()
    for name in ("model", "average", "progress"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=0)
    torch.testing.assert_close(ours["optimizer"]["state"], theirs["optimizer"]["state"], rtol=0, atol=0)
    assert killed.losses == whole.losses
    for kind in ("val", "val_average"):
        runs = [[(record["step"], record["loss"]) for record in run.records(kind)] for run in (killed, whole)]
        assert runs[0] == runs[1]


@pytest.mark.slow
def test_records_name_the_size_and_the_speed_is_that_of_the_last_one(train: Train) -> None:
    words = (*GROWING, "warmup_steps=1", "batch_size=24")
    run, shorter = train(*words), train(*words, "channels_last=true", "max_steps=6")
    windows = run.records("train")
    assert [w["image_size"] for w in windows] == [16] * 4 + [24] * 4 + [32] * 4
    assert [w["images"] for w in windows] == [24] * 12
    assert [w["warmup"] for w in windows] == [True, *[False] * 3] * 3
    assert run.summary["image_size"] == 32
    speeds = run.summary["images_per_s"]
    assert speeds["end_to_end"]["windows"] == 3 and set(speeds["by_image_size"]) == {"16", "24", "32"}
    assert read_run(run.folder).steps == [10, 11, 12] and read_run(run.folder).problems == []
    pair = compare_pair([read_run(run.folder)], [read_run(shorter.folder)])
    assert any("data.image_size differs: 32" in note for note in pair.notes)


@pytest.mark.slow
def test_every_size_is_compiled_once_with_static_shapes(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        shapes.extend(value.shape for value in inputs if isinstance(value, torch.Tensor) and value.shape[1:2] == (3,))
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    train(*GROWING, "compile=true", "epochs=3")
    found = [tuple(shape) for shape in shapes if len(shape) == 4 and shape[0] == 16]
    assert found == [(16, 3, size, size) for size in (16, 24, 32)]
