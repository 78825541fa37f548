"""Which GPUs and cores the jobs of a sweep get, and the signals that stop them; test_sweep.py runs jobs."""

import logging
import signal
from dataclasses import replace

import pytest

from cl_train.comparison.sweep_jobs import (
    Slot,
    Stopped,
    chosen_gpus,
    own_cores,
    plan_slots,
    signals_handled,
)
from cl_train.config.schema import Config, ConfigError, DataConfig

CORES = list(range(16))


def run(nproc: int = 1, **data: object) -> tuple[Config, int]:
    return Config(data=replace(DataConfig(), **data)), nproc  # type: ignore[arg-type]


def test_gpus_and_cores_are_divided() -> None:
    slots = plan_slots(["0", "1", "2", "3"], CORES, [run()], groups=9)
    assert [slot.gpus for slot in slots] == [("0",), ("1",), ("2",), ("3",)]
    assert [slot.cores for slot in slots] == [tuple(CORES[i : i + 4]) for i in (0, 4, 8, 12)]


def test_jobs_of_several_processes_get_several_gpus() -> None:
    assert plan_slots(["0", "1", "2"], CORES, [run(), run(nproc=2)], groups=9) == [Slot(("0", "1"), tuple(CORES))]


def test_there_are_no_more_slots_than_groups() -> None:
    assert [len(slot.cores) for slot in plan_slots(["0", "1", "2", "3"], CORES, [run()], groups=2)] == [8, 8]


@pytest.mark.parametrize(
    ("gpus", "cores", "settings", "word"),
    [
        (4, 7, run(), "cores"),  # one core per job: none for its loader
        (2, 16, run(workers=9), "data.workers"),
        (2, 7, run(nproc=2, workers=4), "cores"),
        (1, 16, run(nproc=2), "nproc"),
        (2, 16, (Config(device="cpu"), 1), "device=cpu"),
    ],
)
def test_what_cannot_work_is_refused(gpus: int, cores: int, settings: tuple[Config, int], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        plan_slots([str(number) for number in range(gpus)], CORES[:cores], [settings], groups=9)


def test_synthetic_data_need_no_loader() -> None:
    assert len(plan_slots(["0", "1"], [0, 1], [run(name="synthetic")], groups=2)) == 2


def test_chosen_gpus() -> None:
    assert chosen_gpus(["all"], ["2", "5"]) == ["2", "5"]
    assert chosen_gpus(["5"], ["2", "5"]) == ["5"]
    for asked, visible in ((["0"], ["2", "5"]), (["2", "2"], ["2", "5"]), (["all"], [])):
        with pytest.raises(ConfigError):
            chosen_gpus(asked, visible)


def test_all_own_cores_are_listed_once() -> None:
    assert len(set(own_cores())) == len(own_cores()) > 0


# --- signals ----------------------------------------------------------------------------------------------------------


def test_only_sigint_stops_a_second_time() -> None:
    """Slurm sends SIGTERM more than once, and the jobs still save their checkpoints then."""
    before = signal.getsignal(signal.SIGTERM)
    with signals_handled():
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            with pytest.raises(Stopped):
                signal.raise_signal(signum)
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_sweep_under_nohup_survives_the_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_handled():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_that_arrives_during_logging_stops() -> None:
    class Stream:
        def write(self, text: str) -> None:
            signal.raise_signal(signal.SIGTERM)

    handler: logging.Handler = logging.StreamHandler(Stream())
    record = logging.LogRecord("slurm", logging.WARNING, __file__, 1, "SIGCONT", None, None)
    with signals_handled(), pytest.raises(Stopped):
        handler.emit(record)
