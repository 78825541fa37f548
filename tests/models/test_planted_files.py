"""Files made to run code, or to allocate much more than their size, through everything that reads a file of weights."""

import contextlib
import io
import json
import os
import pickle
import struct
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cl_train.commands import audit, convert
from cl_train.config.schema import ConfigError
from cl_train.models.convert_file import NotConverted, convert_file
from cl_train.models.sources import load_weights_file
from cl_train.system import checkpoints

pytestmark = pytest.mark.filterwarnings("ignore")
MAX_GROWTH_BYTES = 512 << 20  # of the process, by all files together; each of the bombs would take gigabytes


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


class Setting(nn.Module):
    """Writes a file when it is loaded by TorchScript."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return self.path, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.path = state[0]
        self.training = state[1]
        torch.save(torch.zeros(1), self.path)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Planted:
    """Writes the files of the table; whatever runs code creates `executed`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.executed = folder / "executed"
        self.touch = Touch(self.executed)

    def pickle_zip(self, name: str, content: Any) -> Path:
        """torch.save's zip format with an ordinary pickle inside."""
        with zipfile.ZipFile(self.folder / name, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(content, protocol=2))
            archive.writestr("archive/version", "3")
            archive.writestr("archive/byteorder", "little")
        return self.folder / name

    def raw(self, name: str, content: bytes) -> Path:
        (self.folder / name).write_bytes(content)
        return self.folder / name

    def saved(self, name: str, content: Any, **options: Any) -> Path:
        torch.save(content, self.folder / name, **options)
        return self.folder / name

    def rewritten(self, source: Path, name: str, changes: dict[str, bytes], rename: tuple[str, str] = ("", "")) -> Path:
        """A copy of an archive with members replaced, added or renamed."""
        with zipfile.ZipFile(source) as old, zipfile.ZipFile(self.folder / name, "w") as new:
            root = old.namelist()[0].partition("/")[0]
            for member in old.namelist():
                inner = member.partition("/")[2]
                if inner not in changes:
                    new.writestr(f"{root}/{rename[1] if inner == rename[0] else inner}", old.read(member))
            for inner, content in changes.items():
                new.writestr(f"{root}/{inner}", content)
        return self.folder / name

    def state_dict(self) -> Path:
        return self.saved("state.pth", {"weight": torch.zeros(4, 3, 3, 3)})

    def exported(self, name: str = "", content: bytes = b"") -> Path:
        """A program, whose member `name` has this content."""
        path = self.folder / "plain.pt2"
        torch.export.save(torch.export.export(nn.Sequential(nn.Conv2d(3, 4, 3)), (torch.randn(1, 3, 8, 8),)), path)
        return self.rewritten(path, "changed.pt2", {f"data/{name}": content}) if name else path

    def scripted(self) -> Path:
        path = self.folder / "scripted.pt"
        torch.jit.script(Setting(str(self.executed))).save(str(path))
        self.executed.unlink(missing_ok=True)
        return path

    def export_with_pickle(self) -> Path:
        weight = {"path_name": "weight_0", "is_param": True, "use_pickle": True, "tensor_meta": None}
        return self.rewritten(self.exported(), "use_pickle.pt2", {
            "data/weights/model_weights_config.json": json.dumps({"config": {"weight": weight}}).encode(),
            "data/weights/weight_0": self.unsafe()})  # fmt: skip

    def unsafe(self) -> bytes:
        buffer = io.BytesIO()
        torch.save({"a": self.touch}, buffer)
        return buffer.getvalue()

    def safetensors(self, header: Any, length: int | None = None) -> Path:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return self.raw("w.safetensors", struct.pack("<Q", length or len(text)) + text)

    def tar(self) -> Path:
        with tarfile.open(self.folder / "old.tar", "w") as archive:
            for name in ("storages", "tensors", "pickle"):
                content = pickle.dumps(self.touch)
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        return self.folder / "old.tar"

    def deflated(self) -> Path:
        source, path = self.saved("large.pth", {"weight": torch.zeros(64 << 20)}), self.folder / "deflated.pth"
        with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
            for member in old.namelist():
                new.writestr(member, old.read(member))
        source.unlink()  # 256 MiB of zeros
        return path

    def checkpoint(self, content: dict[str, Any]) -> Path:
        """A file with a valid digest, which anybody can compute."""
        path = self.folder / "checkpoint.pt"
        checkpoints.write(path, content)
        return path

    def nested_lists(self) -> Path:
        value: Any = [0]
        for _ in range(40):
            value = [value] * 10
        return self.pickle_zip("lists.pth", {"a": value})

    def odd_metadata(self) -> Path:
        state = OrderedDict({"weight": torch.zeros(4, 3, 3, 3)})
        state._metadata = [1, {"": 2}]  # type: ignore[attr-defined]
        return self.saved("metadata.pth", state)


FILES: dict[str, Callable[[Planted], Path]] = {
    "pickle": lambda p: p.raw("pickle.pth", pickle.dumps({"a": p.touch})),
    "pickle in a zip": lambda p: p.pickle_zip("zip.pth", {"a": p.touch}),
    "pickle under state_dict": lambda p: p.pickle_zip("wrapped.pth", {"state_dict": {"a": p.touch}}),
    "torch.save of an object": lambda p: p.raw("object.pth", p.unsafe()),
    "legacy format of an object": lambda p: p.saved("l.pth", {"a": p.touch}, _use_new_zipfile_serialization=False),
    "legacy tar format": Planted.tar,
    "pickle named safetensors": lambda p: p.raw("pickle.safetensors", pickle.dumps(p.touch)),
    "exported program": Planted.exported,
    "exported program named pth": lambda p: p.rewritten(p.exported(), "renamed.pth", {}),
    "exported sample inputs": lambda p: p.exported("sample_inputs/model.pt", p.unsafe()),
    "exported use_pickle": Planted.export_with_pickle,
    "exported custom object": lambda p: p.exported("constants/custom_obj_0", pickle.dumps(p.touch)),
    "exported opaque object": lambda p: p.exported("constants/opaque_obj_0", pickle.dumps(p.touch)),
    "exported legacy weights": lambda p: p.exported("weights/model.pt", p.unsafe()),
    "exported members renamed": lambda p: p.rewritten(
        p.exported(), "members.pt2", {}, ("models/model.json", "graphs/model.json")
    ),
    "TorchScript with __setstate__": Planted.scripted,
    "TorchScript named pth": lambda p: p.rewritten(p.scripted(), "script.pth", {}),
    "TorchScript without code": lambda p: p.rewritten(p.scripted(), "code.pth", {}, ("constants.pkl", "other.pkl")),
    "state dict and a program": lambda p: p.rewritten(p.state_dict(), "both.pth", {"code/a.py": b"x"}),
    "state dict of another pickle": lambda p: p.rewritten(
        p.state_dict(), "data.pth", {"data.pkl": pickle.dumps(p.touch, protocol=2)}
    ),
    "member names that climb": lambda p: p.rewritten(p.state_dict(), "climb.pth", {"../../../executed": b"x"}),
    "absolute member names": lambda p: p.rewritten(p.state_dict(), "absolute.pth", {str(p.executed): b"x"}),
    "nested zip": lambda p: p.rewritten(p.state_dict(), "nested.pth", {"data/0": p.unsafe()}),
    "deflated zeros": Planted.deflated,
    "zip without members": lambda p: p.raw("empty.pth", b"PK\x05\x06" + bytes(18)),
    "expanded tensor": lambda p: p.saved("expanded.pth", {"a": torch.zeros(1).expand(1 << 33)}),
    "laughing lists": Planted.nested_lists,
    "checkpoint with a program's name": lambda p: p.checkpoint(
        {"model": {"weight": torch.zeros(2, 2)}, "facts": {"model": "os:system", "memory_format": "channels_last"}}
    ),
    "checkpoint of odd values": lambda p: p.checkpoint({"model": [1, 2], "facts": 3}),
    "metadata of odd values": Planted.odd_metadata,
    "safetensors header too long": lambda p: p.safetensors({}, 1 << 62),
    "safetensors deep JSON": lambda p: p.safetensors(b"[" * 100_000),
    "safetensors with a huge shape": lambda p: p.safetensors(
        {"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}
    ),
}


def readers(path: Path, target: Path) -> dict[str, Callable[[], object]]:
    """Everything that reads such a file: `weights=` of training, `resume=`, and convert."""
    return {
        "weights": lambda: load_weights_file(nn.Conv2d(3, 4, 3), path),
        "resume": lambda: checkpoints.load(path),
        "convert": lambda: convert_file(path, target, model="tests.networks:small", input=(1, 3, 8, 8)),
    }


SLOW = ("deflated zeros", "laughing lists", *(name for name in FILES if name.startswith(("exported", "TorchScript"))))
MARKED = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in FILES]


def peak_bytes() -> int:
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


@pytest.mark.parametrize("name", MARKED)
def test_planted_file(name: str, tmp_path: Path) -> None:
    planted = Planted(tmp_path)
    path = FILES[name](planted)
    with contextlib.suppress(OSError):  # not every kernel has it
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak_bytes()
    for reader, read in readers(path, tmp_path / "out.pth").items():
        try:
            read()
        except (ConfigError, NotConverted, checkpoints.CheckpointError) as error:
            assert str(error), reader
        assert not planted.executed.exists(), reader
    assert peak_bytes() - before < MAX_GROWTH_BYTES


TRUSTED = [name for name in FILES if name.startswith("exported") and name != "exported program"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRUSTED)
def test_trusted_programs_are_not_unpickled(name: str, tmp_path: Path) -> None:
    planted = Planted(tmp_path)
    with contextlib.suppress(ConfigError):
        convert_file(FILES[name](planted), tmp_path / "out.pt2", trust=True)
    assert not planted.executed.exists()
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


def test_the_commands_refuse_with_one_line(tmp_path: Path) -> None:
    path = Planted(tmp_path).scripted()
    words = ["model=resnet18", f"weights={path}"]
    for command, arguments in ((audit, words), (convert, [str(path), f"out={tmp_path}/o.pt"])):
        with pytest.raises(ConfigError, match="trust=true"):
            command.main(arguments)
    assert not (tmp_path / "executed").exists()
