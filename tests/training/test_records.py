"""The records of a run: one JSON object a line, nothing twice after a resume, no NaN in JSON."""

import json
from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cl_train.training.records import Tracker, finite_or_null


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_resume_drops_what_a_killed_process_left(tmp_path: Path) -> None:
    first = Tracker(tmp_path, tensorboard=True, resumed_step=0)
    for step in (10, 20, 30):
        first.write("train", step, {"loss": 1.0})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": null}\n{"kind": "train", "st')  # damaged; killed in mid-write
    second = Tracker(tmp_path, tensorboard=True, resumed_step=20)
    second.write("train", 30, {"loss": 2.0})
    assert steps(tmp_path) == [10, 20, 30]
    events = EventAccumulator(str(tmp_path), purge_orphaned_data=True)
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(10, 1.0), (20, 1.0), (30, 2.0)]


def test_a_fresh_start_in_an_old_folder_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 5}\n')
    tracker = Tracker(tmp_path, tensorboard=False, resumed_step=0)
    tracker.write("train", 1, {"loss": 1.0})
    assert steps(tmp_path) == [1]


def test_a_resumed_run_drops_later_records(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, tensorboard=False, resumed_step=0)
    for step in (1, 2, 3):
        tracker.write("train", step, {"loss": float("nan")})
    Tracker(tmp_path, tensorboard=False, resumed_step=2)
    assert steps(tmp_path) == [1, 2]
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["loss"] is None


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    tracker = Tracker(None, tensorboard=True, resumed_step=0)
    tracker.write("train", 1, {"loss": 1.0})
    tracker.write_summary({})
    assert list(tmp_path.iterdir()) == []


def test_json_has_no_nan() -> None:
    assert finite_or_null({"a": [float("inf"), 1.5], "b": {"c": float("nan")}}) == {"a": [None, 1.5], "b": {"c": None}}


def test_the_comparison_of_a_sweep_writes_the_table(tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").touch()
    for folder, has_table in ((tmp_path / "sweep" / "job", False), (tmp_path / "run", True)):
        folder.mkdir()
        Tracker(folder, tensorboard=True, resumed_step=0).finish({"steps": 1}, {"model": "resnet18"})
        events = EventAccumulator(str(folder)).Reload()
        assert ("_hparams_/session_start_info" in events.summary_metadata) == has_table


def test_images_are_shown_once_per_sweep(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").touch()
    shown = []
    for name in ("true", "false"):
        (tmp_path / name).mkdir()
        tracker = Tracker(tmp_path / name, tensorboard=True, resumed_step=0)
        tracker.write_images(torch.zeros(4, 3, 8, 8), [0.5] * 3, [0.25] * 3)
        shown.append(EventAccumulator(str(tmp_path / name)).Reload().Tags()["images"])
    assert shown == [["first_batch"], []]
