"""Files made to run code, or to allocate much more than their size, through everything that reads a file of weights."""

import contextlib
import io
import json
import os
import pickle
import struct
import tarfile
import warnings
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
from cl_train.models.convert_file import convert_file
from cl_train.models.files import read_weights
from cl_train.models.sources import load_weights_file
from cl_train.system import checkpoint_file
from tests.faults.forkserver import ForkServer

pytestmark = pytest.mark.filterwarnings("ignore")
MAX_GROWTH_BYTES = 512 << 20  # of the process, by all files together; each of the bombs would take gigabytes


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


class Planted:
    """Writes the files of the table; whatever runs code creates `executed`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.executed = folder / "executed"
        self.touch = Touch(self.executed)

    def pickle_zip(self, name: str, content: Any, **options: Any) -> Path:
        """torch.save's zip format with an ordinary pickle inside."""
        path = self.folder / name
        with zipfile.ZipFile(path, "w", **options) as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(content, protocol=2))
            archive.writestr("archive/version", "3")
            archive.writestr("archive/byteorder", "little")
        return path

    def raw(self, name: str, content: bytes) -> Path:
        (self.folder / name).write_bytes(content)
        return self.folder / name

    def rewritten(
        self, source: Path, name: str, changes: dict[str, bytes], rename: dict[str, str] | None = None
    ) -> Path:
        """A copy of an archive with members replaced, added or renamed."""
        path = self.folder / name
        with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w") as new:
            root = old.namelist()[0].partition("/")[0]
            for member in old.namelist():
                inner = member.partition("/")[2]
                if inner not in changes:
                    new.writestr(f"{root}/{(rename or {}).get(inner, inner)}", old.read(member))
            for inner, content in changes.items():
                new.writestr(f"{root}/{inner}", content)
        return path

    def state_dict(self) -> Path:
        path = self.folder / "state.pth"
        torch.save({"weight": torch.zeros(4, 3, 3, 3)}, path)
        return path

    def exported(self) -> Path:
        path = self.folder / "plain.pt2"
        if not path.exists():
            model = nn.Sequential(nn.Conv2d(3, 4, 3))
            torch.export.save(torch.export.export(model, (torch.randn(1, 3, 8, 8),)), path)
        return path

    def scripted(self) -> Path:
        class Setting(nn.Module):
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

        path = self.folder / "scripted.pt"
        torch.jit.script(Setting(str(self.executed))).save(str(path))
        self.executed.unlink(missing_ok=True)
        return path

    def export_with_pickle(self) -> Path:
        return self.rewritten(self.exported(), "use_pickle.pt2", {
            "data/weights/model_weights_config.json": json.dumps(
                {"config": {"weight": {"path_name": "weight_0", "is_param": True, "use_pickle": True,
                                       "tensor_meta": None}}}).encode(),
            "data/weights/weight_0": self.unsafe_torch_file()})  # fmt: skip

    def unsafe_torch_file(self) -> bytes:
        buffer = io.BytesIO()
        torch.save({"a": self.touch}, buffer)
        return buffer.getvalue()

    def safetensors(self, name: str, header: Any, length: int | None = None, data: bytes = b"") -> Path:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return self.raw(name, struct.pack("<Q", len(text) if length is None else length) + text + data)

    def tar(self) -> Path:
        path = self.folder / "old.tar"
        with tarfile.open(path, "w") as archive:
            for name in ("storages", "tensors", "pickle"):
                content = pickle.dumps(self.touch)
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        return path

    def legacy(self, content: Any) -> Path:
        path = self.folder / "legacy.pth"
        torch.save(content, path, _use_new_zipfile_serialization=False)
        return path

    def deflated(self) -> Path:
        source = self.folder / "large.pth"
        torch.save({"weight": torch.zeros(64 << 20)}, source)  # 256 MiB of zeros
        path = self.folder / "deflated.pth"
        with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
            for member in old.namelist():
                new.writestr(member, old.read(member))
        source.unlink()
        return path

    def checkpoint(self, content: dict[str, Any]) -> Path:
        """A file with a valid digest, which anybody can compute."""
        path = self.folder / "checkpoint.pt"
        checkpoint_file.write(path, content)
        return path


FILES: dict[str, Callable[[Planted], Path]] = {
    "pickle": lambda p: p.raw("pickle.pth", pickle.dumps({"a": p.touch})),
    "pickle in a zip": lambda p: p.pickle_zip("zip.pth", {"a": p.touch}),
    "pickle under state_dict": lambda p: p.pickle_zip("wrapped.pth", {"state_dict": {"a": p.touch}}),
    "torch.save of an object": lambda p: p.raw("object.pth", p.unsafe_torch_file()),
    "legacy format of an object": lambda p: p.legacy({"a": p.touch}),
    "legacy tar format": lambda p: p.tar(),
    "pickle named safetensors": lambda p: p.raw("pickle.safetensors", pickle.dumps(p.touch)),
    "exported program": lambda p: p.exported(),
    "exported program named pth": lambda p: p.rewritten(p.exported(), "renamed.pth", {}),
    "exported sample inputs": lambda p: p.rewritten(
        p.exported(), "inputs.pt2", {"data/sample_inputs/model.pt": p.unsafe_torch_file()}
    ),
    "exported use_pickle": lambda p: p.export_with_pickle(),
    "exported custom object": lambda p: p.rewritten(
        p.exported(), "custom.pt2", {"data/constants/custom_obj_0": pickle.dumps(p.touch)}
    ),
    "exported opaque object": lambda p: p.rewritten(
        p.exported(), "opaque.pt2", {"data/constants/opaque_obj_0": pickle.dumps(p.touch)}
    ),
    "exported legacy weights": lambda p: p.rewritten(
        p.exported(), "legacy.pt2", {"data/weights/model.pt": p.unsafe_torch_file()}
    ),
    "exported members renamed": lambda p: p.rewritten(
        p.exported(), "members.pt2", {}, {"models/model.json": "graphs/model.json"}
    ),
    "TorchScript with __setstate__": lambda p: p.scripted(),
    "TorchScript named pth": lambda p: p.rewritten(p.scripted(), "script.pth", {}),
    "TorchScript without code": lambda p: p.rewritten(p.scripted(), "code.pth", {}, {"constants.pkl": "other.pkl"}),
    "state dict and a program": lambda p: p.rewritten(p.state_dict(), "both.pth", {"code/a.py": b"x"}),
    "state dict of another pickle": lambda p: p.rewritten(
        p.state_dict(), "data.pth", {"data.pkl": pickle.dumps(p.touch, protocol=2)}
    ),
    "member names that climb": lambda p: p.rewritten(p.state_dict(), "climb.pth", {"../../../executed": b"x"}),
    "absolute member names": lambda p: p.rewritten(p.state_dict(), "absolute.pth", {str(p.executed): b"x"}),
    "nested zip": lambda p: p.rewritten(p.state_dict(), "nested.pth", {"data/0": p.unsafe_torch_file()}),
    "deflated zeros": lambda p: p.deflated(),
    "zip without members": lambda p: p.raw("empty.pth", b"PK\x05\x06" + bytes(18)),
    "expanded tensor": lambda p: p.pickle_or_torch("expanded.pth", {"a": torch.zeros(1).expand(1 << 33)}),
    "laughing lists": lambda p: p.pickle_zip("lists.pth", p.nested_lists()),
    "checkpoint with a program's name": lambda p: p.checkpoint(
        {"model": {"weight": torch.zeros(2, 2)}, "facts": {"model": "os:system", "memory_format": "channels_last"}}
    ),
    "checkpoint of odd values": lambda p: p.checkpoint({"model": [1, 2], "facts": 3}),
    "metadata of odd values": lambda p: p.odd_metadata(),
    "safetensors header too long": lambda p: p.safetensors("long.safetensors", {}, 1 << 62),
    "safetensors header of 0": lambda p: p.safetensors("zero.safetensors", b"", 0),
    "safetensors without JSON": lambda p: p.safetensors("json.safetensors", b"{" * 64),
    "safetensors deep JSON": lambda p: p.safetensors("deep.safetensors", b"[" * 100_000),
    "safetensors of a list": lambda p: p.safetensors("list.safetensors", [1, 2]),
    "safetensors with a huge shape": lambda p: p.safetensors(
        "shape.safetensors", {"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}
    ),
    "safetensors with overlap": lambda p: p.safetensors(
        "overlap.safetensors",
        {n: {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]} for n in "ab"},
        data=bytes(8),
    ),
    "safetensors of negative offsets": lambda p: p.safetensors(
        "negative.safetensors", {"a": {"dtype": "U8", "shape": [8], "data_offsets": [-8, 0]}}, data=bytes(8)
    ),
}


def _pickle_or_torch(self: Planted, name: str, content: Any) -> Path:
    path = self.folder / name
    torch.save(content, path)
    return path


def _nested_lists(self: Planted) -> Any:
    value: Any = [0]
    for _ in range(40):
        value = [value] * 10
    return {"a": value}


def _odd_metadata(self: Planted) -> Path:
    state = OrderedDict({"weight": torch.zeros(4, 3, 3, 3)})
    state._metadata = [1, {"": 2}]  # type: ignore[attr-defined]
    return _pickle_or_torch(self, "metadata.pth", state)


Planted.pickle_or_torch = _pickle_or_torch  # type: ignore[attr-defined]
Planted.nested_lists = _nested_lists  # type: ignore[attr-defined]
Planted.odd_metadata = _odd_metadata  # type: ignore[attr-defined]


def readers(path: Path, target: Path) -> dict[str, Callable[[], object]]:
    """Everything that reads such a file: `weights=` of training and of the audit, `resume=`, and convert."""
    return {
        "weights": lambda: load_weights_file(nn.Conv2d(3, 4, 3), path),
        "read": lambda: read_weights(path),
        "resume": lambda: checkpoint_file.load(path),
        "convert": lambda: convert_file(path, target, model_name="tests.networks:small", input_shape=(1, 3, 8, 8)),
    }


SLOW = ("deflated zeros", "laughing lists", *(name for name in FILES if name.startswith(("exported", "TorchScript"))))
MARKED = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in FILES]


def peak_bytes() -> int:
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


@pytest.mark.parametrize("name", MARKED)
def test_planted_file(name: str, tmp_path: Path) -> None:
    planted = Planted(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = FILES[name](planted)
    with contextlib.suppress(OSError):  # not every kernel has it
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak_bytes()
    for reader, read in readers(path, tmp_path / "out.pth").items():
        try:
            read()
        except (ConfigError, checkpoint_file.CheckpointError) as error:
            assert str(error), reader
        assert not planted.executed.exists(), reader
    assert peak_bytes() - before < MAX_GROWTH_BYTES


TRUSTED = [name for name in FILES if name.startswith("exported") and name != "exported program"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRUSTED)
def test_trusted_programs_are_not_unpickled(name: str, tmp_path: Path) -> None:
    planted = Planted(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = FILES[name](planted)
        try:
            convert_file(path, tmp_path / "out.pt2", trust=True)
        except ConfigError as error:
            assert str(error)
    assert not planted.executed.exists()
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


@pytest.mark.slow
def test_the_commands_refuse_with_one_line(tmp_path: Path, fork_server: ForkServer) -> None:
    path = Planted(tmp_path).scripted()
    words = ["model=resnet18", f"weights={path}"]
    for command, arguments in ((audit, words), (convert, [str(path), f"out={tmp_path}/o.pt"])):
        with pytest.raises(ConfigError, match="trust=true"):
            command.main(arguments)
    refused = fork_server.start([*words, f"hydra.run.dir={tmp_path}/run"], tmp_path / "log")
    assert refused.wait() == 2 and "trust=true" in refused.output(), refused.output()
    assert "Traceback" not in refused.output()
    assert not (tmp_path / "executed").exists()
