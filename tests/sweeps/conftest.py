import pytest


@pytest.fixture
def tables_only(monkeypatch) -> None:
    """Reports without the chart and TensorBoard, which take most of the time."""
    from cl_train.sweeps import report

    monkeypatch.setattr(report, "write_chart", lambda *_: False)
    monkeypatch.setattr(report, "write_dashboard", lambda *_: None)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "sweep"
