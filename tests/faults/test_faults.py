"""The fault matrix, with its quick counts as part of the ordinary tests, with its full counts by `--full`."""

import logging
from typing import Any

import pytest
from bench import Bench, Outcome
from forkserver import ForkServer
from matrix import MATRIX

from cl_train.system.machine import git_state

full_rows: dict[str, dict[str, Any]] = {}  # what `--full` has measured


@pytest.fixture(scope="module")
def counts(pytestconfig: pytest.Config) -> str:
    return "full" if pytestconfig.getoption("--full", default=False) else "quick"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, counts: str, fork_server: ForkServer) -> Bench:
    return Bench(fork_server, tmp_path_factory.mktemp("bench"), patience=1.0 if counts == "full" else 60.0)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if fault.slow else ()) for name, fault in MATRIX.items()]
)
def test_fault(name: str, bench: Bench, counts: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    fault = MATRIX[name]
    arguments = fault.full if counts == "full" else fault.quick
    if arguments is None:
        pytest.skip("takes long even for one try: --full")
    with Outcome() as outcome:
        fault.plant(bench, outcome, *arguments)
    print(f"{name}: {outcome.survived} of {outcome.tried} in {outcome.seconds:.1f} s")
    if counts == "full":
        full_rows[name] = {
            "row": name,
            "fault": (fault.plant.__doc__ or "").splitlines()[0],
            **{key: getattr(outcome, key) for key in ("tried", "survived", "seed")},
            "lost": len(outcome.lost),
            "passed": outcome.passes,
            "seconds": round(outcome.seconds, 1),
            "commit": str(git_state()["commit"] or "")[:7] or None,
            "counts": dict(outcome.counts),
            "first_losses": outcome.lost[:5],
        }
    assert outcome.passes, outcome.lost
