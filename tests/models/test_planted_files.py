"""Files of strangers: everything that reads weights refuses those that hold code, and never runs
it.
"""

import contextlib
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from cl_train.errors import ConfigError
from cl_train.models.convert_file import NotConverted, convert_file
from cl_train.models.sources import load_weights_file
from cl_train.system import checkpoints

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = "tests.networks:small"
EXECUTED = Path("executed")  # whatever runs code creates it, in the working folder


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class Touch:
    """Creates the file when it is unpickled."""

    def __reduce__(self):
        return os.system, (f"touch {EXECUTED}",)


TOUCH = Touch()
WEIGHT = {"weight": torch.zeros(4, 3, 3, 3)}
MODEL = nn.Conv2d(3, 4, 3, bias=False)


def saved(content, name="saved.pth", save=torch.save, **options):
    save(content, name, **options)
    return Path(name)


def exported():
    return saved(torch.export.export(MODEL, (torch.randn(1, 3, 8, 8),)), "e.pt2", torch.export.save)


def pickled():
    Path("pickle.safetensors").write_bytes(pickle.dumps(TOUCH))
    return Path("pickle.safetensors")


def checkpoint():
    """With a valid digest, which anybody can compute."""
    content = {"model": {"weight": torch.zeros(2, 2)}, "facts": {"model": "os:system"}}
    checkpoints.write(Path("checkpoint.pt"), content)
    return Path("checkpoint.pt")


FILES = {
    "pickle named safetensors": pickled,
    "pickle in a zip": lambda: saved({"state_dict": {"a": TOUCH}}),
    "legacy format of an object": lambda: saved({"a": TOUCH}, _use_new_zipfile_serialization=False),
    "exported program": exported,
    "checkpoint with a program's name": checkpoint,
}
# Code that is only named is ignored, and the reader takes the rest.
HARMLESS = {"checkpoint with a program's name": {"checkpoint"}}


@pytest.mark.parametrize("name", FILES)
def test_planted_file(name):
    """In everything that reads such a file: `weights=` of training, `resume=`, and convert."""
    path, read = FILES[name](), set[str]()
    for reader, call in (
        ("weights", lambda: load_weights_file(MODEL, path)),
        ("checkpoint", lambda: checkpoints.load(path)),
        ("convert", lambda: convert_file(path, "out.pth", model=SMALL, input=(1, 3, 8, 8))),
    ):
        with contextlib.suppress(ConfigError, NotConverted, checkpoints.CheckpointError):
            call()
            read.add(reader)
        assert not EXECUTED.exists()
    assert read == HARMLESS.get(name, set())
