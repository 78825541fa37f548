"""The records of a run: one JSON object a line, nothing twice after a resume, no NaN in JSON."""

import json
from pathlib import Path

from cl_train.config.schema import Config
from cl_train.training.records import Records, Trackers
from cl_train.training.state import Progress


def records(folder: Path | None, step: int = 0) -> Records:
    description = {"started": "2026-01-01T00:00:00+00:00", "device": "cpu", "data": "folder"}
    return Records(folder, Config(), Trackers([]), description, Progress(step=step, closed_step=step))


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_resume_drops_what_a_killed_process_left_a_new_run_all_and_other_ranks_write_nothing(tmp_path: Path) -> None:
    other = records(None)
    other.write("val", {"loss": 1.0})
    assert other.finish("completed")["val"] == {"loss": 1.0} and list(tmp_path.iterdir()) == []
    first = records(tmp_path)
    for step in (10, 20, 30):
        first.write("train", {"step": step, "loss": float("nan"), "more": [float("inf"), 1.5]})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": null}\n{"kind": "train", "st')  # damaged; killed in mid-write
    records(tmp_path, step=20).write("train", {"step": 30, "loss": 2.0})
    assert steps(tmp_path) == [10, 20, 30]
    before = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert before["loss"] is None and before["more"] == [None, 1.5], "JSON has no NaN or Infinity"
    failed = records(tmp_path, step=30).finish("failed", why="before its first step")
    assert failed["train"]["loss"] is None, "results of the earlier process are not its own"
    records(tmp_path).write("train", {"step": 1, "loss": 1.0})
    assert steps(tmp_path) == [1]
