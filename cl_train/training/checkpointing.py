"""The checkpoints of a run: what is in them, when one is saved, and how a run continues."""

import copy
import logging
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cl_train.config.schema import affects
from cl_train.config.validation import flatten, show
from cl_train.data.images import listed
from cl_train.errors import ConfigError
from cl_train.models.files import load_state
from cl_train.step.backup import random_state, set_buffer, set_random_state
from cl_train.step.train_step import StepResult
from cl_train.system.checkpoints import CheckpointError, CheckpointStore, load_for_resume, snapshot
from cl_train.system.distributed import Dist, gather_objects, on_main
from cl_train.system.files import check_space
from cl_train.system.run_folder import read_records
from cl_train.training.build import TrainState
from cl_train.training.evaluation import score_of
from cl_train.training.plan import Plan, Progress

log = logging.getLogger(__name__)


def collect(
    state: TrainState, progress: Mapping[str, Any], identity: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the state between two steps, as references; the host waits for the loss scale.

    Weights and optimizer state are in fp32 and keyed by parameter name, so that another precision,
    layout or grouping can load them.
    """
    optimizer, trainable = state.parts.optimizer, state.parts.weights.trainable()
    average = state.parts.average
    steps = [group["step"] for group in optimizer.param_groups if "step" in group]
    moments = {
        name: optimizer.state[weight]
        for name, weight in trainable.items()
        if weight in optimizer.state
    }
    return {
        "model": state.parts.weights.state_dict(),
        # The buffers that a state dict leaves out; a forward pass may change them.
        "buffers": {
            "model": _not_persistent(state.model),
            "average": {} if average is None else _not_persistent(average.module),
        },
        "optimizer": {
            "name": type(optimizer).__name__,
            "step": steps[0] if steps else None,
            "state": {name: dict(values) for name, values in moments.items()},
        },
        "scaler": state.parts.scaler.state_dict(),
        "average": None if average is None else average.module.state_dict(),
        "progress": dict(progress),
        "facts": dict(identity),
        "saved_at": time.time(),
    }


def _not_persistent(model: nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    return {name: value for name, value in model.named_buffers() if name not in state}


@dataclass
class Checkpoints:
    """The checkpoints of one run. Each holds the steps since the last log line, so that a resumed
    run logs the same numbers. All ranks call every method; only rank 0 reads and writes files.
    """

    store: CheckpointStore
    state: TrainState
    identity: dict[str, Any]  # of the run: see `check_compatible`
    dist: Dist
    saved_step: int = -1
    resumed_from: Path | None = None

    def check(self) -> None:
        """Raises ConfigError: the disk has no space, or the model's state cannot be saved."""
        weights = self.state.parts.weights.state_dict()
        tensors = [value for value in weights.values() if isinstance(value, torch.Tensor)]
        try:
            snapshot({k: v for k, v in weights.items() if not isinstance(v, torch.Tensor)})
        except TypeError as error:
            what = f"the model cannot be saved in a checkpoint: {error}"
            raise ConfigError(f"{what}; change its state_dict or get_extra_state") from None
        if self.dist.is_main:
            # The weights, at most two moments, and the EMA.
            copies = 3 if self.state.parts.average is None else 4
            needed_bytes = copies * sum(tensor.nbytes for tensor in tensors)
            check_space(self.store.folder.parent, needed_bytes)

    def save(self, progress: Progress, *, best: bool = False) -> None:
        """Saves the state between two steps; the host waits for the device."""
        random = random_state(self.dist.device)  # the order and augmentation of images need none
        saved = dict(vars(progress))
        steps = [snapshot(vars(step)) for step in saved.pop("pending_steps")]
        saved["ranks"] = gather_objects({"random": random, "window": steps}, self.dist)
        self.saved_step = progress.step
        if self.dist.is_main:
            content = collect(self.state, saved, self.identity)
            self.store.write_step(content, progress.step, best=best)

    def mark_best(self, progress: Progress) -> None:
        """Makes `best.pt` the checkpoint of this step, which is saved now if it was not before."""
        if self.saved_step != progress.step:
            self.save(progress, best=True)
        elif self.dist.is_main:
            self.store.link_best(progress.step)


def starting_point(
    checkpoints: Checkpoints, plan: Plan, folder: Path, source: str | None, best_by: str | None
) -> Progress:
    """Restores the checkpoint that `source` (`resume=`) names, if any; returns the progress."""
    dist = checkpoints.dist
    checkpoints.check()
    progress = resume(checkpoints, source)
    records = on_main(lambda: read_records(folder)[0], dist)
    if progress is None:
        if source and records and dist.is_main:
            log.warning(f"{folder} has no checkpoint: the run begins anew and replaces its records")
        return Progress()
    # The checkpoint was written before the evaluation of its epoch: the records say whether that
    # took place.
    evaluated = {record["kind"]: record for record in records if record["step"] == progress.step}
    is_closed = "val" in evaluated or not plan.is_evaluation_due(progress)
    if plan.is_epoch_end(progress) and is_closed:
        if "val" in evaluated:
            score = score_of(evaluated, best_by)
            progress.count_evaluation(score, evaluated["val"]["top1"])
        plan.close_epoch(progress)
    if checkpoints.resumed_from is not None and dist.is_main:
        last = progress.step if progress.best_score > -math.inf else 0
        best_step = progress.best["step"] if progress.best else None
        checkpoints.store.take_best(checkpoints.resumed_from, best_step, last)
    if progress.step > plan.last_step:
        progress.closed_step = progress.step  # mid-epoch, without an evaluation
        where = f"epoch {progress.epoch}, step {progress.step}"
        log.info("already past %s (%s): nothing is trained", plan.end, where)
    elif plan.is_done(progress):
        log.info("nothing is left to do: the run ended with step %d", progress.step)
    return progress


def resume(
    checkpoints: Checkpoints, source: str | None, *, training: bool = True
) -> Progress | None:
    """Restores the checkpoint that `source` names, or only its weights without `training`; returns
    its progress. None: `source` is None, or `auto` finds no checkpoint. Rank 0 reads for all: nodes
    need no shared folder. Raises ConfigError: the checkpoint belongs to another run.
    """
    store = checkpoints.store
    newest = source and on_main(lambda: load_for_resume(source, store), checkpoints.dist)
    if not newest:
        return None
    path, saved, skipped = newest
    for line in skipped:
        log.info("skipped a damaged checkpoint: %s", line)
    changes = check_compatible(saved["facts"], checkpoints.identity, training=training)
    for change in changes.values():
        log.info("resume: %s", change)

    restore(saved, checkpoints.state, training=training)
    values = saved["progress"]
    ranks = values.pop("ranks")
    if "best_top1" in values:  # its name before 0.3
        values["best_score"] = values.pop("best_top1")
    progress = Progress(**values)
    progress.resumed_with += [text for key, text in changes.items() if has_effect(key)]
    if "best_by" in changes:  # scores have another scale
        progress.best_score, progress.best = -math.inf, None
        progress.evaluations_without_gain = 0
    checkpoints.resumed_from = path
    if training:
        restore_rank(ranks, progress, checkpoints.dist)
    where = (path, progress.epoch, progress.step)
    if training:
        log.info("resumed from %s: epoch %d, step %d", *where)
    else:
        log.info("weights: %s (epoch %d, step %d)", *where)
    return progress


def restore_rank(ranks: list[dict[str, Any]], progress: Progress, dist: Dist) -> None:
    """Restores the random state and pending steps of this rank; a rank that did not exist before
    keeps its seed + rank initialisation.
    """
    if dist.rank < len(ranks):
        set_random_state(ranks[dist.rank]["random"], dist.device)
    # With another world size the sums of a rank are void: the next log line has fewer steps.
    for row in ranks[dist.rank]["window"] if len(ranks) == dist.world_size else ():
        result = StepResult(**{name: value.to(dist.device) for name, value in row.items()})
        progress.pending_steps.append(result)


def restore(checkpoint: Mapping[str, Any], state: TrainState, *, training: bool = True) -> None:
    """Copies `checkpoint` into a run's objects, which keep layout, dtype, device and
    hyperparameters; without `training`, only the weights. Raises CheckpointError: it does not fit.
    """
    average, models = state.parts.average, {"model": state.model}
    if average is not None:
        models["average"] = average.module
    buffers = checkpoint.get("buffers", {"model": {}, "average": {}})  # since 0.3
    for entry, model in models.items():
        load_weights(model, checkpoint[entry] or checkpoint["model"])
        for name, value in (buffers[entry] or buffers["model"]).items():
            set_buffer(model, name, value.to(state.parts.device))
    state.parts.weights.load(checkpoint["model"])
    if average is not None:
        average.collect()
    if not training:
        return
    if state.parts.scaler.is_enabled() and checkpoint["scaler"]:
        # Else the scale starts anew.
        state.parts.scaler.load_state_dict(dict(checkpoint["scaler"]))
    optimizer, parameters = state.parts.optimizer, state.parts.weights.trainable()
    saved, name = checkpoint["optimizer"], type(optimizer).__name__
    if saved["name"] != name:
        what = f"the checkpoint was written by {saved['name']}, this run uses {name}"
        advice = "resume with the same optim=, or take the weights only with weights=<checkpoint>"
        raise CheckpointError(f"{what}: {advice}")
    if untrained := sorted(saved["state"].keys() - parameters.keys()):
        what = f"optimizer state for {untrained[:5]}, which this run does not train"
        raise CheckpointError(f"the checkpoint has {what}")
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    index_of = {id(parameter): index for index, parameter in enumerate(ordered)}
    # torch moves and casts the state. Hyperparameters are this run's own, except the number of
    # steps, which some of timm's optimizers (LAMB) count per group.
    packed = {index_of[id(parameters[key])]: value for key, value in saved["state"].items()}
    groups = optimizer.state_dict()["param_groups"]
    if saved["step"] is not None:
        groups = [group | {"step": copy.deepcopy(saved["step"])} for group in groups]
    optimizer.load_state_dict({"state": packed, "param_groups": groups})
    for parameter in ordered:
        for key, value in optimizer.state.get(parameter, {}).items():
            # The fused and foreach fast paths need equal strides.
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape != ():
                moment = torch.empty_like(parameter, dtype=value.dtype)
                optimizer.state[parameter][key] = moment.copy_(value)


def load_weights(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Raises CheckpointError: `state` does not fit the model."""
    what = "the checkpoint's weights do not fit the model"
    try:
        missing, unexpected = load_state(model, state, what)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    if missing or unexpected:
        raise CheckpointError(f"{what}: missing {missing[:3]}, unexpected {unexpected[:3]}")


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], keys: Iterable[str]
) -> dict[str, str]:
    """Returns the `keys` that both have with different values, as "batch_size: 8 -> 1". Values are
    compared as text: another type is no difference.
    """
    return {
        key: f"{key}: {show(before[key]):.120} -> {show(now[key]):.120}"
        for key in keys
        if key in before and key in now and show(before[key]) != show(now[key])
    }


def check_compatible(
    saved: Mapping[str, Any], current: Mapping[str, Any], *, training: bool = True
) -> dict[str, str]:
    """Returns the `differences` that a resume may have. Raises ConfigError: this is another run or,
    without `training`, another model.
    """
    of_training = ("global_batch_size",) if training else ()
    problems = [*differences(saved, current, ("model", "num_classes", *of_training)).values()]
    if saved["classes"] != current["classes"]:
        other = sorted({*saved["classes"]} ^ {*current["classes"]})
        problems.append(f"other classes: {listed(other) if other else 'another order'}")
    elif training and differences(saved, current, ("data_fingerprint",)):
        problems.append("other images: their names or labels differ")
    if problems:
        needs = "resume needs the same model, classes, data and global batch"
        source = current["config"]["resume"]
        advice = f"weights={source or 'CHECKPOINT'} takes weights only"
        if training and source and (Path(source).expanduser() / "config.yaml").is_file():
            code = f" model={saved['model']}" if ":" in saved["model"] else ""
            same = f"config={source} resume={source}{code}"
            advice = f"{same} continues with the settings of that run; {advice}"
        raise ConfigError([*(f"resume: {problem}" for problem in problems), f"{needs}; {advice}"])
    if not training:
        return {}
    before, now = (
        dict(flatten({"versions": facts["versions"]} | facts["config"]))
        for facts in (saved, current)
    )
    settings = sorted(now.keys() - {"resume", "resume_sweep", "overwrite", "data.workers"})
    of_machine = ("precision", "memory_format", "world_size", "workers")
    return differences(saved, current, of_machine) | differences(before, now, settings)


def has_effect(key: str) -> bool:
    """Whether a change of this setting or fact may change the speed or the loss of a run."""
    return affects(key) != "nothing" and key not in ("weights", "max_steps", "data.root")
