"""The fault matrix: which faults are planted, and how often in the ordinary tests (quick) and in full."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tiny
from archive_faults import damaged_shards, hostile_archives, kill_while_unpacking_imagenet
from bench import Bench
from checkpoint_faults import (
    bit_flip_in_checkpoint,
    disk_full_while_writing_checkpoint,
    kill_while_writing_checkpoint,
    malicious_checkpoint,
    truncated_checkpoint,
)
from config_fuzz import misspelt_settings, wrong_setting_values
from folder_faults import (
    disk_full_for_a_while,
    long_run_stays_bounded,
    odd_folders_and_environments,
    shared_or_moved_run_folder,
)
from image_faults import fuzzed_images, odd_imagenet_files
from interrupt_faults import (
    kill_in_evaluation,
    kill_sweep_launcher,
    kill_while_generating_sample,
    kill_while_resizing_images,
    stop_signal_in_evaluation,
)
from outcome import Outcome
from rank_faults import (
    hang_one_of_two_ranks,
    kill_one_of_two_ranks,
    kill_torchrun_agent,
    lose_a_node,
    rank_fails_under_torchrun,
    resume_with_other_number_of_ranks,
)
from run_faults import (
    kill_training_run,
    resume_at_every_step,
    resume_with_other_layout_or_precision,
    stop_signal_in_training,
)
from sample_faults import images_seen_per_epoch
from sweep_faults import failing_sweep_jobs
from training_faults import (
    disk_full_in_training_run,
    failing_loader_worker,
    loss_scale_collapse,
    nan_in_loss_or_gradient,
)


@dataclass(frozen=True)
class Fault:
    """One row. `quick` and `full` are the arguments of `plant` after the bench: mostly, how often.

    Rows with `quick=None` take long even for one try; they run with the full counts only.
    """

    plant: Callable[..., Outcome]
    quick: tuple[Any, ...] | None = ()
    full: tuple[Any, ...] = ()
    slow: bool = False  # left out by `pytest -m "not slow"`
    enough: float = 1.0  # share of the tries that must survive

    def run(self, bench: Bench, counts: str) -> Outcome:
        arguments = self.full if counts == "full" else self.quick
        assert arguments is not None
        return self.plant(bench, *arguments)

    def passes(self, outcome: Outcome) -> bool:
        return outcome.tried > 0 and outcome.survived >= self.enough * outcome.tried


_ALL_STEPS = range(1, tiny.STEPS + 1)

_FAULTS = (
    Fault(kill_while_writing_checkpoint, (8,), (500,), slow=True),
    Fault(disk_full_while_writing_checkpoint, (20,), (300,)),
    Fault(truncated_checkpoint, (50,), (1000,)),
    Fault(bit_flip_in_checkpoint, (50,), (2000,)),
    Fault(malicious_checkpoint),
    Fault(kill_training_run, (1,), (100,), slow=True),
    Fault(stop_signal_in_training, (1,), (50,), slow=True),
    Fault(kill_in_evaluation, (1,), (20,), slow=True),
    Fault(stop_signal_in_evaluation, (1,), (5,), slow=True),
    Fault(resume_at_every_step, ((5,), (0,)), (_ALL_STEPS, (0, 2)), slow=True),
    Fault(resume_with_other_layout_or_precision, (False,), (True,), slow=True),
    Fault(disk_full_for_a_while, (1, 1.0), (5, 30.0), slow=True),
    Fault(disk_full_in_training_run, (False,), (True,), slow=True),
    Fault(nan_in_loss_or_gradient, (False,), (True,), slow=True),
    Fault(loss_scale_collapse, (False,), (True,), slow=True),
    Fault(failing_loader_worker, (1,), (5,), slow=True),
    Fault(kill_one_of_two_ranks, (1,), (20,), slow=True),
    Fault(hang_one_of_two_ranks, (1,), (3,), slow=True),
    Fault(rank_fails_under_torchrun, None, (True,)),
    Fault(kill_torchrun_agent, None, (10,)),
    Fault(lose_a_node, None),
    Fault(resume_with_other_number_of_ranks, (False,), (True,), slow=True),
    Fault(images_seen_per_epoch, (20,), (500,)),
    Fault(fuzzed_images, (300,), (50_000,), slow=True),
    Fault(odd_imagenet_files, slow=True),
    Fault(hostile_archives),
    Fault(damaged_shards, (40,), (1000,)),
    Fault(kill_while_unpacking_imagenet, (3,), (20,), slow=True),
    Fault(kill_while_generating_sample, (1,), (30,), slow=True),
    Fault(kill_while_resizing_images, (1,), (30,), slow=True),
    Fault(wrong_setting_values, (15,), (None,), slow=True),
    # Nobody can guess every misspelt word.
    Fault(misspelt_settings, None, (10,), enough=0.95),
    Fault(odd_folders_and_environments, slow=True),
    Fault(shared_or_moved_run_folder, slow=True),
    Fault(long_run_stays_bounded, None, (10_000,)),
    Fault(failing_sweep_jobs, None, (3,)),
    Fault(kill_sweep_launcher, None, (10,)),
)

MATRIX = {fault.plant.__name__: fault for fault in _FAULTS}
