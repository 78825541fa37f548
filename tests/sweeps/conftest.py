import pytest


@pytest.fixture
def tables_only(monkeypatch) -> None:
    """Reports without the chart, which takes most of the time."""
    from cl_train.sweeps import report

    monkeypatch.setattr(report, "write_chart", lambda *_: False)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "sweep"
