"""Saving a run so that it can go on, and going on: after a kill, on other hardware, or back from a bad step."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch.distributed

from cl_train.config.schema import Config, ConfigError
from cl_train.config.validation import to_mapping
from cl_train.data.build import Data
from cl_train.step.train_step import StepSums
from cl_train.system.checkpoint_file import snapshot
from cl_train.system.checkpoint_store import CheckpointStore, load_for_resume
from cl_train.system.distributed import Dist, gather_objects
from cl_train.training.nonfinite import TrainingFault
from cl_train.training.plan import Progress
from cl_train.training.records import Tracker
from cl_train.training.run_state import check_compatible, collect, random_state, restore, restore_random_state
from cl_train.training.setup import Assembly

log = logging.getLogger(__name__)


def identify(cfg: Config, facts: dict[str, Any], data: Data) -> dict[str, Any]:
    """What a checkpoint says about the run it belongs to: see `run_state.check_compatible`."""
    return {
        "model": cfg.model,
        "num_classes": data.num_classes,
        "classes": list(data.classes),
        "data_fingerprint": data.fingerprint,
        "precision": facts["precision"],
        "memory_format": facts["memory_format"],
        "world_size": facts["world_size"],
        "global_batch_size": facts["global_batch_size"],
        "versions": {name: facts["environment"][name] for name in ("torch", "torchvision", "python")},
        "config": to_mapping(cfg),
    }


def resume(
    cfg: Config, store: CheckpointStore, assembly: Assembly, identity: dict[str, Any], dist: Dist
) -> tuple[Progress, list[StepSums]]:
    """Where the run starts: at the checkpoint that `resume=` names, whose state is put into `assembly`, or at step 0.

    With it come the sums of the window that was open, so that a window is logged as if nothing had happened.

    Every rank reads the file: in a shared folder that is as cheap as one rank reading and sending.
    """
    found = load_for_resume(cfg.resume, store) if cfg.resume else None
    if found is None:
        if cfg.evaluate_only and cfg.weights is None:
            raise ConfigError("evaluate_only=true resume=auto: this run folder has no checkpoint to evaluate")
        return Progress(), []
    path, state, skipped = found
    for line in skipped:
        log.warning("skipped a damaged checkpoint: %s", line)
    for note in check_compatible(state["facts"], identity):
        log.info("resume: %s", note)
    progress, sums = take_up(state, assembly, dist)
    log.info("resumed from %s: epoch %d, step %d", path, progress.epoch, progress.step)
    return progress, sums


def take_up(state: dict[str, Any], assembly: Assembly, dist: Dist) -> tuple[Progress, list[StepSums]]:
    """Put a checkpoint's state into `assembly` and this rank's random generators."""
    parts = assembly.parts
    saved = restore(
        state,
        model=assembly.model,
        optimizer=parts.optimizer,
        scaler=parts.scaler,
        masters=parts.masters,
        average=assembly.average,
    )
    ranks = saved.pop("ranks")
    own = ranks[dist.rank % len(ranks)]
    restore_random_state(own["random"], dist.device)
    # Counts of other ranks' shares would not fit: with another world size the open window starts anew.
    rows = own["window"] if len(ranks) == dist.world_size else []
    return Progress(**saved), [StepSums(**{name: value.to(dist.device) for name, value in row.items()}) for row in rows]


def save(
    store: CheckpointStore,
    assembly: Assembly,
    progress: Progress,
    identity: dict[str, Any],
    sums: list[StepSums],
    dist: Dist,
    best: bool = False,
) -> None:
    """Every rank gives its random state and open window; rank 0 writes. Sync point: the state is copied to the host."""
    own = {"random": random_state(dist.device), "window": [snapshot(vars(row)) for row in sums]}
    ranks = gather_objects(own, dist)
    if not dist.is_main:
        return
    parts = assembly.parts
    state = collect(
        model=assembly.model,
        optimizer=parts.optimizer,
        scaler=parts.scaler,
        masters=parts.masters,
        average=assembly.average,
        progress={**dataclasses.asdict(progress), "ranks": ranks},
        facts=identity,
    )
    store.save(state, progress.step, best=best)


def roll_back(
    store: CheckpointStore, assembly: Assembly, progress: Progress, tracker: Tracker, dist: Dist
) -> list[StepSums]:
    """Return to the newest checkpoint of this run; records of the steps in between are dropped.

    Raises:
        TrainingFault: there is none yet.
    """
    store.wait()
    if dist.world_size > 1:
        torch.distributed.barrier()  # rank 0's file is whole before the others look for it
    found = store.newest()
    if found is None:
        raise TrainingFault("on_nonfinite=rollback: there is no checkpoint to return to; set checkpoint.every_steps")
    path, state, _ = found
    earlier, sums = take_up(state, assembly, dist)
    progress.__dict__.update(earlier.__dict__)
    tracker.rewind(progress.step)
    if dist.is_main:
        log.warning("rolled back to %s, step %d", path.name, progress.step)
    return sums
