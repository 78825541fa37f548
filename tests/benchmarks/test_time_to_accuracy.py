"""Reading the logs of both programs, and the summary of their runs."""

import sys

import pytest

from benchmarks.time_to_accuracy import LINES, run_to_end, summarize

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
