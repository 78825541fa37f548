"""The signals that stop a sweep; test_sweep.py runs its jobs."""

import logging
import signal

import pytest

from cl_train.comparison.local_jobs import Stopped, raise_stopped, signals_handled


def test_only_sigint_stops_a_second_time() -> None:
    """Slurm sends SIGTERM more than once, and the jobs still save their checkpoints then."""
    before = signal.getsignal(signal.SIGTERM)
    with signals_handled(raise_stopped):
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            with pytest.raises(Stopped):
                signal.raise_signal(signum)
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_sweep_under_nohup_survives_the_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_handled(raise_stopped):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_that_arrives_during_logging_stops() -> None:
    """submitit logs each SIGCONT that Slurm sends together with SIGTERM."""

    class Stream:
        def write(self, text: str) -> None:
            signal.raise_signal(signal.SIGTERM)

    handler: logging.Handler = logging.StreamHandler(Stream())
    record = logging.LogRecord("submitit", logging.WARNING, __file__, 1, "SIGCONT", None, None)
    with signals_handled(raise_stopped), pytest.raises(Stopped):
        handler.emit(record)
