"""The quick part of the fault matrix, run on every change. In full: `python scripts/faults.py`."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from forkserver import ForkServer
from matrix import MATRIX, passes
from run_faults import Bench

SLOW = {
    "R2",
    "R3",
    "R3-torchrun",
    "R4",
    "R8",
    "R10",
    "R11",
    "R12",
    "R14",
    "R15",
    "R17",
    "R20",
    "R20-typos",
    "R22",
    "R23",
    "R25",
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with ForkServer() as server:
        yield Bench(server, tmp_path_factory.mktemp("bench"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in MATRIX]
)
def test_the_run_survives(name: str, bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    outcome = MATRIX[name].quick(bench, tmp_path, 1)
    print(f"{outcome.row} seed {outcome.seed}: {outcome.survived} of {outcome.tried} in {outcome.seconds:.1f} s")
    assert passes(name, outcome), outcome.lost
