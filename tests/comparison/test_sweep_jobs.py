"""Which GPUs and cores the jobs of a sweep get, and the signals that stop them; test_sweep.py runs jobs."""

import signal

import pytest

from cl_train.comparison import sweep
from cl_train.comparison.sweep import Slot, own_cores, plan_slots, signals_noted
from cl_train.comparison.sweep_plan import Job
from cl_train.config.schema import ConfigError

ALL = ["0", "1", "2", "3"]


def slots(
    monkeypatch: pytest.MonkeyPatch, asked: list[str], visible: list[str], cores: int, *jobs: Job, groups: int = 9
) -> list[Slot]:
    monkeypatch.setattr(sweep, "own_cores", lambda: list(range(cores)))
    return plan_slots(asked, visible, [jobs or [job()]] * groups)


def job(*words: str, nproc: int = 1) -> Job:
    return Job(0, "a", list(words), nproc)


def test_gpus_and_cores_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    found = slots(monkeypatch, ["all"], ALL, 16)
    assert found == [Slot((str(i),), tuple(range(4 * i, 4 * i + 4))) for i in range(4)]
    several = slots(monkeypatch, ["all"], ALL[:3], 16, job(), job(nproc=2))
    assert several == [Slot(("0", "1"), tuple(range(16)))], "GPUs of a job of two processes"
    assert [len(slot.cores) for slot in slots(monkeypatch, ["all"], ALL, 16, groups=2)] == [8, 8], "one per group"
    assert [slot.gpus for slot in slots(monkeypatch, ["5"], ["2", "5"], 2)] == [("5",)]
    assert len(slots(monkeypatch, ["all"], ALL[:2], 2, job("data=synthetic"))) == 2, "no loader"
    assert len(set(own_cores())) == len(own_cores()) > 0


@pytest.mark.parametrize(
    ("asked", "visible", "cores", "settings", "word"),
    [
        ("all", ALL, 7, job(), "cores"),  # one core per job: none for its loader
        ("all", ALL[:2], 16, job("data.workers=9"), "data.workers"),
        ("all", ALL[:2], 7, job("data.workers=4", nproc=2), "cores"),
        ("all", ALL[:1], 16, job(nproc=2), "nproc"),
        ("all", ALL[:2], 16, job("device=cpu"), "device=cpu"),
        ("all", [], 16, job(), "launcher.gpus"),
        ("0", ["2", "5"], 16, job(), "2,5"),
        ("2,2", ["2", "5"], 16, job(), "each once"),
    ],
)
def test_what_cannot_work_is_refused(
    asked: str, visible: list[str], cores: int, settings: Job, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=word):
        slots(monkeypatch, asked.split(","), visible, cores, settings)


def test_signals_are_noted_but_not_sighup_under_nohup() -> None:
    nohup, before = signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.getsignal(signal.SIGTERM)
    received: list[int] = []
    try:
        with signals_noted([signal.SIGTERM, signal.SIGHUP], received):
            for signum in (signal.SIGHUP, signal.SIGTERM, signal.SIGTERM):  # Slurm sends SIGTERM more than once
                signal.raise_signal(signum)
    finally:
        signal.signal(signal.SIGHUP, nohup)
    assert received == [signal.SIGTERM] * 2 and signal.getsignal(signal.SIGTERM) == before
