"""The files of a comparison, and its verdict in words."""

import json
import re
import sys
from dataclasses import replace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from cl_train.commands.dashboard import write_dashboard
from cl_train.errors import ConfigError
from cl_train.sweeps.report import (
    Report,
    as_markdown,
    compare_folders,
    verdict_sentence,
    write_comparison,
)
from cl_train.sweeps.verdict import compare_runs
from tests.sweeps.run_folders import folder_of, run_of

FAILED = [{"job": 3, "overrides": "model=vgg11", "why": "killed by SIGKILL"}]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Two repeats of resnet18, with 1.5 times the speed; vit_b_16 is slower, and alexnet not
    comparable.
    """
    folder, runs = tmp_path_factory.mktemp("runs"), []
    for model, baseline, candidate, size in (
        ("resnet18", 100, 150, 32),
        ("resnet18", 110, 165, 32),
        ("vit_b_16", 100, 80, 32),
        ("alexnet", 100, 90, 64),
    ):
        runs += [run_of(folder, baseline, model=model)]
        runs += [run_of(folder, candidate, model=model, channels_last="true", batch_size=size)]
    return Report(compare_runs(runs), FAILED)


@pytest.fixture(scope="module")
def written(report, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write_comparison(report, folder)
    return folder


def test_the_report_has_the_agreed_fields(written):
    document = json.loads((written / "comparison.json").read_text())
    assert document["schema_version"] == 1
    first = document["pairs"][0]
    expected = {"model": "resnet18", "precision": "bf16", "speed": "end_to_end", "n": 2}
    expected |= {"baseline": "contiguous", "candidate": "channels_last", "verdict": "faster"}
    expected |= {"loss_gap": 0.0, "bottleneck": "compute"}
    assert {name: first[name] for name in expected} == expected
    numbers = {"baseline_images_per_s": 105.0, "candidate_images_per_s": 157.5, "ratio": 1.5}
    assert {name: first[name] for name in numbers} == pytest.approx(numbers, rel=0.01)
    assert first["ci95"][0] < first["ratio"] < first["ci95"][1] and isinstance(first["notes"], list)
    assert document["failed"] == FAILED
    lines = (written / "comparison.csv").read_text().splitlines()
    assert len(lines) == 4 and {"ci95_low", "ci95_high", "notes"} < set(lines[0].split(","))


def test_the_verdict_in_words(report, tmp_path):
    first, second, third = verdict_sentence(report).splitlines()
    ratio = "channels_last has 1.50 times the speed of contiguous (95 % interval 1.12 to 2.00)"
    assert first == f"resnet18 (bf16): {ratio}: faster."
    assert "0.80 times" in second and second.endswith(": slower.")
    assert "channels_last and contiguous are not comparable: batch_size differs" in third
    assert third.endswith(" 1 job did not finish.")
    assert verdict_sentence(Report([])).startswith("Nothing to compare")
    runs = [run_of(tmp_path, 100.0, precision="fp32"), run_of(tmp_path, 150.0, precision="bf16")]
    by_precision = Report(compare_runs(runs, "precision"))
    assert "None" not in verdict_sentence(by_precision) + as_markdown(by_precision)


def test_the_markdown_page(report):
    text = as_markdown(report)
    assert "batch_size differs" in text and "precision bf16" in text
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert ["3", "model=vgg11", "killed by SIGKILL"] in rows
    table = [cells for cells in rows if any("**" in cell for cell in cells[1:])]
    assert [cells[4] for cells in table] == ["**faster**", "**slower**", "**not comparable**"]
    assert [cells[3] for cells in table] == ["2", "1", "1"], "runs per side"
    assert ["untrusted" in cells[2] for cells in table] == [False, False, True]
    assert [cells[5] for cells in table] == ["90.00 / 91.00"] * 3
    assert [cells[6] for cells in table] == ["< 0.0001"] * 3


def test_a_command_is_code_on_the_page_with_the_threads_of_the_runs(tmp_path):
    runs = [run_of(tmp_path), run_of(tmp_path, channels_last="true")]
    facts = {"device_name": "AMD EPYC (2 threads)"}
    runs = [replace(run, summary=run.summary | facts) for run in runs]
    text = as_markdown(Report(compare_runs(runs)))
    benchmark = f"cl-train benchmark config={tmp_path}/run0 model=resnet18`"
    command = r"`OMP_NUM_THREADS=2 (cl-train|python train\.py) [^`]*`"
    assert re.search(rf"To decide it, .*: {command}$", text, re.MULTILINE)
    assert f"To decide it, the step alone, in a minute: `OMP_NUM_THREADS=1 {benchmark}" in text


def test_the_page_shows_the_chart(written):
    pytest.importorskip("matplotlib")
    assert (written / "comparison.png").is_file()
    assert "(comparison.png)" in (written / "comparison.md").read_text()


def test_pairs_that_hold_different_things_equal_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    pairs = []
    for other in ({"batch_size": 64}, {"precision": "fp32"}):
        pairs += compare_runs([run_of(tmp_path), run_of(tmp_path, channels_last="true", **other)])
    write_comparison(Report(pairs), tmp_path)
    assert not (tmp_path / "comparison.png").exists()
    header, *rows = (tmp_path / "comparison.csv").read_text().splitlines()
    assert {"batch_size", "precision"} <= {*header.split(",")} and len(rows) == 2


def test_tensorboard_has_one_run_per_side_with_both_losses(report, tmp_path):
    folder, tensors = tmp_path / "tensorboard", {}
    for _ in range(2):  # the second report replaces the first
        write_dashboard(replace(report, folder=tmp_path))
    assert {path.name for path in folder.iterdir()} == {"contiguous", "channels_last"}
    tags = ("spread/resnet18/low", "images_per_s/resnet18", "spread/resnet18/high")
    for side, speed in (("contiguous", 100.0), ("channels_last", 150.0)):
        assert len(list((folder / side).iterdir())) == 2, "its curves, and its row of HParams"
        events = EventAccumulator(str(folder / side)).Reload()
        assert "_hparams_/session_start_info" in events.summary_metadata
        alexnet = [tag for tag in events.Tags()["scalars"] if tag.startswith("whole_run/alexnet")]
        assert alexnet == ["whole_run/alexnet/top1"], "its speeds are not comparable"
        curves = [events.Scalars(tag) for tag in tags]
        assert [point.step for point in curves[0]] == list(range(20, 140, 10))
        first = [curve[0].value for curve in curves]
        assert first == pytest.approx([speed, 1.05 * speed, 1.1 * speed], rel=0.01)
        validation = events.Scalars("loss/resnet18/validation")
        assert [(point.step, point.value) for point in validation] == [(70, 2.0), (130, 1.0)]
        assert len(events.Scalars("loss/resnet18/training")) == 13
        for tag in events.Tags()["tensors"]:
            assert tag not in tensors, "TensorBoard would merge those of two runs"
            [tensors[tag]] = events.Tensors(tag)[0].tensor_proto.string_val
    assert tensors.pop("comparison/text_summary").decode() == as_markdown(report)
    speed, training, validation = Layout.FromString(*tensors.values()).category
    [series] = speed.chart[-1].margin.series  # the last is shown first
    assert (series.lower, series.value, series.upper) == tags
    assert training.chart[0].title == "resnet18, loss in training: < 0.0001 between the sides"
    assert [*validation.chart[0].multiline.tag] == ["^loss/resnet18/validation$"]


def test_folders_are_compared(tmp_path, capsys):
    first = folder_of(100.0).write(tmp_path / "a")
    second = folder_of(150.0, channels_last="true").write(tmp_path / "b")
    before = sorted(tmp_path.rglob("*"))
    [pair] = compare_folders([first, second], show_table=True).pairs
    assert pair.verdict == "faster" and capsys.readouterr().out.count("1.50 times the speed") == 1
    assert sorted(tmp_path.rglob("*")) == before
    write_dashboard(compare_folders([first, second], out=tmp_path / "out"))
    printed = capsys.readouterr().out
    assert printed.endswith(f"\nCurves: tensorboard --logdir {tmp_path}/out/tensorboard\n")
    assert (tmp_path / "out" / "comparison.json").is_file()
    (folder_of().write(tmp_path / "c") / "metrics.jsonl").write_text("")
    report = compare_folders([tmp_path])
    assert [pair.verdict for pair in report.pairs] == ["faster"]
    assert [job["overrides"] for job in report.failed] == ["c"]
    for folders in ([first, first], [tmp_path / "nothing"]):
        with pytest.raises(ConfigError):
            compare_folders(folders)
