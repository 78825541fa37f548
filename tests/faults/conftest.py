import logging
from collections.abc import Generator

import pytest

from tests.faults.bench import Bench


def pytest_addoption(parser: pytest.Parser) -> None:
    what = "inject every fault with its full count; -k NAME: some rows"
    parser.addoption("--full", action="store_true", help=what)


@pytest.fixture(scope="session")
def shared_bench(tmp_path_factory, pytestconfig) -> Bench:
    is_full = bool(pytestconfig.getoption("--full", default=False))
    return Bench(tmp_path_factory.mktemp("bench"), is_full)


@pytest.fixture
def bench(shared_bench, caplog) -> Bench:
    caplog.set_level(logging.CRITICAL)
    shared_bench.begin_row()
    return shared_bench


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A row passes if it tried something and nothing was lost."""
    result = yield
    pyfuncitem.funcargs["bench"].end_row(pyfuncitem.name)
    return result
