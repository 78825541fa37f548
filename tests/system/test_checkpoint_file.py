"""Checkpoint files, without kills (those are in tests/faults)."""

import os
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from cl_train.system import checkpoint_file
from cl_train.system.checkpoint_file import CheckpointError, load, snapshot, write


def small_state(value: float = 1.0) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((64, 3, 3, 3), float(value))},
        "progress": {"step": 3, "epoch": 0},
        "classes": ["a", "b"],
    }


def test_round_trip_keeps_values_and_plain_types(tmp_path: Path) -> None:
    state = {
        "t": torch.arange(6.0).reshape(2, 3),
        "n": None,
        "b": True,
        "f": 1.5,
        "s": "ü",
        "l": [1, {"x": b"y"}],
        3: "int key",
    }
    write(tmp_path / "a.pt", snapshot(state))
    loaded = load(tmp_path / "a.pt")
    assert torch.equal(loaded.pop("t"), state.pop("t"))
    assert {key: loaded[key] for key in state} == state
    assert os.listdir(tmp_path) == ["a.pt"]


def test_torch_load_and_zipfile_read_the_file_without_this_package(tmp_path: Path) -> None:
    write(tmp_path / "a.pt", snapshot(small_state()))
    assert torch.equal(torch.load(tmp_path / "a.pt", weights_only=True)["model"]["w"], torch.ones(64, 3, 3, 3))
    assert zipfile.ZipFile(tmp_path / "a.pt").testzip() is None


def test_channels_last_tensors_are_stored_contiguous_also_ambiguous_ones(tmp_path: Path) -> None:
    weight = torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last)
    pointwise = torch.randn(8, 4, 1, 1).to(memory_format=torch.channels_last)
    assert pointwise.stride() != (4, 1, 1, 1)
    write(tmp_path / "a.pt", snapshot({"w": weight, "p": pointwise}))
    loaded = load(tmp_path / "a.pt")
    assert loaded["w"].stride() == (36, 9, 3, 1) and torch.equal(loaded["w"], weight)
    assert loaded["p"].stride() == (4, 1, 1, 1) and torch.equal(loaded["p"], pointwise)


def test_both_layouts_give_the_same_bytes(tmp_path: Path) -> None:
    weight = torch.randn(8, 4, 3, 3)
    write(tmp_path / "a.pt", snapshot({"w": weight}))
    write(tmp_path / "b.pt", snapshot({"w": weight.to(memory_format=torch.channels_last)}))
    assert load(tmp_path / "a.pt").keys() == load(tmp_path / "b.pt").keys()
    contents = []
    for name in ("a.pt", "b.pt"):
        with zipfile.ZipFile(tmp_path / name) as file:
            contents.append([file.read(member) for member in file.namelist() if "/data/" in member])
    assert contents[0] == contents[1]


@pytest.mark.parametrize("value", [{1, 2}, object(), {"a": {1.5: 2}}, torch.nn.ReLU()])
def test_other_types_are_refused_before_anything_is_written(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TypeError, match=r"state\['x'\]"):
        write(tmp_path / "a.pt", snapshot({"x": value}))
    assert os.listdir(tmp_path) == []


def test_load_names_the_reason(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        load(tmp_path / "none.pt")
    torch.save({"model": {}}, tmp_path / "foreign.pt")
    with pytest.raises(CheckpointError, match=r"SHA-256.*weights="):
        load(tmp_path / "foreign.pt")
    (tmp_path / "empty.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="truncated: 0 bytes"):
        load(tmp_path / "empty.pt")
    with pytest.raises(CheckpointError, match="regular file"):
        load(tmp_path)


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_file, "FORMAT_VERSION", 99)
    write(tmp_path / "a.pt", snapshot(small_state()))
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="newer version"):
        load(tmp_path / "a.pt")


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.marker}",))


class EvilEval(Evil):
    def __reduce__(self) -> Any:
        return (eval, (f"open({str(self.marker)!r}, 'w')",))


class EvilGlobal(Evil):
    def __reduce__(self) -> Any:
        return (subprocess.Popen, (["touch", str(self.marker)],))


@pytest.mark.parametrize("kind", [Evil, EvilEval, EvilGlobal])
@pytest.mark.parametrize("place", ["top", "nested"])
def test_malicious_checkpoints_are_refused_even_with_a_right_digest(
    tmp_path: Path, kind: type[Evil], place: str
) -> None:
    marker = tmp_path / "marker"
    evil = kind(marker)
    state = {"model": evil} if place == "top" else {"model": {"w": torch.ones(2), "deep": [{"x": (evil,)}]}}
    write(tmp_path / "evil.pt", state)  # without `snapshot`, which refuses other types
    with pytest.raises(CheckpointError, match=r"evil\.pt"):
        load(tmp_path / "evil.pt")
    assert not marker.exists()


def test_a_fifo_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "step-00000001.pt")
    with pytest.raises(CheckpointError, match="regular"):
        load(tmp_path / "step-00000001.pt")
