"""The state of a run: everything that training changes, as plain values for a checkpoint, and its restoration."""

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from cl_train.config.schema import ConfigError
from cl_train.config.validation import flatten
from cl_train.data.device import Batch
from cl_train.step.ema import EMA
from cl_train.step.precision import full_precision_state, trainable_parameters
from cl_train.step.train_step import StepParts, StepResult
from cl_train.system.checkpoint_file import CheckpointError

# Keys of a checkpoint whose names are older than the terms of this package.
EMA_KEY, METADATA_KEY = "average", "facts"


@dataclass(frozen=True)
class TrainState:
    """The model of a run, the objects that train it, and the step."""

    model: nn.Module  # not wrapped: for evaluation and checkpoints
    parts: StepParts  # optimizer, loss scaler and the model that trains: wrapped in DDP, compiled
    ema: EMA | None
    memory_format: torch.memory_format  # of the model and its input
    train_step: Callable[[Sequence[Batch]], StepResult]  # eager or as a CUDA graph


def collect(state: TrainState, progress: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The state between two steps, as references: saving copies it. The host waits for the device (loss scale).

    Weights are saved in float32 if there are master weights, and optimizer state by parameter name, so that a run in
    another precision or layout, or with other parameter groups, can load them. `metadata`: see `check_compatible`.
    """
    optimizer = state.parts.optimizer
    return {
        "model": full_precision_state(state.model, state.parts.masters),
        "optimizer": {
            "name": type(optimizer).__name__,
            "step": next((group["step"] for group in optimizer.param_groups if "step" in group), None),
            "state": {
                name: dict(optimizer.state[parameter])
                for name, parameter in trainable_parameters(state.model, state.parts.masters).items()
                if parameter in optimizer.state
            },
        },
        "scaler": state.parts.scaler.state_dict(),
        EMA_KEY: None if state.ema is None else state.ema.module.state_dict(),
        "progress": dict(progress),
        METADATA_KEY: dict(metadata),
        "saved_at": time.time(),
    }


def restore(saved: Mapping[str, Any], state: TrainState) -> dict[str, Any]:
    """Copy a loaded checkpoint into a run's objects and return its progress.

    The run's own layout, dtype, device and hyperparameters stay; optimizer state gets the strides of its parameter.

    Raises CheckpointError: the weights or the optimizer do not fit.
    """
    restore_weights(saved, state)
    scaler = state.parts.scaler
    _restore_optimizer(
        saved["optimizer"], trainable_parameters(state.model, state.parts.masters), state.parts.optimizer
    )
    if scaler.is_enabled() and saved["scaler"]:
        scaler.load_state_dict(dict(saved["scaler"]))  # else the scale starts at amp.init_scale
    return dict(saved["progress"])


def restore_weights(saved: Mapping[str, Any], state: TrainState) -> None:
    """The model and its EMA. Raises CheckpointError: they do not fit."""
    try:
        state.model.load_state_dict(saved["model"])
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint's weights do not fit the model: {error}") from error
    if state.parts.masters is not None:
        state.parts.masters.load(saved["model"])
    if state.ema is not None:
        state.ema.module.load_state_dict(saved[EMA_KEY] or saved["model"])


def _restore_optimizer(
    saved: Mapping[str, Any], parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    name = type(optimizer).__name__
    if saved["name"] != name:
        raise CheckpointError(
            f"the checkpoint was written by {saved['name']}, this run uses {name}: resume with the same optim=, "
            "or start from the weights only with weights=<checkpoint>"
        )
    unknown = set(saved["state"]) - set(parameters)
    if unknown:
        raise CheckpointError(
            f"the checkpoint has optimizer state for {sorted(unknown)[:5]}, which this run does not train"
        )
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    index_of = {id(parameter): index for index, parameter in enumerate(ordered)}
    # torch moves and casts the state. The groups with their hyperparameters are this run's own, except the number of
    # steps, which some of timm's optimizers (LAMB) count per group.
    packed = {index_of[id(parameters[key])]: value for key, value in saved["state"].items()}
    groups = optimizer.state_dict()["param_groups"]
    if saved.get("step") is not None:
        groups = [group | {"step": copy.deepcopy(saved["step"])} for group in groups]
    optimizer.load_state_dict({"state": packed, "param_groups": groups})
    for parameter in ordered:
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0:
                # The fused and foreach fast paths need equal strides.
                optimizer.state[parameter][key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def tensor_bytes(tree: Any) -> int:
    """The size of all tensors in nested containers: nearly all of a checkpoint."""
    return sum(leaf.nbytes for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The state of this rank's torch generators (dropout, stochastic depth). Order and augmentation need none."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Continue the random numbers of `random_state`; a generator that was not saved is unchanged."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


_MUST_MATCH = ("model", "num_classes", "data_fingerprint", "global_batch_size")
_MAY_DIFFER = ("precision", "memory_format", "world_size", "versions")


def check_compatible(saved: Mapping[str, Any], current: Mapping[str, Any], *, training: bool = True) -> list[str]:
    """Refuse to continue another run, or to evaluate it as another model; return notes on allowed differences.

    Both mappings have the keys above, `classes` and `config`, a nested dict of settings.

    Raises ConfigError: the keys that differ, with both values.
    """
    problems = _differences(saved, current, _MUST_MATCH if training else _MUST_MATCH[:2])
    old_classes, classes = saved.get("classes") or [], current.get("classes") or []
    if old_classes != classes:
        problems.append(f"other classes: {_short(sorted({*old_classes} ^ {*classes}) or 'another order')}")
    if problems:
        advice = "weights=<checkpoint> starts from its weights only" if training else "see its config.yaml"
        raise ConfigError(
            [f"resume: {problem}" for problem in problems]
            + [f"resume needs the same {'model, data and global batch' if training else 'model and classes'}; {advice}"]
        )
    if not training:
        return []
    before, now = dict(flatten(saved.get("config") or {})), dict(flatten(current.get("config") or {}))
    ignored = {"resume", "resume_sweep", "overwrite"}
    return _differences(saved, current, _MAY_DIFFER) + _differences(before, now, sorted({*before, *now} - ignored))


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    return [
        f"{key} was {_short(before.get(key))}, now {_short(now.get(key))}"
        for key in keys
        if before.get(key) != now.get(key)
    ]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
