"""Checkpoint files and their folder: what stays, which is the newest whole one, full disks. Kills:
tests/faults.
"""

import collections
import os
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from cl_train.errors import ConfigError
from cl_train.system import checkpoints
from cl_train.system.checkpoints import CheckpointError, CheckpointStore, load, snapshot, write
from tests.processes import LIMIT_S


def small_state(value=1.0):
    return {"model": {"w": torch.full((64, 3, 3, 3), float(value))}}


def save_step(store, state, step, **settings):
    store.write_step(state, step, **settings)
    store.finish()


def value_of(path):
    return float(load(path)["model"]["w"].mean())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_round_trip_keeps_values_and_plain_types_and_layouts_are_not_told_apart(tmp_path, layout):
    path = tmp_path / "a.pt"
    plain = {"n": None, "b": True, "f": 1.5, "s": "ü", "l": [1, {"x": b"y"}], 3: "int key"}
    weights = {"w": torch.randn(8, 4, 3, 3), "ambiguous": torch.randn(8, 4, 1, 1)}
    laid_out = {name: weight.to(memory_format=layout) for name, weight in weights.items()}
    write(path, snapshot(plain | laid_out))
    loaded = load(path)
    assert {key: loaded[key] for key in plain} == plain
    assert [loaded[name].stride() for name in weights] == [(36, 9, 3, 1), (4, 1, 1, 1)]
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())
    assert os.listdir(tmp_path) == ["a.pt"]
    without_this_package = torch.load(path, weights_only=True)
    assert torch.equal(without_this_package["w"], weights["w"])


@pytest.mark.parametrize("value", [object(), {"a": {1.5: 2}}])
def test_other_types_are_refused_before_anything_is_written(tmp_path, value):
    with pytest.raises(TypeError, match=r"state\['x'\]"):
        CheckpointStore(tmp_path / "c").write_step({"x": value}, 1)
    assert os.listdir(tmp_path) == []


def test_weights_of_both_formats_are_read(tmp_path):
    shared = torch.arange(6.0)
    for zipped in (True, False):
        state = collections.OrderedDict(w=shared, tied=shared)
        torch.save(state, tmp_path / "w.pth", _use_new_zipfile_serialization=zipped)
        assert torch.equal(checkpoints.read_torch_file(tmp_path / "w.pth")["tied"], shared)


save = partial(partial, torch.save)
# More damage: tests/faults, test_planted_files.py
BAD = {
    "missing": (lambda path: None, "No such file"),
    "foreign": (save({"model": {}}), "weights="),
    "newer": (lambda path: write(path, small_state() | {"format_version": 99}), "newer version"),
    "a module": (save(torch.nn.Linear(2, 2)), "run code"),
}
for data in (b"", b"PK\x03\x04", b"x" * 1000, pickle.dumps(print)):
    BAD[str(data)] = (partial(Path.write_bytes, data=data), "a.pt")


@pytest.mark.parametrize("name", BAD)
def test_other_files_are_refused_in_one_line(tmp_path, name):
    make, said = BAD[name]
    make(path := tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=said) as caught:
        load(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_store_keeps_the_last_ones_and_the_best(tmp_path):
    (tmp_path / ".step-00000001.pt.tmp-77").write_bytes(b"half")  # of a killed writer
    (tmp_path / "mine.txt").write_text("kept")
    store, state = CheckpointStore(tmp_path, keep=2), small_state()
    for step in (10, 20, 30, 100):
        state["model"]["w"].fill_(step)
        store.write_step(state, step, best=step == 20)
        state["model"]["w"].fill_(-1)  # the snapshot is taken before `save` returns
    store.link_best(100)
    last = tmp_path / "step-00000100.pt"
    assert set(os.listdir(tmp_path)) == {"best.pt", "mine.txt", "step-00000030.pt", last.name}
    assert (tmp_path / "best.pt").samefile(last) and value_of(last) == 100
    assert newest(store) == (last.name, 0)


def test_best_is_a_copy_where_hard_links_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError))
    save_step(CheckpointStore(tmp_path), small_state(5), 1, best=True)
    assert value_of(tmp_path / "best.pt") == 5 and os.stat(tmp_path / "best.pt").st_nlink == 1


def test_newest_skips_damaged_files_names_them_and_the_next_save_deletes_them(tmp_path):
    store = CheckpointStore(tmp_path, keep=3)
    assert store.newest() is None
    for step in (1, 2, 3):
        save_step(store, small_state(step), step, best=step == 1)
    for step in (2, 3):
        (tmp_path / f"step-0000000{step}.pt").write_bytes(b"")
    assert newest(store) == ("step-00000001.pt", 2)
    (tmp_path / "step-00000001.pt").unlink()
    assert newest(store) == ("best.pt", 2), "the last resort"
    save_step(store, small_state(9), 2)
    assert newest(store) == ("step-00000002.pt", 0)
    for path in tmp_path.glob("*.pt"):
        path.write_bytes(b"x" * 1000)
    with pytest.raises(CheckpointError, match=r"no checkpoint can be used:\n.*step-00000002"):
        store.newest()


def newest(store):
    """The file that a resume takes, and how many newer ones it skips; each is named."""
    found = store.newest()
    assert all("step-" in line for line in found[2])
    return found[0].name, len(found[2])


def test_a_run_that_goes_back_deletes_the_checkpoints_of_the_way_that_it_left(tmp_path):
    store = CheckpointStore(tmp_path, keep=3)
    for step in (12, 24, 18):
        save_step(store, small_state(step), step)
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000012.pt", "step-00000018.pt"}
    assert newest(store) == ("step-00000018.pt", 0)


def test_resume_targets(tmp_path):
    store = CheckpointStore(tmp_path / "run/checkpoints")
    elsewhere = CheckpointStore(tmp_path / "other")
    load_for_resume = checkpoints.load_for_resume
    assert load_for_resume("auto", store) is None
    save_step(store, small_state(), 4)
    for target in ("run", "run/checkpoints", "run/checkpoints/step-00000004.pt"):
        found = load_for_resume(str(tmp_path / target), elsewhere)
        assert found[0].name == "step-00000004.pt"
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged.pt").write_text("no checkpoint")
    problems = {"nope": "no such file", "empty": "no checkpoint", "damaged.pt": "damaged"}
    for name, problem in problems.items():
        with pytest.raises(ConfigError, match=problem):
            load_for_resume(str(tmp_path / name), elsewhere)


@pytest.mark.slow
def test_a_program_that_ends_by_an_exception_finishes_the_write_first(tmp_path):
    script = """import sys, torch; from cl_train.system.checkpoints import CheckpointStore
CheckpointStore(sys.argv[1], 1).write_step({"w": torch.ones(4_000_000)}, 1)
raise SystemExit(1)"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    assert subprocess.run(command, timeout=LIMIT_S).returncode == 1
    assert load(tmp_path / "step-00000001.pt")["w"].sum() == 4_000_000
