"""Checkpoint files under kills, full disks, truncation, flipped bits and malicious content."""

import errno
import os
import re
import resource
import shutil
import signal
import subprocess
import time
import unittest.mock
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from cl_train.system import checkpoints
from cl_train.system.checkpoints import CheckpointError, CheckpointStore, load, write
from tests.faults import tiny
from tests.faults.bench import Bench, Outcome

EIGHT_MB = 2_000_000  # float32 values


def write_for_ever(folder: str, background: bool) -> None:
    """In a child: save 8 MB checkpoints whose values are their step, and note each finished save in `confirmed`."""
    store = CheckpointStore(folder, keep=3, background=background)
    values = torch.empty(EIGHT_MB)
    confirmed = os.open(Path(folder).with_suffix(".confirmed"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    step = 0
    while True:
        step += 1
        store.save({"values": values.fill_(step), "progress": {"step": step}}, step, best=step % 4 == 1)
        if background and step % 3:
            continue  # let saves overlap with the next step
        store.wait()
        os.write(confirmed, f"{step}\n".encode())


def kill_while_writing_checkpoint(bench: Bench, outcome: Outcome, count: int) -> None:
    """SIGKILL of a process that writes 8 MB checkpoints.

    Every .pt file is whole, the newest is no older than the last confirmed save.
    """
    folder = bench.new_folder()
    for number in range(count):
        store = folder / f"run-{number}"
        arguments = [str(store), bool(number % 2)]
        run = bench.server.call("tests.faults.checkpoint_faults:write_for_ever", arguments, folder / "writers.log")
        time.sleep(outcome.random.uniform(0.0, 0.2))
        run.send(signal.SIGKILL)
        run.wait()
        with outcome.attempt():
            check_store(store)
        shutil.rmtree(store, ignore_errors=True)


def check_store(folder: Path) -> None:
    confirmed_file = folder.with_suffix(".confirmed")
    confirmed = [0, *map(int, confirmed_file.read_text().split())][-1] if confirmed_file.exists() else 0
    folder.mkdir(exist_ok=True)  # the process may have ended before
    for path in folder.glob("*.pt"):
        state = load(path)
        step = float(state["progress"]["step"])
        assert torch.equal(state["values"], torch.full((EIGHT_MB,), step)), f"{path}: values of another step"
    temporary = [path.name for path in folder.iterdir() if not path.name.endswith(".pt")]
    assert len(temporary) <= 1, f"{len(temporary)} temporary files"
    store = CheckpointStore(folder, keep=3, background=False)
    found = store.newest()
    newest = found[1]["progress"]["step"] if found else 0
    assert newest >= confirmed, f"step {confirmed} was saved, but the newest is {newest}"
    store.save({"values": torch.zeros(1)}, newest + 1)
    assert all(path.name.endswith(".pt") for path in folder.iterdir()), "the next start left the temporary file"


@contextmanager
def failing_disk(number: int, at_byte: int) -> Iterator[None]:
    """Writes fail at a byte by the kernel's own limit of a file's size, whose EFBIG becomes the error `number`."""
    before, previous = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    original = torch.save

    def save(state: Any, file: Any) -> None:
        try:
            original(state, file)
        except OSError as error:
            raise OSError(number, os.strerror(number)) from error

    resource.setrlimit(resource.RLIMIT_FSIZE, (at_byte, before[1]))
    try:
        with unittest.mock.patch.object(torch, "save", save):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, previous)


def disk_full_while_writing_checkpoint(bench: Bench, outcome: Outcome, count: int) -> None:
    """The disk is full or fails at a random byte of the write.

    The previous checkpoint stays; failures for too long stop the run.
    """
    for number in range(count):
        folder = bench.new_folder()
        store = CheckpointStore(folder, keep=2, background=bool(number % 2))
        state = {"w": torch.randn(25_000, generator=torch.Generator().manual_seed(number))}
        store.save(state, 1)
        store.finish()
        at_byte = outcome.random.randrange((folder / "step-00000001.pt").stat().st_size)
        number_of_error = outcome.random.choice((errno.EFBIG, errno.ENOSPC, errno.EIO))
        with outcome.attempt(), failing_disk(number_of_error, at_byte):
            check_failure(store, folder, state)
        shutil.rmtree(folder)


def check_failure(store: CheckpointStore, folder: Path, state: Any) -> None:
    for step in (2, 3):
        store.save(state, step)
        store.wait()
    found = store.newest()
    assert found is not None and torch.equal(found[1]["w"], state["w"])
    assert os.listdir(folder) == ["step-00000001.pt"], f"left {os.listdir(folder)}"
    with (
        unittest.mock.patch.object(checkpoints, "MAX_MINUTES_WITHOUT_CHECKPOINT", 0.0),
        pytest.raises(CheckpointError, match="no checkpoint could be written"),
    ):
        store.save(state, 4)
        store.wait()


def damaged(bench: Bench) -> tuple[Path, Path]:
    """A sound checkpoint, and the path of a later one, which is to be damaged."""
    folder = bench.new_folder()
    generator = torch.Generator().manual_seed(0)
    state: dict[str, Any] = {
        "model": {f"layer{i}.weight": torch.randn(16, 16, 3, 3, generator=generator) for i in range(8)},
        "progress": {"step": 7, "epoch": 1, "random": [{"cpu": torch.get_rng_state()}]},
        "facts": {"classes": ["ant", "bee"], "model": "tiny"},
    }
    write(folder / "step-00000001.pt", state)
    return folder / "step-00000001.pt", folder / "step-00000002.pt"


def truncated_checkpoint(bench: Bench, outcome: Outcome, count: int) -> None:
    """A checkpoint truncated at a random length is detected, named, and the one before it is used."""
    good, bad = damaged(bench)
    whole, store = good.read_bytes(), CheckpointStore(good.parent)
    for number in range(count):
        lengths = (outcome.random.randrange(len(whole)), number // 3, len(whole) - number // 3 - 1)
        bad.write_bytes(whole[: lengths[number % 3]])
        with outcome.attempt():
            check_refused(bad)
            found = store.newest()
            assert found is not None and found[0] == good and str(bad) in found[2][0]


def check_refused(path: Path) -> None:
    """By a message with its name."""
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        load(path)


def bit_flip_in_checkpoint(bench: Bench, outcome: Outcome, count: int) -> None:
    """One bit flipped anywhere in a checkpoint is detected, or it is of padding and names: the values are the same."""
    good, bad = damaged(bench)
    small = good.parent / "small.pt"
    write(small, {"model": {"w": torch.arange(4.0)}, "progress": {"step": 1}})
    bits = [(good, outcome.random.randrange(8 * good.stat().st_size)) for _ in range(count)]
    if count >= 2000:
        bits += [(small, bit) for bit in range(8 * small.stat().st_size)]
    for source, bit in bits:
        whole = bytearray(source.read_bytes())
        whole[bit // 8] ^= 1 << bit % 8
        bad.write_bytes(whole)
        with outcome.attempt():
            try:
                state = load(bad)
            except CheckpointError:
                check_refused(bad)
            else:
                assert not tiny.differences(state, load(source)), f"bit {bit} of {source.name} changed a value"


class Evil:
    """Leaves a marker file when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def malicious_checkpoint(bench: Bench, outcome: Outcome) -> None:
    """Pickles that run code, with a right digest and format: refused, the marker file absent."""
    path = bench.new_folder() / "evil.pt"
    marker = path.with_name("marker")
    for evil in (
        Evil(os.system, f"touch {marker}"),
        Evil(eval, f"open({str(marker)!r}, 'w')"),
        Evil(exec, f"open({str(marker)!r}, 'w')"),
        Evil(subprocess.check_call, ["touch", str(marker)]),
        Evil(shutil.copy, "/etc/hostname", str(marker)),  # an unknown global
        Evil(torch.load, str(marker)),
    ):
        for content in (evil, {"w": [(evil,)]}):
            write(path, {"model": content})
            with outcome.attempt():
                check_refused(path)
                assert not marker.exists(), f"{evil.call} ran"
