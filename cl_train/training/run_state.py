"""What a checkpoint holds: a run's objects taken apart into plain values, and put together again.

`checkpoint.py` knows files; this one knows models, optimizers and what makes two runs the same run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from cl_train.config.schema import ConfigError
from cl_train.step.ema import WeightAverage
from cl_train.step.precision import MasterWeights, full_precision_state, trainable_parameters
from cl_train.system.checkpoint_file import CheckpointError

log = logging.getLogger(__name__)


def collect(
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    progress: Mapping[str, Any],
    facts: Mapping[str, Any],
    masters: MasterWeights | None = None,
    average: WeightAverage | None = None,
) -> dict[str, Any]:
    """The run's state between two steps, as references: `save` copies it. The host waits for the device (loss scale).

    Args:
        model: without DDP or compile wrappers.
        progress: epoch, step, batch_in_epoch, images_seen, best, RNG of every rank: what the loop continues from.
        facts: what the run is: see `check_compatible`.

    Weights are saved in float32 where there are float32 masters, and optimizer state by parameter name, so that a run
    in another precision or layout, or with other parameter groups, can take them up.
    """
    return {
        "model": full_precision_state(model, masters),
        "optimizer": {
            "name": type(optimizer).__name__,
            "state": {
                name: dict(optimizer.state[parameter])
                for name, parameter in trainable_parameters(model, masters).items()
                if parameter in optimizer.state
            },
        },
        "scaler": scaler.state_dict(),
        "average": None if average is None else average.module.state_dict(),
        "progress": dict(progress),
        "facts": dict(facts),
        "saved_at": time.time(),
    }


def restore(
    state: Mapping[str, Any],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    masters: MasterWeights | None = None,
    average: WeightAverage | None = None,
) -> dict[str, Any]:
    """Put a loaded state into a run's objects and return its progress.

    Values are copied into the tensors that exist, so the run's own layout, dtype and device win; optimizer state is
    laid out like its parameter. Hyperparameters (learning rate, weight decay, fused or not) stay the run's own.

    Raises:
        CheckpointError: the weights or the optimizer do not fit.
    """
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint's weights do not fit the model: {error}") from error
    if masters is not None:
        masters.load(state["model"])
    _restore_optimizer(state["optimizer"], trainable_parameters(model, masters), optimizer)
    _restore_scaler(state["scaler"], scaler)
    if average is not None:
        if state["average"] is None:
            log.info("the checkpoint has no moving average: it starts from the checkpoint's weights")
        average.module.load_state_dict(state["average"] or state["model"])
    elif state["average"] is not None:
        log.info("the checkpoint's moving average is dropped: ema_decay is 0")
    return dict(state["progress"])


def copy_statistics(*models: nn.Module | None) -> list[torch.Tensor]:
    """Copies of the models' buffers (BatchNorm's statistics) on their device; for `restore_statistics`."""
    return [buffer.clone() for model in models if model is not None for buffer in model.buffers()]


@torch.no_grad()
def restore_statistics(copies: list[torch.Tensor], *models: nn.Module | None) -> None:
    """Undo what NaN activations left in the buffers: an update that is skipped spares the weights, not them."""
    buffers = [buffer for model in models if model is not None for buffer in model.buffers()]
    for buffer, copied in zip(buffers, copies, strict=True):
        buffer.copy_(copied)


def tensor_bytes(tree: Any) -> int:
    """What the tensors of a collected state take on disk, nearly all of a checkpoint."""
    if isinstance(tree, torch.Tensor):
        return tree.nbytes
    if isinstance(tree, Mapping):
        return sum(tensor_bytes(value) for value in tree.values())
    if isinstance(tree, list | tuple):
        return sum(tensor_bytes(value) for value in tree)
    return 0


def _restore_optimizer(
    saved: Mapping[str, Any], parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    name = type(optimizer).__name__
    if saved["name"] != name:
        raise CheckpointError(
            f"the checkpoint was written by {saved['name']}, this run uses {name}: resume with the same optim=, "
            "or start from the weights alone with weights=<checkpoint>"
        )
    unknown = set(saved["state"]) - set(parameters)
    if unknown:
        raise CheckpointError(
            f"the checkpoint has optimizer state of {sorted(unknown)[:5]}, which this run does not train"
        )
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    index_of = {id(parameter): index for index, parameter in enumerate(ordered)}
    # torch places and casts the state; the groups are this run's own, and so are their hyperparameters.
    packed = {index_of[id(parameters[key])]: value for key, value in saved["state"].items()}
    optimizer.load_state_dict({"state": packed, "param_groups": optimizer.state_dict()["param_groups"]})
    for parameter in ordered:
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0:
                # Strides of the checkpoint would fall off the fused and foreach fast paths.
                optimizer.state[parameter][key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _restore_scaler(saved: Mapping[str, Any], scaler: torch.amp.GradScaler) -> None:
    if scaler.is_enabled() and saved:
        scaler.load_state_dict(dict(saved))
    elif scaler.is_enabled():
        log.info("the checkpoint was saved without loss scaling: the scale starts at amp.init_scale")
    elif saved:
        log.info("the checkpoint's loss scale is dropped: this precision needs none")


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """This rank's torch generators (dropout, stochastic depth). Order and augmentation need none."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Continue the random numbers where `random_state` was taken; a generator that was not saved is left alone."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


# What must be equal, what may differ with a note; `config` is compared key by key, `classes` by name.
_MUST_MATCH = {
    "model": "another model",
    "num_classes": "another number of classes",
    "data_fingerprint": "other training images",
    "global_batch_size": "another global batch (batch_size x accumulate_steps x ranks): steps and order would not fit",
}
_MAY_DIFFER = ("precision", "memory_format", "world_size", "versions")


def check_compatible(saved: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """Refuse to continue another run; return notes on what differs and is allowed to.

    Both are `facts`: model, num_classes, classes, data_fingerprint, global_batch_size, precision, memory_format,
    world_size, versions, config (a nested dict).

    Raises:
        ConfigError: the differing keys with both values.
    """
    problems = [
        f"resume: {key} was {_short(saved.get(key))}, now {_short(facts.get(key))}: {why}"
        for key, why in _MUST_MATCH.items()
        if saved.get(key) != facts.get(key)
    ]
    before, now = list(saved.get("classes") or []), list(facts.get("classes") or [])
    if before != now:
        different = sorted(set(before) ^ set(now)) or [a for a, b in zip(before, now, strict=True) if a != b]
        problems.append(f"resume: other classes, or in another order: {_short(different)}")
    if problems:
        problems.append(
            "resume needs the same model, data and global batch; weights=<checkpoint> starts a new run from its weights"
        )
        raise ConfigError(problems)
    notes = [
        f"{key} was {_short(saved.get(key))}, now {_short(facts.get(key))}"
        for key in _MAY_DIFFER
        if saved.get(key) != facts.get(key)
    ]
    return notes + _differences(saved.get("config") or {}, facts.get("config") or {})


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    notes = []
    for key in sorted(set(before) | set(now)):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            notes += _differences(old, new, f"{prefix}{key}.")
        elif old != new and prefix + key not in ("resume", "resume_sweep"):
            notes.append(f"setting {prefix}{key} was {_short(old)}, now {_short(new)}")
    return notes


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
