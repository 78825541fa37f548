"""Reading a run folder, and the folders that are refused."""

import math
from pathlib import Path
from typing import Any

import pytest

from cl_train.comparison.pairs import read_run
from cl_train.config.schema import Config, ConfigError
from cl_train.config.validation import to_yaml
from tests.comparison.run_folders import folder_of


def test_a_run_folder_is_read_back(tmp_path: Path) -> None:
    run = read_run(folder_of(100.0).write(tmp_path / "run"))
    assert len(run.images_per_s) == len(run.steps) == 12, "the warm-up window is left out"
    assert min(run.images_per_s) > 99
    assert run.losses[10] == 3.0 and len(run.losses) == 13
    assert run.settings["data.image_size"] == 224
    assert run.times == (1.7e9, 1.7e9 + 720)
    assert run.problems == []


def test_the_program_s_own_config_is_read_back(tmp_path: Path) -> None:
    folder = folder_of()
    folder.config = to_yaml(Config())
    assert read_run(folder.write(tmp_path / "run")).problems == []


def test_an_incomplete_last_line_is_ignored_and_one_in_the_middle_is_a_problem(tmp_path: Path) -> None:
    folder = folder_of()
    folder.records.append('{"kind": "train", "st')
    assert read_run(folder.write(tmp_path / "last")).problems == []
    folder.records.insert(3, '{"kind": "train", "st')
    [problem] = read_run(folder.write(tmp_path / "middle")).problems
    assert "line 4" in problem


def test_a_diverged_run_has_no_loss_and_is_readable(tmp_path: Path) -> None:
    folder = folder_of()
    folder.records[5]["loss"] = math.nan
    folder.records[6]["loss"] = None
    assert len(read_run(folder.write(tmp_path / "run")).losses) == 11


@pytest.mark.parametrize("text", ["- a list", "a: [", "\x00", "a: &x {b: *x}", "[" * 5000])
def test_an_unreadable_config_is_refused(tmp_path: Path, text: str) -> None:
    folder = folder_of()
    folder.config = text
    with pytest.raises(ConfigError) as error:
        read_run(folder.write(tmp_path / "run"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("speed", [math.nan, math.inf, None, -1.0, 0, 1e308, 10**400, "100", True, [1]])
def test_an_impossible_speed_is_refused_with_its_line(tmp_path: Path, speed: Any) -> None:
    folder = folder_of()
    folder.records[4]["images_per_s"] = speed
    with pytest.raises(ConfigError, match=r"line 5.*images_per_s") as error:
        read_run(folder.write(tmp_path / "run"))
    assert "\n" not in str(error.value)


def test_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        read_run(tmp_path)
