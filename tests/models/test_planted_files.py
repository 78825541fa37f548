"""Files of strangers: everything that reads weights refuses those that hold code, and never runs
it.
"""

import contextlib
import os
import pickle
import zipfile
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


class Setting(nn.Module):
    """Creates the file when it is loaded by TorchScript."""

    def __init__(self):
        super().__init__()
        self.path = str(EXECUTED)

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return self.path, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.path = state[0]
        self.training = state[1]
        torch.save(torch.zeros(1), self.path)

    def forward(self, x):
        return x


TOUCH = Touch()
WEIGHT = {"weight": torch.zeros(4, 3, 3, 3)}


def saved(content, **options):
    torch.save(content, "saved.pth", **options)
    return Path("saved.pth")


def raw(content, name):
    Path(name).write_bytes(content)
    return Path(name)


def rewritten(source, changes):
    """`source`, with members of its archive replaced or added."""
    with zipfile.ZipFile(source) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    root = next(iter(members)).partition("/")[0]
    members |= {f"{root}/{inner}": content for inner, content in changes.items()}
    with zipfile.ZipFile(source, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return source


def pickle_zip(content):
    """torch.save's zip format with an ordinary pickle inside."""
    return rewritten(saved(WEIGHT), {"data.pkl": pickle.dumps(content, protocol=2)})


def exported():
    program = torch.export.export(nn.Sequential(nn.Conv2d(3, 4, 3)), (torch.randn(1, 3, 8, 8),))
    torch.export.save(program, "plain.pt2")
    return Path("plain.pt2")


def scripted():
    torch.jit.script(Setting()).save("scripted.pt")
    EXECUTED.unlink(missing_ok=True)
    return Path("scripted.pt")


def checkpoint(content):
    """A file with a valid digest, which anybody can compute."""
    checkpoints.write(Path("checkpoint.pt"), content)
    return Path("checkpoint.pt")


FILES = {
    "pickle named safetensors": lambda: raw(pickle.dumps(TOUCH), "pickle.safetensors"),
    "pickle in a zip": lambda: pickle_zip({"state_dict": {"a": TOUCH}}),
    "legacy format of an object": lambda: saved({"a": TOUCH}, _use_new_zipfile_serialization=False),
    "exported program": exported,
    "TorchScript named pth": lambda: scripted().rename("renamed.pth"),
    "state dict and a program": lambda: rewritten(saved(WEIGHT), {"code/a.py": b"x"}),
    "checkpoint with a program's name": lambda: checkpoint(
        {"model": {"weight": torch.zeros(2, 2)}, "facts": {"model": "os:system"}}
    ),
    "plain state dict": lambda: saved(WEIGHT),
}
# Code that is only named is ignored, and the reader takes the rest.
HARMLESS = {"checkpoint with a program's name": {"checkpoint"}, "plain state dict": {"weights"}}
SLOW = [name for name in FILES if name.startswith(("exported", "TorchScript"))]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in FILES]
)
def test_planted_file(name):
    """In everything that reads such a file: `weights=` of training, `resume=`, and convert."""
    path, read = FILES[name](), set[str]()
    for reader, call in (
        ("weights", lambda: load_weights_file(nn.Conv2d(3, 4, 3, bias=False), path)),
        ("checkpoint", lambda: checkpoints.load(path)),
        ("convert", lambda: convert_file(path, "out.pth", model=SMALL, input=(1, 3, 8, 8))),
    ):
        with contextlib.suppress(ConfigError, NotConverted, checkpoints.CheckpointError):
            call()
            read.add(reader)
        assert not EXECUTED.exists()
    assert read == HARMLESS.get(name, set())
