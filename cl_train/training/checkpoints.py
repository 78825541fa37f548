"""Save a run and continue it: after a kill, or on other hardware."""

import dataclasses
import logging
import time
from dataclasses import dataclass
from typing import Any

from cl_train.config.schema import ConfigError
from cl_train.step.precision import full_precision_state
from cl_train.step.train_step import StepResult
from cl_train.system.checkpoint_file import snapshot
from cl_train.system.checkpoint_store import CheckpointStore, load_for_resume
from cl_train.system.distributed import Dist, gather_objects, on_main
from cl_train.system.run_folder import check_space
from cl_train.training.progress import Progress
from cl_train.training.run_state import (
    METADATA_KEY,
    TrainState,
    check_compatible,
    collect,
    random_state,
    restore,
    restore_random_state,
    restore_weights,
    tensor_bytes,
)

log = logging.getLogger(__name__)


@dataclass
class Checkpoints:
    """The checkpoints of one run. Every method is called by all ranks; only rank 0 reads and writes files.

    A checkpoint also holds the steps since the last log line: a resumed run logs the same numbers.
    """

    store: CheckpointStore
    state: TrainState
    metadata: dict[str, Any]  # identifies the run: see `run_state.check_compatible`
    dist: Dist
    saved_step: int = -1
    saved_at: float = dataclasses.field(default_factory=time.monotonic)

    def minutes_since_save(self) -> float:
        return (time.monotonic() - self.saved_at) / 60

    def check(self) -> None:
        """Raises ConfigError: a module's `get_extra_state` returns something else than plain types and tensors, or the
        disk has no space for one checkpoint.
        """
        weights = full_precision_state(self.state.model, self.state.parts.masters)
        try:
            for name, value in weights.items():
                if name.endswith("_extra_state"):
                    snapshot(value, name)
        except TypeError as error:
            raise ConfigError(f"the model cannot be saved in a checkpoint: {error}; change get_extra_state") from None
        if self.dist.is_main:
            tensors_per_weight = 3 if self.state.ema is None else 4  # weight, two moments at most, EMA
            checkpoint_bytes = tensors_per_weight * tensor_bytes(weights)
            for line in check_space(self.store.folder.parent, checkpoint_bytes, self.store.keep):
                log.warning("%s", line)

    def save(self, progress: Progress, unlogged_steps: list[StepResult], *, best: bool = False) -> None:
        """Save the state between two steps. The host waits for the device: the state is copied to the host."""
        own = {"random": random_state(self.dist.device), "window": [snapshot(vars(step)) for step in unlogged_steps]}
        ranks = gather_objects(own, self.dist)
        self.saved_step, self.saved_at = progress.step, time.monotonic()
        if not self.dist.is_main:
            return
        saved_progress = {**dataclasses.asdict(progress), "ranks": ranks}
        collected = collect(self.state, saved_progress, self.metadata)
        self.store.save(collected, progress.step, best=best)

    def mark_best(self, progress: Progress, unlogged_steps: list[StepResult]) -> None:
        """Make `best.pt` the checkpoint of this step, which is saved now unless it was saved before the evaluation."""
        if self.saved_step != progress.step or not on_main(lambda: self.store.mark_best(progress.step), self.dist):
            self.save(progress, unlogged_steps, best=True)

    def resume(self, source: str, *, training: bool = True) -> tuple[Progress, list[StepResult]] | None:
        """Restore the checkpoint that `resume=` names; None if `resume=auto` finds none. Without `training` only the
        weights count.

        Rank 0 reads the file and sends it to the others: nodes need no shared folder, and all ranks get the same state.

        Raises:
            ConfigError: there is no such checkpoint, or it belongs to another run.
            CheckpointError: it is damaged.
        """
        found = on_main(lambda: load_for_resume(source, self.store), self.dist)
        if found is None:
            return None
        path, saved, skipped = found
        for line in skipped:
            log.info("skipped a damaged checkpoint: %s", line)
        for note in check_compatible(saved[METADATA_KEY], self.metadata, training=training):
            log.info("resume: %s", note)
        if training:
            progress, unlogged_steps = self._restore(saved)
        else:
            restore_weights(saved, self.state)
            progress, unlogged_steps = Progress(**{k: v for k, v in saved["progress"].items() if k != "ranks"}), []
        log.info("resumed from %s: epoch %d, step %d", path, progress.epoch, progress.step)
        return progress, unlogged_steps

    def _restore(self, saved: dict[str, Any]) -> tuple[Progress, list[StepResult]]:
        device = self.dist.device
        values = restore(saved, self.state)
        ranks = values.pop("ranks")
        if self.dist.rank < len(ranks):  # a rank that did not exist before keeps the seed + rank initialisation
            restore_random_state(ranks[self.dist.rank]["random"], device)
        # Per-rank sums are only valid for the same world size; with another one the next log line has fewer steps.
        rows = ranks[self.dist.rank]["window"] if len(ranks) == self.dist.world_size else []
        unlogged_steps = [StepResult(**{name: value.to(device) for name, value in row.items()}) for row in rows]
        return Progress(**values), unlogged_steps
