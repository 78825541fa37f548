import pytest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _dead_workers_are_noticed_soon(monkeypatch) -> None:
    from cl_train.data import workers

    monkeypatch.setattr(workers, "_POLL_S", 0.2)
