"""The fault matrix: which faults are planted, and how often in the ordinary tests (quick) and in full."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import checkpoint_faults
import command_faults
import input_faults
import rank_faults
import run_faults
import tiny
import training_faults


@dataclass(frozen=True)
class Fault:
    """One row. `quick` and `full` are the arguments of `plant` after bench and outcome: mostly, how often.

    Rows with `quick=None` take long even for one try; they run with the full counts only.
    """

    plant: Callable[..., None]
    quick: tuple[Any, ...] | None = ()
    full: tuple[Any, ...] = ()
    slow: bool = False  # left out by `pytest -m "not slow"`


_ALL_STEPS = range(1, tiny.STEPS + 1)

_FAULTS = (
    Fault(checkpoint_faults.kill_while_writing_checkpoint, (8,), (500,), slow=True),
    Fault(checkpoint_faults.disk_full_while_writing_checkpoint, (20,), (300,)),
    Fault(checkpoint_faults.truncated_checkpoint, (50,), (1000,)),
    Fault(checkpoint_faults.bit_flip_in_checkpoint, (50,), (2000,)),
    Fault(checkpoint_faults.malicious_checkpoint),
    Fault(run_faults.kill_training_run, (1,), (100,), slow=True),
    Fault(run_faults.stop_signal_in_training, (1,), (50,), slow=True),
    Fault(run_faults.kill_in_evaluation, (1,), (20,), slow=True),
    Fault(run_faults.stop_signal_in_evaluation, (1,), (5,), slow=True),
    Fault(run_faults.resume_at_every_step, ((5,), (0,)), (_ALL_STEPS, (0, 2)), slow=True),
    Fault(run_faults.resume_with_other_layout_or_precision, (False,), (True,), slow=True),
    Fault(training_faults.disk_full_for_a_while, (1, 1.0), (5, 30.0), slow=True),
    Fault(training_faults.disk_full_in_training_run, (False,), (True,), slow=True),
    Fault(training_faults.nan_in_loss_or_gradient, (False,), (True,), slow=True),
    Fault(training_faults.loss_scale_collapse, (False,), (True,), slow=True),
    Fault(training_faults.failing_loader_worker, (1,), (5,), slow=True),
    Fault(rank_faults.kill_one_of_two_ranks, (1,), (20,), slow=True),
    Fault(rank_faults.hang_one_of_two_ranks, (1,), (3,), slow=True),
    Fault(rank_faults.rank_fails_under_torchrun, None, (True,)),
    Fault(rank_faults.kill_torchrun_agent, None, (10,)),
    Fault(rank_faults.lose_a_node, None),
    Fault(rank_faults.resume_with_other_number_of_ranks, (False,), (True,), slow=True),
    Fault(input_faults.images_seen_per_epoch, (20,), (500,)),
    Fault(input_faults.fuzzed_images, (300,), (50_000,), slow=True),
    Fault(input_faults.odd_imagenet_files, slow=True),
    Fault(input_faults.hostile_archives),
    Fault(input_faults.damaged_shards, (40,), (1000,)),
    Fault(input_faults.kill_while_unpacking_imagenet, (3,), (20,), slow=True),
    Fault(input_faults.kill_while_generating_sample, (1,), (30,), slow=True),
    Fault(input_faults.kill_while_resizing_images, (1,), (30,), slow=True),
    Fault(command_faults.wrong_setting_values, (15,), (None,), slow=True),
    Fault(command_faults.misspelt_settings, None, (10,)),
    Fault(command_faults.odd_folders_and_environments, slow=True),
    Fault(training_faults.shared_or_moved_run_folder, slow=True),
    Fault(training_faults.long_run_stays_bounded, None, (10_000,)),
    Fault(command_faults.failing_sweep_jobs, None, (3,)),
    Fault(command_faults.kill_sweep_launcher, None, (10,)),
)

MATRIX = {fault.plant.__name__: fault for fault in _FAULTS}
