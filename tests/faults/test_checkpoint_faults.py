"""Checkpoint files on full disks and with flipped bits."""

import os
import resource
import shutil
import signal
from contextlib import contextmanager

import pytest
import torch

from cl_train.system import files
from cl_train.system.checkpoints import CheckpointError, CheckpointStore, load, write
from tests.faults import tiny


@contextmanager
def disk_that_ends(at_byte):
    """Writes fail at this byte of a file, by the kernel's own limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (at_byte, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, previous)


def test_disk_full_while_writing_checkpoint(bench, monkeypatch):
    """The disk fails at a random byte: the previous checkpoint stays. The last one is tried again,
    and with the best one once there is room; without room the run fails.
    """
    monkeypatch.setattr(files, "RETRY_S", 0.0)
    for number in range(bench.count(20, 300)):
        folder = bench.new_folder()
        store = CheckpointStore(folder, keep=2)
        state = {"w": torch.randn(25_000, generator=torch.Generator().manual_seed(number))}
        store.write_step(state, 1)
        store.finish()
        at_byte = bench.random.randrange((folder / "step-00000001.pt").stat().st_size)
        with bench.attempt(), disk_that_ends(at_byte):
            for step in (2, 3):
                store.write_step(state, step, best=step == 2)
                store.wait()
            assert os.listdir(folder) == ["step-00000001.pt"], f"left {os.listdir(folder)}"
            assert torch.equal(load(folder / "step-00000001.pt")["w"], state["w"])
            with pytest.raises(CheckpointError, match="last checkpoint could not be written"):
                store.finish()
        with bench.attempt():
            store.finish()
            assert {*os.listdir(folder)} == {"best.pt", "step-00000002.pt", "step-00000003.pt"}
            assert (folder / "best.pt").samefile(folder / "step-00000002.pt")
        shutil.rmtree(folder)


def test_bit_flip_in_checkpoint(bench):
    """One bit flipped anywhere in a checkpoint is detected, or leaves the values the same."""
    folder = bench.new_folder()
    generator = torch.Generator().manual_seed(0)
    weights = {f"{i}.weight": torch.randn(16, 16, 3, 3, generator=generator) for i in range(8)}
    progress = {"step": 7, "random": [{"cpu": torch.get_rng_state()}], "classes": ["ant", "bee"]}
    good, small, bad = (folder / f"{name}.pt" for name in ("good", "small", "bad"))
    write(good, {"model": weights, "progress": progress})
    write(small, {"model": {"w": torch.arange(4.0)}, "progress": {"step": 1}})
    length, random = 8 * good.stat().st_size, bench.random
    bits = [(good, random.randrange(length)) for _ in range(bench.count(50, 2000))]
    bits += [(small, bit) for bit in bench.count((), range(8 * small.stat().st_size))]
    for source, bit in bits:
        whole = bytearray(source.read_bytes())
        whole[bit // 8] ^= 1 << bit % 8
        bad.write_bytes(whole)
        with bench.attempt():
            try:
                state = load(bad)
            except CheckpointError as error:
                assert str(bad) in str(error)
            else:
                told = f"bit {bit} of {source.name} changed a value"
                assert not tiny.differences(state, load(source)), told
