"""Reading the logs of both programs, and the summary of their runs."""

import sys

import pytest

from benchmarks import time_to_accuracy
from benchmarks.time_to_accuracy import LINES, Settings, measure, run_to_end, summarize
from cl_train.measure.alternate import Block

OURS, TIMM = LINES

LOGS = {
    OURS: " * Prec@1 53.889 Prec@5 96.944 Loss 2.4579 on 360 images",
    TIMM: """
Test: [   0/11]  Time: 0.031 (0.080)  Loss:   2.799 ( 2.319)  Acc@1:   0.000 ( 14.167)
Test: [  11/11]  Time: 0.031 (0.080)  Loss:   2.799 ( 2.319)  Acc@1:   0.000 ( 53.889)""",
}


@pytest.mark.parametrize("program", LINES)
def test_the_accuracies_of_each_log(program, tmp_path):
    script = f"print({LOGS[program]!r})"
    command = [sys.executable, "-c", script]
    run = run_to_end(LINES[program], command, tmp_path / "log")
    assert run["exit_code"] == 0 and 0 < run["points"][0][0] <= run["total_s"]
    assert [top1 for _, top1 in run["points"]] == [53.889]
    assert (tmp_path / "log").read_text().count("\n") == LOGS[program].count("\n") + 1


def test_medians_and_ratios_count_runs_that_miss_the_target():
    points = {
        OURS: [[[5.0, 90.0], [8.0, 95.0], [10.0, 99.0]], [[6.0, 96.0]], [[9.0, 99.0]]],
        TIMM: [[[16.0, 95.5], [21.0, 96.0]], [[21.0, 95.0]], [[30.0, 94.9]]],
    }
    runs = [
        {"program": name, "seed": seed, "points": of_run, "floor_s": 2.0}
        for name in points
        for seed, of_run in enumerate(points[name])
    ]
    found = summarize(runs)
    targets_s = [found[name]["target_s"] for name in LINES]
    assert targets_s == [[8.0, 6.0, 9.0], [21.0, 16.0, None]]
    assert [found[name]["reached"] for name in LINES] == [3, 2]
    assert found[OURS]["first_s"] == [6.0, 5.0, 9.0]
    assert [found[name]["epoch_s"] for name in LINES] == [[2.5] * 3, [5.0] * 3]
    assert [found[name]["share_of_floor"] for name in LINES] == [[0.8] * 3, [0.4] * 3]
    assert found[TIMM]["theirs_over_ours"] == {"target": [2.75, 2.0, 3.5], "epoch": [2.0] * 3}


def test_programs_take_turns_with_every_placeholder_filled(tmp_path, monkeypatch):
    commands = []

    def run(line, command, log):
        commands.append(command)
        return {"exit_code": 0, "points": [[8.0, 95.0]], "total_s": 9.0}

    monkeypatch.setattr(time_to_accuracy, "run_to_end", run)
    monkeypatch.setattr(time_to_accuracy, "ensure_sample", lambda folder: None)
    monkeypatch.setattr(time_to_accuracy, "bare_steps", lambda settings, device: Block(0.25))
    (tmp_path / "digits/train/3").mkdir(parents=True)
    for number in range(70):
        (tmp_path / f"digits/train/3/{number}.png").touch()
    (tmp_path / "train.py").touch()
    paths = {"timm_train": str(tmp_path / "train.py"), "work": str(tmp_path)}
    first, last = measure(Settings(data=["digits"], seeds=2, **paths))
    programs = [(run["seed"], run["program"]) for run in last["runs"]]
    assert programs == [(0, OURS), (0, TIMM), (1, TIMM), (1, OURS)]
    assert [run["floor_s"] for run in last["runs"]] == [0.5] * 4
    assert [one["summary"]["digits"][TIMM]["runs"] for one in (first, last)] == [1, 2]
    assert last["git"]["commit"]
    assert not any("{" in word for command in commands for word in command)
    assert [paths["timm_train"] in command for command in commands] == [False, True, True, False]
