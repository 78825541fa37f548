"""Log lines that are read one window late, as on a GPU, are those that are read at once, whatever ends the run."""

import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from cl_train.training import log_lines
from cl_train.training.state import TrainingFault
from tests import networks
from tests.conftest import Run
from tests.faults import tiny

Train = Callable[..., Run]
Late = Callable[[], None]
SHARED = ["data.image_size=16", "batch_size=8", "log_to=[]", "log_every=5"]  # two epochs of twelve steps


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    return lambda: monkeypatch.setattr(log_lines, "reads_late", lambda device: True)


@pytest.mark.parametrize(
    "words",
    [
        [],
        pytest.param(["precision=fp16", "checkpoint.every_steps=7"], marks=pytest.mark.slow),
        ["model=tests.networks:nan_at_third_step", "on_nonfinite=skip"],
        pytest.param(["model=tests.networks:terminated_in_training"], marks=pytest.mark.slow),
        pytest.param(["model=tests.networks:terminated_in_evaluation"], marks=pytest.mark.slow),
        pytest.param(["max_steps=7"], marks=pytest.mark.slow),
    ],
)
def test_the_records_are_the_same(train: Train, late: Late, words: list[str]) -> None:
    at_once = train(*SHARED, *words)
    late()
    one_line_late = train(*SHARED, *words)
    assert tiny.records(one_line_late.folder) == tiny.records(at_once.folder)
    assert one_line_late.exit_code == at_once.exit_code
    steps = [record["step"] for record in one_line_late.records("train")]
    assert steps == sorted(set(steps)), "one record per window, in order"


@pytest.mark.slow
def test_a_resumed_run_logs_the_same_lines(train: Train, late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal at a log line, between two of them, and at the end of an epoch."""

    def train_until(step: int, **more: Any) -> Run:
        network = partial(networks.signalling, signum=signal.SIGTERM, in_training=True, at_call=step)
        monkeypatch.setattr(networks, "terminated_in_training", network)
        return train(*SHARED, "model=tests.networks:terminated_in_training", "resume=auto", **more)

    whole = train_until(1000)
    late()
    for stop_at in (5, 7, 12):
        part = train_until(stop_at)
        assert part.exit_code == 143 and part.summary["steps"] == stop_at
        assert tiny.records(train_until(1000, folder=part.folder).folder) == tiny.records(whole.folder)


def test_a_fault_is_named_with_its_step_and_the_lines_before_it_are_there(
    train: Train, late: Late, tmp_path: Any
) -> None:
    late()
    with pytest.raises(TrainingFault, match="at step 3 on rank 0"):
        train(*SHARED, "model=tests.networks:nan_at_third_step", folder=tmp_path)
    assert [record["step"] for record in Run(tmp_path, 1).records("train")] == [5]
    assert Run(tmp_path, 1).summary["status"] == "failed"
