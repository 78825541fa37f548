"""Files of torch.save from anywhere: no code runs, memory stays bounded, the reason is one line."""

import collections
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from cl_train.system.torch_file import UnreadableFile, read_torch_file


def test_weights_of_both_formats_are_read(tmp_path: Path) -> None:
    state = collections.OrderedDict(w=torch.arange(6.0), shared=torch.ones(3))
    state["tied"] = state["shared"]
    for zipped in (True, False):
        torch.save(state, tmp_path / "w.pth", _use_new_zipfile_serialization=zipped)
        assert torch.equal(read_torch_file(tmp_path / "w.pth")["w"], state["w"])


@pytest.mark.slow
def test_a_compressed_file_is_refused_before_it_is_expanded(tmp_path: Path) -> None:
    """128 KB that would be 128 MB."""
    torch.save({"w": torch.zeros(2**25)}, tmp_path / "plain.pth")
    with (
        zipfile.ZipFile(tmp_path / "plain.pth") as source,
        zipfile.ZipFile(tmp_path / "bomb.pth", "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for member in source.namelist():
            target.writestr(member, source.read(member))
    program = (
        "import sys; from pathlib import Path; from cl_train.system.torch_file import read_torch_file\n"
        # VmHWM, not ru_maxrss, which a new process takes over from the one that started it.
        "peak_kib = lambda: int(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])\n"
        "before = peak_kib()\n"
        "try: read_torch_file(Path(sys.argv[1]))\n"
        "except ValueError as error: print('refused:', error)\n"
        "print(peak_kib() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "bomb.pth")], capture_output=True, text=True, check=True
    )
    refusal, growth_kib = done.stdout.splitlines()
    assert "compressed" in refusal
    assert int(growth_kib) < 100_000


def shared_lists() -> Any:
    """2 to the power of 60 references in a few hundred bytes."""
    item: Any = [0]
    for _ in range(60):
        item = [item, item]
    return item


ODD: dict[str, Any] = {
    "expanded": {"w": torch.ones(1).expand(10**12)},
    "shared many times": {str(i): view for i, view in enumerate([torch.zeros(2**18)] * 1000)},
    "sparse": {"w": torch.eye(3).to_sparse()},
    "meta": {"w": torch.empty(3, device="meta")},
    "shared lists": shared_lists(),
    "a module": torch.nn.Linear(2, 2),
}


def test_a_small_compressed_file_is_refused_too(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "w.pth", "w", zipfile.ZIP_DEFLATED) as target:
        target.writestr("w/data.pkl", b"x")
    with pytest.raises(UnreadableFile, match="compressed"):
        read_torch_file(tmp_path / "w.pth")


@pytest.mark.parametrize("name", ODD)
def test_odd_contents_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    torch.save(ODD[name], tmp_path / "odd.pth")
    with pytest.raises(UnreadableFile) as caught:
        read_torch_file(tmp_path / "odd.pth")
    assert str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"x" * 1000, pickle.dumps(print), b"\x80\x02]" + b"]" * 99])
def test_what_is_no_such_file_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "odd.pth").write_bytes(content)
    with pytest.raises(UnreadableFile) as caught:
        read_torch_file(tmp_path / "odd.pth")
    assert str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [100, 20_000, 39_900])
def test_a_truncated_file_is_called_truncated(tmp_path: Path, size: int) -> None:
    torch.save({"weight": torch.arange(10_000.0)}, tmp_path / "cut.pth")
    os.truncate(tmp_path / "cut.pth", size)
    with pytest.raises(UnreadableFile, match="truncated"):
        read_torch_file(tmp_path / "cut.pth")


def test_a_script_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.pth").write_bytes(b"")
    script = Path(__file__).with_name("test_torch_file.py")  # no zip archive and no pickle either
    with pytest.raises(UnreadableFile):
        read_torch_file(script)
    with pytest.raises(OSError):
        read_torch_file(tmp_path / "missing.pth")
