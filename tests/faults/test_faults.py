"""The fault matrix with its quick counts, as part of the ordinary tests. In full: `python scripts/faults.py`."""

import logging
from collections.abc import Iterator

import pytest
from bench import Bench
from forkserver import ForkServer
from matrix import MATRIX


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with ForkServer() as server:
        yield Bench(server, tmp_path_factory.mktemp("bench"), patience=60.0)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if fault.slow else ())
        for name, fault in MATRIX.items()
        if fault.quick is not None
    ],
)
def test_fault(name: str, bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    outcome = MATRIX[name].run(bench, "quick")
    print(f"{name} seed {outcome.seed}: {outcome.survived} of {outcome.tried} in {outcome.seconds:.1f} s")
    assert MATRIX[name].passes(outcome), outcome.lost
