"""Comparisons without the chart and TensorBoard, which take most of the time."""

import pytest


@pytest.fixture
def tables_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from cl_train.comparison import report

    monkeypatch.setattr(report, "write_chart", lambda *_: False)
    monkeypatch.setattr(report, "_write_dashboard", lambda *_: None)
