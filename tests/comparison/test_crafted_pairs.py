"""Pairs of run folders with something wrong in them: none gets a false verdict, none a traceback."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cl_train.comparison import report
from cl_train.comparison.report import compare_folders
from cl_train.config.schema import ConfigError
from tests.comparison.run_folders import Folder, folder_of

HOUR_S = 3600.0
Change = Callable[[Folder, Folder], None]


def both(change: Callable[[Folder], None]) -> Change:
    def apply(first: Folder, second: Folder) -> None:
        change(first)
        change(second)

    return apply


def config(**values: Any) -> Change:
    return lambda first, second: second.config.update(values)


def summary(**values: Any) -> Change:
    return lambda first, second: second.summary.update(values)


def data(**values: Any) -> Change:
    return lambda first, second: second.config["data"].update(values)


def record(index: int, **values: Any) -> Change:
    return lambda first, second: second.records[index].update(values)


def every_record(**values: Any) -> Change:
    def apply(first: Folder, second: Folder) -> None:
        for line in second.records:
            line.update(values)

    return apply


def line(text: Any, index: int = 3) -> Change:
    return lambda first, second: second.records.insert(index, text)


def without(*names: str) -> Change:
    def apply(first: Folder, second: Folder) -> None:
        for name in names:
            second.summary.pop(name, None)

    return apply


def file(**texts: Any) -> Change:
    def apply(first: Folder, second: Folder) -> None:
        for name, text in texts.items():
            setattr(second, name, text)

    return apply


def later(hours: float) -> Change:
    def apply(first: Folder, second: Folder) -> None:
        for entry in second.records:
            entry["time"] += hours * HOUR_S

    return apply


def loads(first_pct: float | None, second_pct: float | None, device: str = "cpu") -> Change:
    def apply(first: Folder, second: Folder) -> None:
        first.summary.update(others_pct=first_pct, device=device)
        second.summary.update(others_pct=second_pct, device=device)

    return apply


def resumed(before: dict[str, Any], after: dict[str, Any]) -> Change:
    """Resumed after six windows: facts in the records before and after."""

    def apply(first: Folder, second: Folder) -> None:
        for number, entry in enumerate(second.records):
            entry.update(before if number < 6 else after)

    return apply


def asked_and_ran(asked: str, ran: str) -> Change:
    """The second side asked for one layout, and the summary says that it ran with another."""

    def apply(first: Folder, second: Folder) -> None:
        second.config["channels_last"] = asked
        second.summary.update(channels_last_requested=asked, memory_format=ran)

    return apply


def copied_steps(first: Folder, second: Folder) -> None:
    second.records += [dict(entry) for entry in second.records[-3:]]


def interleaved(first: Folder, second: Folder) -> None:
    second.records = [entry for pair in zip(second.records, second.records, strict=True) for entry in pair]


# name: (change, verdict or "error", a word of the reason)
CASES: dict[str, tuple[Change, str, str]] = {
    "as it should be": (config(), "faster", ""),
    # other settings and facts
    "another model": (both(lambda f: None), "faster", ""),
    "other data": (data(name="folder"), "not_comparable", "data.name"),
    "an unknown setting": (config(turbo=True), "not_comparable", "turbo"),
    "another device": (summary(device="cuda"), "not_comparable", "device"),
    "another processor": (summary(device_name="other"), "not_comparable", "device_name"),
    "another torch": (summary(environment={"torch": "2.11.0"}), "not_comparable", "environment.torch"),
    "environment null": (summary(environment=None), "not_comparable", "environment.torch"),
    "another world size": (summary(world_size=2), "not_comparable", "world_size"),
    "another seed": (lambda a, b: (b.config.update(seed=1), b.summary.update(seed=1))[0], "faster", ""),
    "another log_every": (config(log_every=5), "faster", ""),
    # how the run ended
    "failed": (summary(status="failed"), "not_comparable", "failed"),
    "both failed": (both(lambda f: f.summary.update(status="failed")), "not_comparable", "failed"),
    "an unknown status": (summary(status="exploded"), "not_comparable", "exploded"),
    "interrupted": (summary(status="interrupted"), "faster", ""),
    "killed": (file(summary=None), "not_comparable", "summary.json"),
    # config.yaml and summary.json disagree
    "says contiguous": (summary(memory_format="contiguous"), "not_comparable", "memory_format"),
    "asked for false in one": (summary(channels_last_requested="false"), "not_comparable", "channels_last"),
    "config says false": (config(channels_last="false"), "not_comparable", "channels_last"),
    "another model in the summary": (summary(model="alexnet"), "not_comparable", "model"),
    "another precision in the summary": (config(precision="fp32"), "not_comparable", "precision"),
    "compiled in the summary": (summary(compile=True), "not_comparable", "compile"),
    "another image size in the summary": (summary(image_size=64), "not_comparable", "image_size"),
    # both sides ran the same
    "auto chose contiguous": (asked_and_ran("auto", "contiguous"), "not_comparable", "contiguous"),
    "auto chose channels_last": (asked_and_ran("auto", "channels_last"), "faster", ""),
    "both contiguous": (asked_and_ran("true", "contiguous"), "not_comparable", "contiguous"),
    "no layout known": (
        lambda a, b: (b.config.pop("channels_last"), b.summary.pop("channels_last_requested"))[0],
        "not_comparable",
        "channels_last",
    ),
    # changed half-way
    "resumed with the same": (resumed({"precision": "bf16"}, {"precision": "bf16"}), "faster", ""),
    "changed layout": (
        resumed({"memory_format": "contiguous"}, {"memory_format": "channels_last"}),
        "not_comparable",
        "memory_format",
    ),
    "changed precision": (resumed({"precision": "bf16"}, {"precision": "fp32"}), "not_comparable", "precision"),
    "changed world size": (resumed({"world_size": 2}, {"world_size": 1}), "not_comparable", "world_size"),
    "changed machine": (resumed({"device_name": "a"}, {"device_name": ["b"]}), "not_comparable", "device_name"),
    # records
    "a step twice": (copied_steps, "not_comparable", "step"),
    "two writers": (interleaved, "not_comparable", "step"),
    "steps backwards": (record(5, step=1), "not_comparable", "step"),
    "an incomplete line inside": (line('{"kind": "tr'), "not_comparable", "cannot be read"),
    "an incomplete last line": (line('{"kind": "tr', 99), "faster", ""),
    "an evaluation inside": (line({"kind": "val", "step": 30, "loss": 1.0}), "faster", ""),
    "three windows": (lambda a, b: b.records.__delitem__(slice(4, None)), "not_comparable", "windows"),
    "warm-up only": (every_record(warmup=True), "not_comparable", "windows"),
    "no windows": (file(records=[]), "error", "window"),
    "no metrics": (file(records=None), "error", "metrics.jsonl"),
    "a list as a record": (line("[1]"), "error", "line 4"),
    "a number as a record": (line("7"), "error", "line 4"),
    "null as a record": (line("null"), "error", "line 4"),
    "a deep record": (line("[" * 100_000), "not_comparable", "cannot be read"),
    "a loss of NaN": (record(12, loss=math.nan), "faster", ""),
    "a loss of 1e308": (record(12, loss=1e308), "faster", ""),
    "a loss in words": (record(12, loss="low"), "faster", ""),
    "a speed in words": (record(3, images_per_s="fast\nvery"), "error", "images_per_s"),
    "a step of null": (record(3, step=None), "error", "step"),
    "a fractional step": (record(3, step=30.5), "faster", ""),
    "a step in words": (record(3, step="30"), "error", "step"),
    "a wait of 1e308 %": (record(3, data_wait_pct=1e308), "error", "data_wait_pct"),
    "a wait in words": (record(3, data_wait_pct="long"), "error", "data_wait_pct"),
    "a time in words": (record(3, time="noon"), "error", "time"),
    "warm-up in words": (record(3, warmup="yes"), "faster", ""),
    # files
    "the summary is a list": (file(summary=[1]), "error", "summary.json"),
    "the summary is incomplete": (file(summary='{"status": "comp'), "error", "summary.json"),
    "a model of null": (summary(model=None), "faster", ""),
    "a model that is a list": (summary(model=["resnet18"]), "not_comparable", "model"),
    "a world size of 1e308": (summary(world_size=1e308), "error", "world_size"),
    "memory of NaN": (summary(peak_memory_gib=math.nan), "error", "peak_memory_gib"),
    "load in words": (summary(others_pct="high"), "error", "others_pct"),
    "an environment in words": (summary(environment="torch"), "not_comparable", "environment"),
    "a bare summary": (
        without("precision", "device", "device_name", "world_size", "environment"),
        "not_comparable",
        "differs",
    ),
    "a config that is a list": (file(config=[1]), "error", "config.yaml"),
    "a config with aliases": (file(config="a: &a [1]\nb: *a"), "not_comparable", "differs"),
    "no config": (file(config=None), "error", "config.yaml"),
    # times and other processes
    "no times": (every_record(time=None), "faster", ""),
    "an hour later": (later(1), "faster", ""),
    "a day later": (later(24), "not_comparable", "apart"),
    "a busy second run": (loads(1.0, 60.0), "not_comparable", "other processes"),
    "a busy first run": (loads(60.0, 1.0), "not_comparable", "other processes"),
    "busy on both sides": (loads(60.0, 60.0), "not_comparable", "other processes"),
    "busy CPU of a GPU run": (loads(1.0, 60.0, "cuda"), "not_comparable", "other processes"),
    "equally busy CPU of a GPU run": (loads(50.0, 55.0, "cuda"), "faster", ""),
    "unknown load": (loads(None, None), "faster", ""),
    "at the same time on a CPU": (later(-0.27), "faster", ""),
    "at the same time on a GPU": (
        lambda a, b: (loads(1.0, 1.0, "cuda")(a, b), later(-0.27)(a, b))[0],
        "not_comparable",
        "at the same time",
    ),
    # what else it did
    "a checkpoint at every step": (config(checkpoint={"every_steps": 1}), "not_comparable", "checkpoint.every_steps"),
    "a profile of one side": (config(profile=True), "not_comparable", "profile"),
    "every loss is NaN": (every_record(loss=math.nan), "not_comparable", "not finite"),
    "every update was skipped": (summary(amp={"skipped_steps": 130}), "not_comparable", "updates"),
    "a few updates were skipped": (summary(amp={"skipped_steps": 2}), "faster", ""),
    "most images were skipped": (summary(skipped_images=9999), "not_comparable", "images were skipped"),
    "skipped updates in words": (summary(amp={"skipped_steps": "all"}), "error", "amp"),
    "an unknown and a busy run": (loads(None, 60.0), "not_comparable", "other processes"),
    "loader-bound without a difference": (
        every_record(data_wait_pct=80.0, images_per_s=100.0),
        "not_comparable",
        "load",
    ),
}


@pytest.fixture
def tables_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the chart and TensorBoard, which take most of the time."""
    monkeypatch.setattr(report, "write_chart", lambda *_: False)
    monkeypatch.setattr(report, "_write_dashboard", lambda *_: None)


@pytest.mark.parametrize("name", CASES)
def test_crafted_pair(name: str, tmp_path: Path, tables_only: None, capsys: pytest.CaptureFixture[str]) -> None:
    change, expected, word = CASES[name]
    first, second = folder_of(100.0), folder_of(150.0, channels_last="true")
    change(first, second)
    folders = [first.write(tmp_path / "first"), second.write(tmp_path / "second")]
    for order in (folders, folders[::-1]):
        try:
            [pair] = compare_folders(order).pairs
        except ConfigError as error:
            assert expected == "error", error
            assert len(str(error).splitlines()) == 1 and word in str(error)
            continue
        assert pair.verdict == expected, pair.notes
        assert expected == "faster" or word in pair.notes[0]
        assert len(capsys.readouterr().out.splitlines()) == 1


def test_the_same_runs_get_the_same_verdict_by_folder_and_by_name(tmp_path: Path, tables_only: None) -> None:
    for name in ("as it should be", "a busy second run", "a step twice", "failed"):
        first, second = folder_of(100.0), folder_of(150.0, channels_last="true")
        CASES[name][0](first, second)
        folders = [first.write(tmp_path / name / "first"), second.write(tmp_path / name / "second")]
        [named], [found] = compare_folders(folders).pairs, compare_folders([tmp_path / name]).pairs
        assert (named.verdict, named.notes) == (found.verdict, found.notes)
