"""Links in a folder that somebody left: nothing is written, emptied or deleted behind them.

The names are those that a run, a report and a comparison leave, found by making them.
"""

import os
import shutil

import pytest

from cl_train.errors import ConfigError
from cl_train.sweeps.report import compare_folders
from tests.conftest import contents

RUN = ("report=true", "profile=true", "epochs=4", "log_to=[tensorboard]")


@pytest.fixture(scope="module")
def victims(tmp_path_factory):
    """A file, and a folder with what a run might take for its own."""
    folder = tmp_path_factory.mktemp("victims")
    (folder / "notes.txt").write_text("precious")
    for place in (folder / "other", folder / "other/checkpoints"):
        place.mkdir()
        for name in ("step-00000099.pt", "best.pt", "config.yaml", "metrics.jsonl"):
            (place / name).write_text("precious")
    (folder / "other/events.out.tfevents.1.x").write_text("precious")
    return folder


def plant(path, target):
    """A link at `path`, in the place of what is there."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(os.path.relpath(target, path.parent))


def names_in(folder):
    """Files and folders, without what has a time in its name."""
    everything = {path.relative_to(folder) for path in folder.rglob("*")}
    return sorted(str(name) for name in everything if "tfevents" not in name.name)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["notes.txt", "other"])
def test_a_run_writes_through_no_link(target, train, tmp_path, victims):
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
        plant(folder / name, victims / target)
        try:
            train(*words, way, "seed=1" if way == "overwrite=true" else "seed=0", folder=folder)
        except (ConfigError, OSError) as error:
            assert str(folder) in str(error), name
        assert contents(victims) == before, (name, way)


@pytest.mark.parametrize("name", [".lock", "train.log", "checkpoints", "evaluation/.lock"])
def test_a_run_folder_with_a_link_is_refused(name, train, tmp_path, victims):
    folder, words = tmp_path / "run", ["overwrite=true"]
    plant(folder / name, victims / "new")
    if "evaluation" in name:
        train("max_steps=1", folder=folder)
        words = ["evaluate_only=true", "resume=auto"]
    with pytest.raises(ConfigError, match=rf"{name} is a link"):
        train(*words, folder=folder)
    assert not (victims / "new").exists()


def test_a_comparison_writes_through_no_link(train, tmp_path, victims):
    from cl_train.commands.dashboard import write_dashboard

    before = contents(victims)
    runs = [train(f"seed={seed}", folder=tmp_path / f"run{seed}").folder for seed in (0, 1)]
    made = tmp_path / "made"
    write_dashboard(compare_folders(runs, "seed", out=made))
    names = names_in(made)
    assert {"comparison.csv", "comparison.png", "tensorboard"} <= {*names}
    for number, name in enumerate(names):
        out = tmp_path / f"out{number}"
        plant(out / name, victims / ("notes.txt" if (made / name).is_file() else "other"))
        try:
            write_dashboard(compare_folders(runs, "seed", out=out))
        except (ConfigError, OSError) as error:
            assert str(out) in str(error), name
        assert contents(victims) == before, name
