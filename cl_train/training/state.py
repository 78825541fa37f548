"""Save a run and continue it: after a kill, or on other hardware."""

import copy
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from cl_train.config.schema import ConfigError
from cl_train.config.validation import flatten
from cl_train.data.device import Batch
from cl_train.step.precision import EMA
from cl_train.step.train_step import StepParts, StepResult
from cl_train.system.checkpoints import CheckpointError, CheckpointStore, load_for_resume, snapshot
from cl_train.system.distributed import Dist, gather_objects, on_main
from cl_train.system.files import check_space
from cl_train.training.progress import Progress

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainState:
    """The model of a run, the objects that train it, and the step."""

    model: nn.Module  # not wrapped: for evaluation and checkpoints
    parts: StepParts  # optimizer, loss scaler and the model that trains: wrapped in DDP, compiled
    ema: EMA | None
    memory_format: torch.memory_format  # of the model and its input
    train_step: Callable[[Sequence[Batch]], StepResult]  # eager or as a CUDA graph


def collect(state: TrainState, progress: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The state between two steps, as references, and `metadata` of the run. The host waits for the device.

    fp32 weights and optimizer state by parameter name: a run in another precision, layout or grouping can load them.
    """
    optimizer, trainable = state.parts.optimizer, state.parts.masters.trainable()
    return {
        "model": state.parts.masters.state_dict(),
        "optimizer": {
            "name": type(optimizer).__name__,
            "step": next((group["step"] for group in optimizer.param_groups if "step" in group), None),
            "state": {name: dict(optimizer.state[p]) for name, p in trainable.items() if p in optimizer.state},
        },
        "scaler": state.parts.scaler.state_dict(),
        "average": None if state.ema is None else state.ema.module.state_dict(),
        "progress": dict(progress),
        "facts": dict(metadata),
        "saved_at": time.time(),
    }


def restore(saved: Mapping[str, Any], state: TrainState) -> dict[str, Any]:
    """Copy a loaded checkpoint into a run's objects, which keep their layout, dtype, device and hyperparameters.

    Returns its progress. Raises CheckpointError: the weights or the optimizer do not fit.
    """
    restore_weights(saved, state)
    _restore_optimizer(saved["optimizer"], state)
    if state.parts.scaler.is_enabled() and saved["scaler"]:
        state.parts.scaler.load_state_dict(dict(saved["scaler"]))  # else the scale starts at amp.init_scale
    return dict(saved["progress"])


def restore_weights(saved: Mapping[str, Any], state: TrainState) -> None:
    """The model and its EMA. Raises CheckpointError: they do not fit."""
    try:
        state.model.load_state_dict(saved["model"])
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint's weights do not fit the model: {error}") from error
    state.parts.masters.load(saved["model"])
    if state.ema is not None:
        state.ema.module.load_state_dict(saved["average"] or saved["model"])


def _restore_optimizer(saved: Mapping[str, Any], state: TrainState) -> None:
    optimizer, parameters = state.parts.optimizer, state.parts.masters.trainable()
    name = type(optimizer).__name__
    if saved["name"] != name:
        raise CheckpointError(
            f"the checkpoint was written by {saved['name']}, this run uses {name}: resume with the same optim=, "
            "or start from the weights only with weights=<checkpoint>"
        )
    if unknown := sorted(saved["state"].keys() - parameters.keys()):
        raise CheckpointError(f"the checkpoint has optimizer state for {unknown[:5]}, which this run does not train")
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    index_of = {id(parameter): index for index, parameter in enumerate(ordered)}
    # torch moves and casts the state. The groups with their hyperparameters are this run's own, except the number of
    # steps, which some of timm's optimizers (LAMB) count per group.
    packed = {index_of[id(parameters[key])]: value for key, value in saved["state"].items()}
    groups = optimizer.state_dict()["param_groups"]
    if saved.get("step") is not None:  # absent from the first checkpoints of this format
        groups = [group | {"step": copy.deepcopy(saved["step"])} for group in groups]
    optimizer.load_state_dict({"state": packed, "param_groups": groups})
    for parameter in ordered:
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0:
                # The fused and foreach fast paths need equal strides.
                optimizer.state[parameter][key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


_MUST_MATCH = ("model", "num_classes", "data_fingerprint", "global_batch_size")
_MAY_DIFFER = ("precision", "memory_format", "world_size", "versions")


def check_compatible(saved: Mapping[str, Any], current: Mapping[str, Any], *, training: bool = True) -> list[str]:
    """Notes on differences of metadata. Raises ConfigError: this is another run or, to evaluate, another model."""
    problems = _differences(saved, current, _MUST_MATCH if training else _MUST_MATCH[:2])
    if saved["classes"] != current["classes"]:
        other = sorted({*saved["classes"]} ^ {*current["classes"]}) or "another order"
        problems.append(f"other classes: {other!r:.120}")
    if problems:
        what, advice = "model and classes", "see its config.yaml"
        if training:
            what, advice = "model, data and global batch", "weights=<checkpoint> starts from its weights only"
        raise ConfigError([*(f"resume: {problem}" for problem in problems), f"resume needs the same {what}; {advice}"])
    if not training:
        return []
    before, now = dict(flatten(saved["config"])), dict(flatten(current["config"]))
    settings = sorted({*before, *now} - {"resume", "resume_sweep", "overwrite"})
    return _differences(saved, current, _MAY_DIFFER) + _differences(before, now, settings)


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    pairs = [(key, before.get(key), now.get(key)) for key in keys]
    return [f"{key} was {old!r:.120}, now {new!r:.120}" for key, old, new in pairs if old != new]


@dataclass
class Checkpoints:
    """The checkpoints of one run. Every method is called by all ranks; only rank 0 reads and writes files.

    A checkpoint also holds the steps since the last log line: a resumed run logs the same numbers.
    """

    store: CheckpointStore
    state: TrainState
    metadata: dict[str, Any]  # identifies the run: see `check_compatible`
    dist: Dist
    saved_step: int = -1
    saved_at: float = field(default_factory=time.monotonic)

    def minutes_since_save(self) -> float:
        return (time.monotonic() - self.saved_at) / 60

    def check(self) -> None:
        """Raises ConfigError: the disk has no space, or `get_extra_state` returns what cannot be saved."""
        weights = self.state.parts.masters.state_dict()
        try:
            snapshot({name: value for name, value in weights.items() if name.endswith("_extra_state")})
        except TypeError as error:
            raise ConfigError(f"the model cannot be saved in a checkpoint: {error}; change get_extra_state") from None
        if self.dist.is_main:
            weight_bytes = sum(value.nbytes for value in weights.values() if isinstance(value, torch.Tensor))
            copies = 3 if self.state.ema is None else 4  # weights, two moments at most, EMA
            check_space(self.store.folder.parent, copies * weight_bytes, self.store.keep)

    def save(self, progress: Progress, unlogged_steps: list[StepResult], *, best: bool = False) -> None:
        """Save the state between two steps. The host waits for the device: the state is copied to the host."""
        # Of torch's generators (dropout, stochastic depth). Order and augmentation need none.
        random = {"cpu": torch.get_rng_state()}
        if self.dist.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.dist.device)
        ranks = gather_objects({"random": random, "window": [snapshot(vars(s)) for s in unlogged_steps]}, self.dist)
        self.saved_step, self.saved_at = progress.step, time.monotonic()
        if self.dist.is_main:
            collected = collect(self.state, {**asdict(progress), "ranks": ranks}, self.metadata)
            self.store.save(collected, progress.step, best=best)

    def mark_best(self, progress: Progress, unlogged_steps: list[StepResult]) -> None:
        """Make `best.pt` the checkpoint of this step, which is saved now unless it was saved before the evaluation."""
        if self.saved_step != progress.step or not on_main(lambda: self.store.mark_best(progress.step), self.dist):
            self.save(progress, unlogged_steps, best=True)

    def resume(self, source: str, *, training: bool = True) -> tuple[Progress, list[StepResult]] | None:
        """Restore the checkpoint that `resume=` names, or without `training` only its weights; None: `auto` finds none.

        Rank 0 reads the file for all: nodes need no shared folder. Raises ConfigError: there is no such checkpoint, or
        it is of another run. CheckpointError: it is damaged.
        """
        found = on_main(lambda: load_for_resume(source, self.store), self.dist)
        if found is None:
            return None
        path, saved, skipped = found
        for line in skipped:
            log.info("skipped a damaged checkpoint: %s", line)
        for note in check_compatible(saved["facts"], self.metadata, training=training):
            log.info("resume: %s", note)
        ranks, rank, device = saved["progress"].pop("ranks"), self.dist.rank, self.dist.device
        progress, unlogged_steps = Progress(**saved["progress"]), []
        if not training:
            restore_weights(saved, self.state)
        else:
            restore(saved, self.state)
            if rank < len(ranks):  # a rank that did not exist before keeps the seed + rank initialisation
                torch.set_rng_state(ranks[rank]["random"]["cpu"])
                if device.type == "cuda" and "cuda" in ranks[rank]["random"]:
                    torch.cuda.set_rng_state(ranks[rank]["random"]["cuda"], device)
            # Per-rank sums are only valid for the same world size; with another one the next log line has fewer steps.
            rows = ranks[rank]["window"] if len(ranks) == self.dist.world_size else []
            unlogged_steps = [StepResult(**{name: value.to(device) for name, value in row.items()}) for row in rows]
        log.info("resumed from %s: epoch %d, step %d", path, progress.epoch, progress.step)
        return progress, unlogged_steps
