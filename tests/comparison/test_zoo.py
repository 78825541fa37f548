"""The zoo: a row per model from a process of its own, resumed tables, and what they are written as."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from cl_train.commands.zoo import main
from cl_train.comparison import zoo
from cl_train.config.benchmarks import ZooSettings
from cl_train.config.schema import ConfigError

OPTIONS = {"device": "cpu", "precision": "fp32", "batch_size": 2, "image_size": 64, "speed": False, "time_limit_s": 1.0}
ENVIRONMENT = {"torch": "2.15.0", "device_name": "a CPU"}


def row(name: str, **more: Any) -> dict[str, Any]:
    audit = {"kept": 5, "lost": 2, "restored": 1, "moved_pct": 3.0, "lost_forward": {"cat": 2}, "lost_backward": {}}
    base = {
        "model": name,
        "image_size": 64,
        "convolutions": 3,
        "converted": 3,
        "parity": {"passed": True},
        "audit": audit,
    }
    return {**base, "verdict": zoo.verdict({**base, **more}), **more}


SPEED = {
    "speeds": [{"images_per_s": 10.0, "peak_memory_gib": 0.5}, {"images_per_s": 15.0, "peak_memory_gib": 0.6}],
    "pairs": [{"ratio": 1.5, "ci95": [1.4, 1.6], "verdict": "faster"}],
}


def md_rows(path: Path) -> list[dict[str, str]]:
    lines = [line for line in path.with_suffix(".md").read_text().splitlines() if line.startswith("| ")]
    head, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(head, cells, strict=True)) for cells in body]


def test_image_sizes() -> None:
    options = ZooSettings(**OPTIONS)
    assert zoo.image_size_of("resnet18", options) == 64
    assert zoo.image_size_of("inception_v3", options) == 299
    assert zoo.image_size_of("vit_b_16", options) == zoo.image_size_of("timm/vit_tiny_patch16_224", options) == 224


def test_groups() -> None:
    assert len(zoo.GROUPS["tutorial"]) == 28 and len(zoo.GROUPS["timm"]) == 10
    assert set(zoo.GROUPS["tutorial"]) < set(zoo.GROUPS["torchvision"])


def test_verdicts() -> None:
    assert zoo.verdict(row("a")) == "loses the layout in 2 calls, 3.0 % of the step's bytes moved"
    assert zoo.verdict(row("a", parity={"passed": False})).startswith("do not use")
    assert zoo.verdict(row("a", convolutions=0)).startswith("no convolution")
    assert zoo.verdict(row("a", train=SPEED, infer=SPEED)).startswith("train faster (1.50x); infer faster (1.50x); ")


def test_tables_are_resumed_and_written_in_all_forms(tmp_path: Path) -> None:
    path = tmp_path / "zoo.json"
    table = zoo.open_table(path, ZooSettings(**OPTIONS), ENVIRONMENT)
    zoo.add_row(path, table, row("b"))
    zoo.add_row(path, table, {"model": "a", "error": "RuntimeError"})
    again = zoo.open_table(path, ZooSettings(**OPTIONS), ENVIRONMENT)
    assert [entry["model"] for entry in again["rows"]] == ["a", "b"]
    assert zoo.is_done(again, "b") and not zoo.is_done(again, "a") and not zoo.is_done(again, "c")
    zoo.add_row(path, again, row("a"))
    assert len(json.loads(path.read_text())["rows"]) == 2
    lines = md_rows(path)
    assert [line["model"] for line in lines] == ["a", "b"] and lines[0]["lost forward"] == "cat 2"
    assert (lines[0]["image_size"], lines[0]["parity"]) == ("64", "passed")
    for other in ({**OPTIONS, "precision": "bf16"}, {**OPTIONS, "batch_size": 3}):
        with pytest.raises(ConfigError, match="other settings"):
            zoo.open_table(path, ZooSettings(**other), ENVIRONMENT)
    path.write_text("{")
    with pytest.raises(ConfigError, match="not a table"):
        zoo.open_table(path, ZooSettings(**OPTIONS), ENVIRONMENT)


def test_tables_with_speeds(tmp_path: Path) -> None:
    path = tmp_path / "zoo.json"
    table = zoo.open_table(path, ZooSettings(**{**OPTIONS, "speed": True}), ENVIRONMENT)
    zoo.add_row(path, table, row("a", train=SPEED, infer=SPEED))
    zoo.add_row(path, table, {"model": "b", "error": "out of memory"})
    lines = md_rows(path)
    assert (lines[0]["train ratio"], lines[0]["infer ci95"], lines[0]["train GiB"]) == (
        "1.5",
        "1.40-1.60",
        "0.50 / 0.60",
    )
    assert lines[1]["verdict"] == "error: out of memory"


def test_a_row_of_a_real_model() -> None:
    entry = zoo.measure_model("squeezenet1_1", ZooSettings(**OPTIONS))
    assert entry["parity"]["passed"] and entry["convolutions"] == entry["converted"] == 26
    assert entry["audit"]["lost_forward"] == {} and entry["audit"]["lost_backward"] == {}
    json.dumps(entry)


@pytest.mark.slow
def test_the_command_runs_resumes_and_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    words = ["model=shufflenet_v2_x0_5", "device=cpu", "precision=fp32", "batch_size=2",
             "data.image_size=64", "time_limit_s=0.5", f"out={tmp_path}"]  # fmt: skip
    assert main(words) == 0
    version = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    table = json.loads((tmp_path / f"zoo-chosen-fp32-cpu-torch{version}.json").read_text())
    (entry,) = table["rows"]
    for mode in ("train", "infer"):
        assert all(speed["images_per_s"] > 0 and speed["peak_memory_gib"] > 0 for speed in entry[mode]["speeds"])
        assert entry[mode]["pairs"][0]["ci95"][0] <= entry[mode]["pairs"][0]["ratio"]
    assert entry["audit"]["lost_forward"] == {"clone": 3, "cat": 13}
    capsys.readouterr()
    assert main(words) == 0
    assert "1 of them done" in capsys.readouterr().out


def test_wrong_words() -> None:
    with pytest.raises(ConfigError, match="did you mean resnet1"):
        main(["model=resnet19"])


def test_a_failed_model_in_front_has_the_columns_of_the_others(tmp_path: Path) -> None:
    path = tmp_path / "zoo.json"
    table = zoo.open_table(path, ZooSettings(**{**OPTIONS, "speed": True}), ENVIRONMENT)
    zoo.add_row(path, table, {"model": "a", "error": "out of memory"})
    zoo.add_row(path, table, row("b", train=SPEED, infer=SPEED))
    lines = md_rows(path)
    assert [line["train ratio"] for line in lines] == ["", "1.5"]
