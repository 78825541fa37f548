"""What users rely on: command lines, exit codes, messages, the Python interface, files, resume,
commands of documents.

An assertion here changes only together with the promise, and with a line in CHANGELOG.md. So do
those of the fault suite, `tests/faults`.
"""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents or "faults" in item.path.parts:
            item.add_marker(pytest.mark.contract)
