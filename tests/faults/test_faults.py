"""The fault matrix: which faults are planted, and how often in the ordinary tests (quick) and by `--full`."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.faults import checkpoint_faults, command_faults, input_faults, rank_faults, run_faults, tiny, training_faults
from tests.faults.bench import Bench, Outcome
from tests.faults.forkserver import ForkServer


@dataclass(frozen=True)
class Fault:
    """One row. `quick` and `full` are the arguments of `plant` after bench and outcome: mostly, how often.

    Rows with `quick=None` take long even for one try; they run with the full counts only.
    """

    plant: Callable[..., None]
    quick: tuple[Any, ...] | None = ()
    full: tuple[Any, ...] = ()


_ALL_STEPS = range(1, tiny.STEPS + 1)

QUICK = (
    Fault(checkpoint_faults.disk_full_while_writing_checkpoint, (20,), (300,)),
    Fault(checkpoint_faults.truncated_checkpoint, (50,), (1000,)),
    Fault(checkpoint_faults.bit_flip_in_checkpoint, (50,), (2000,)),
    Fault(checkpoint_faults.malicious_checkpoint),
    Fault(input_faults.images_seen_per_epoch, (20,), (500,)),
    Fault(input_faults.hostile_archives),
    Fault(input_faults.damaged_shards, (40,), (1000,)),
)
SLOW = (
    Fault(checkpoint_faults.kill_while_writing_checkpoint, (8,), (500,)),
    Fault(run_faults.kill_training_run, (1,), (100,)),
    Fault(run_faults.stop_signal_in_training, (1,), (50,)),
    Fault(run_faults.kill_in_evaluation, (1,), (20,)),
    Fault(run_faults.stop_signal_in_evaluation, (1,), (5,)),
    Fault(run_faults.resume_at_every_step, ((5,), (0,)), (_ALL_STEPS, (0, 2))),
    Fault(run_faults.resume_with_other_layout_or_precision, (False,), (True,)),
    Fault(training_faults.disk_full_for_a_while, (1, 1.0), (5, 30.0)),
    Fault(training_faults.disk_full_in_training_run, (False,), (True,)),
    Fault(training_faults.nan_in_loss_or_gradient, (False,), (True,)),
    Fault(training_faults.loss_scale_collapse, (False,), (True,)),
    Fault(training_faults.failing_loader_worker, (1,), (5,)),
    Fault(rank_faults.kill_one_of_two_ranks, (1,), (20,)),
    Fault(rank_faults.hang_one_of_two_ranks, (1,), (3,)),
    Fault(rank_faults.rank_fails_under_torchrun, None),
    Fault(rank_faults.kill_torchrun_agent, None, (10,)),
    Fault(rank_faults.lose_a_node, None),
    Fault(rank_faults.resume_with_other_number_of_ranks, (False,), (True,)),
    Fault(input_faults.fuzzed_images, (300,), (50_000,)),
    Fault(input_faults.odd_imagenet_files),
    Fault(input_faults.kill_while_unpacking_imagenet, (3,), (20,)),
    Fault(input_faults.kill_while_generating_sample, (1,), (30,)),
    Fault(input_faults.kill_while_resizing_images, (1,), (30,)),
    Fault(command_faults.wrong_setting_values, (15,), (None,)),
    Fault(command_faults.misspelt_settings, None, (10,)),
    Fault(command_faults.odd_folders_and_environments),
    Fault(training_faults.shared_or_moved_run_folder),
    Fault(training_faults.long_run_stays_bounded, None, (10_000,)),
    Fault(command_faults.failing_sweep_jobs, None, (3,)),
    Fault(command_faults.kill_sweep_launcher, None, (10,)),
)


@pytest.fixture(scope="module")
def is_full(pytestconfig: pytest.Config) -> bool:
    return bool(pytestconfig.getoption("--full", default=False))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, is_full: bool, fork_server: ForkServer) -> Bench:
    return Bench(fork_server, tmp_path_factory.mktemp("bench"), patience=1.0 if is_full else 60.0)


def name_of(fault: Fault) -> str:
    return fault.plant.__name__


@pytest.mark.parametrize("fault", [*QUICK, *(pytest.param(row, marks=pytest.mark.slow) for row in SLOW)], ids=name_of)
def test_fault(fault: Fault, bench: Bench, is_full: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    arguments = fault.full if is_full else fault.quick
    if arguments is None:
        pytest.skip("takes long even for one try: --full")
    outcome, started = Outcome(), time.monotonic()
    fault.plant(bench, outcome, *arguments)
    print(f"{name_of(fault)}: {len(outcome.lost)} of {outcome.tried} lost, {time.monotonic() - started:.0f} s")
    assert outcome.tried and not outcome.lost, outcome.lost
