"""Reading the logs of three programs, and the summary of their runs."""

import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from PIL import Image

from benchmarks import time_to_accuracy
from benchmarks.time_to_accuracy import (
    LINES,
    PROGRAMS,
    Settings,
    finished_run,
    measure,
    run_to_end,
    summarize,
    write_digits,
)

LOGS = {
    "cl_train": " * Prec@1 53.889 Prec@5 96.944 Loss 2.4579 on 360 images",
    "timm": """
Test: [   0/11]  Time: 0.031 (0.080)  Loss:   2.799 ( 2.319)  Acc@1:   0.000 ( 14.167)
Test: [  11/11]  Time: 0.031 (0.080)  Loss:   2.799 ( 2.319)  Acc@1:   0.000 ( 53.889)""",
    "torchvision": "Test:  Acc@1 53.889 Acc@5 96.944",
}


def run_that_prints(text, program, folder, limit_s, sleep_s):
    script = f"import time; print({text!r}, flush=True); time.sleep({sleep_s})"
    return run_to_end(LINES[program], [sys.executable, "-c", script], folder / "log", limit_s)


@pytest.mark.parametrize("program", LINES)
def test_the_accuracies_of_each_log(program, tmp_path):
    text = f"starting\n{LOGS[program]}\nend"
    run = run_that_prints(text, program, tmp_path, limit_s=120, sleep_s=0)
    assert run["exit_code"] == 0 and 0 < run["points"][0][0] <= run["total_s"]
    assert [top1 for _, top1 in run["points"]] == [53.889]
    assert (tmp_path / "log").read_text().count("\n") == LOGS[program].count("\n") + 3


def test_a_run_ends_at_its_limit(tmp_path):
    run = run_that_prints("", "torchvision", tmp_path, limit_s=0.5, sleep_s=600)
    assert run["points"] == [] and run["exit_code"] is None and run["total_s"] < 300


def test_medians_and_ratios_count_runs_that_miss_the_target():
    points = {
        "cl_train": [[[5.0, 90.0], [8.0, 95.0], [10.0, 99.0]], [[6.0, 96.0]], [[9.0, 99.0]]],
        "timm": [[[16.0, 95.5], [21.0, 96.0]], [[21.0, 95.0]], [[30.0, 94.9]]],
        "torchvision": [[[9.0, 94.0]], [], [[9.0, 99.0]]],
    }
    runs = [
        {"program": name, "seed": seed, "points": of_run}
        for name in points
        for seed, of_run in enumerate(points[name])
    ]
    found = summarize(runs)
    targets_s = [found[name]["target_s"] for name in LINES]
    assert targets_s == [[8.0, 6.0, 9.0], [21.0, 16.0, None], None]
    assert [found[name]["reached"] for name in LINES] == [3, 2, 1]
    assert found["cl_train"]["first_s"] == [6.0, 5.0, 9.0]
    assert [found[name]["epoch_s"] for name in LINES] == [[2.5] * 3, [5.0] * 3, None]
    assert found["timm"]["theirs_over_ours"] == {"target": [2.75, 2.0, 3.5], "epoch": [2.0] * 3}


def test_no_seed_begins_that_would_end_too_late(tmp_path, monkeypatch):
    clock = [0.0]

    def run(data, program, script, seed, work):
        clock[0] += 30.0
        points = [[8.0, 95.0]]
        return {"data": data, "program": program, "seed": seed, "points": points, "total_s": 9.0}

    monkeypatch.setattr(time_to_accuracy, "finished_run", run)
    monkeypatch.setattr(time_to_accuracy, "ensure_sample", lambda folder: None)
    monkeypatch.setattr(time_to_accuracy.time, "monotonic", lambda: clock[0])
    (tmp_path / "digits").mkdir()
    (tmp_path / "train.py").touch()
    asked = {"data": ["digits"], "same_recipe": True, "seeds": 8, "time_limit_s": 200.0}
    paths = {"timm_train": str(tmp_path / "train.py"), "work": str(tmp_path)}
    *_, last = measure(Settings(**asked, **paths))
    programs = [(run["seed"], run["program"].partition(",")[0]) for run in last["runs"]]
    assert programs[:4] == [(0, "cl_train"), (0, "timm"), (1, "timm"), (1, "cl_train")]
    assert len(programs) == 2 * 3 and last["git"]["commit"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_placeholder_is_filled_and_a_finished_run_is_kept(program, tmp_path, monkeypatch):
    started = Mock(return_value={"exit_code": None, "points": [[8.0, 95.0]]})
    monkeypatch.setattr(time_to_accuracy, "run_to_end", started)
    arguments = ("digits", program, Path("S/train.py"), 3, tmp_path)
    first, again = (finished_run(*arguments) for _ in range(2))
    (call,) = started.call_args_list
    command = call.args[1]
    assert first == again and "S/train.py" in command
    assert not any("{" in word for word in command)


@pytest.mark.slow
def test_digits_are_folders_of_classes(tmp_path):
    pytest.importorskip("sklearn")
    write_digits(tmp_path / "digits")
    train, val = (list(tmp_path.glob(f"digits/{split}/*/*.png")) for split in ("train", "val"))
    assert (len(train), len(val)) == (1437, 360)
    with Image.open(val[0]) as image:
        assert image.size == (32, 32)
