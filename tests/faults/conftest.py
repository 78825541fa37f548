import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="inject every fault with its full count; -k NAME: some rows")
