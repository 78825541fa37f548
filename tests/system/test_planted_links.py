"""Links in a folder that somebody left: nothing is written, emptied or deleted behind them.

The names are those that a run, a report and a comparison leave, found by making them.
"""

import os
import shutil
from pathlib import Path

import pytest

from cl_train.errors import ConfigError
from cl_train.sweeps.report import compare_folders
from cl_train.system import files
from tests.conftest import contents

RUN = ("report=true", "profile=true", "epochs=4", "log_to=[tensorboard]")


@pytest.fixture(scope="module")
def victims(tmp_path_factory):
    """A file, and a folder with what a run might take for its own."""
    folder = tmp_path_factory.mktemp("victims")
    (folder / "notes.txt").write_text("precious")
    other = folder / "other"
    (other / "checkpoints").mkdir(parents=True)
    for name in ("step-00000099.pt", "best.pt", "config.yaml", "summary.json", "metrics.jsonl"):
        (other / name).write_text("precious")
        (other / "checkpoints" / name).write_text("precious")
    (other / "events.out.tfevents.1.x").write_text("precious")
    return folder


def plant(path, victims, kind):
    """A link at `path`, in the place of what is there."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    target = {"file": "notes.txt", "folder": "other", "dangling": "new"}[kind]
    path.symlink_to(os.path.relpath(victims / target, path.parent))


def names_in(folder):
    """Files and folders, without what has a time in its name; more names of a run in between."""
    everything = {path.relative_to(folder) for path in folder.rglob("*")}
    return sorted(str(name) for name in everything if "tfevents" not in name.name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "folder", "dangling"])
def test_a_run_writes_through_no_link(kind, train, tmp_path, victims):
    before = contents(victims)
    whole = train(*RUN, folder=tmp_path / "whole").folder
    train("evaluate_only=true", "report=true", "resume=auto", folder=whole)
    names = {*names_in(whole), "checkpoints/step-00000004.pt"}
    assert {"evaluation/.lock", "report/per_class.csv", "operators.txt", "train.log"} <= names
    for number, name in enumerate(sorted(names)):
        folder = tmp_path / f"{number}"
        words = ("evaluate_only=true", "report=true") if "evaluation" in name else RUN
        way = "resume=auto" if number % 2 or "evaluation" in name else "overwrite=true"
        shutil.copytree(whole, folder)
        plant(folder / name, victims, kind)
        try:
            train(*words, way, "seed=1" if way == "overwrite=true" else "seed=0", folder=folder)
        except (ConfigError, OSError) as error:
            assert str(folder) in str(error), name
        assert contents(victims) == before, (name, way)


@pytest.mark.parametrize("kind", ["file", "folder", "dangling"])
@pytest.mark.parametrize("name", [".lock", "train.log", "checkpoints", "evaluation/.lock"])
def test_a_run_folder_with_a_link_is_refused(name, kind, tiny, train, tmp_path, victims):
    before, folder = contents(victims), tmp_path / "run"
    plant(folder / name, victims, kind)
    words = ["overwrite=true"]
    if "evaluation" in name:
        train("max_steps=1", folder=folder)
        words = ["evaluate_only=true", "resume=auto"]
    with pytest.raises(ConfigError, match=rf"{name} is a link") as caught:
        train(*words, folder=folder)
    assert "\n" not in str(caught.value)
    assert contents(victims) == before


@pytest.mark.parametrize("name", files._OWN_FILES)
def test_a_folder_or_a_pipe_in_the_place_of_a_file_is_refused(name, train, tmp_path):
    for number, make in enumerate((Path.mkdir, os.mkfifo)):
        folder = tmp_path / str(number)
        folder.mkdir()
        make(folder / name)
        with pytest.raises(ConfigError, match=f"{name} is a link, a folder or a device"):
            train("resume=auto", folder=folder)


@pytest.mark.parametrize("kind", ["file", "folder", "dangling"])
def test_a_comparison_writes_through_no_link(kind, train, tmp_path, victims):
    from cl_train.commands.dashboard import write_dashboard

    before = contents(victims)
    runs = [train(f"seed={seed}", folder=tmp_path / f"run{seed}").folder for seed in (0, 1)]
    made = tmp_path / "made"
    write_dashboard(compare_folders(runs, "seed", out=made))
    names = names_in(made)
    assert {"comparison.csv", "comparison.png", "tensorboard"} <= {*names}
    for number, name in enumerate(names):
        out = tmp_path / f"out{number}"
        plant(out / name, victims, kind)
        try:
            write_dashboard(compare_folders(runs, "seed", out=out))
        except (ConfigError, OSError) as error:
            assert str(out) in str(error), name
        assert contents(victims) == before, name
