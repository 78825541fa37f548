"""Results of measurements that a later run need not repeat, in ~/.cache/cl_train/."""

import hashlib
import inspect
import logging
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cl_train.measure.timed_step import Workload
from cl_train.memory_format.convert import Layout
from cl_train.step.train_step import LEARNING_RATE
from cl_train.system.files import cache_folder, read_json, write_json
from cl_train.system.machine import describe_environment, device_name

log = logging.getLogger(__name__)

_FORMAT = 10
# Variables that choose kernels, such as ONEDNN_MAX_CPU_ISA.
_PREFIXES = ("ONEDNN_", "DNNL_", "ATEN_", "MKL_", "CUDNN_", "CUBLAS_", "NVIDIA_TF32", "TORCH_")


def kept_file(kind: str, model: nn.Module, workload: Workload, candidate: Layout) -> Path:
    """Returns the path of a file, named by the model's text, code and parameters, by its step, the
    machine and the versions.
    """
    named = model.named_parameters()
    versions = describe_environment(workload.device)
    settings = workload.settings
    same_speed = replace(
        settings,
        optim=replace(settings.optim, lr=LEARNING_RATE),
        precision=replace(settings.precision, reason=""),
    )
    described = (
        _FORMAT,
        type(model),
        model,
        [(name, tuple(one.shape), one.requires_grad) for name, one in named],
        _code_of(model),
        replace(workload, settings=same_speed),
        candidate,
        # Switches that choose kernels.
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
        torch.backends.cudnn.enabled,
        torch.backends.cudnn.benchmark,
        [versions[name] for name in ("torch", "cuda", "cudnn", "driver")],
        device_name(workload.device),
        torch.get_num_threads(),
        sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(_PREFIXES)),
    )
    digest = hashlib.sha256(repr(described).encode()).hexdigest()[:20]
    return cache_folder() / f"{kind}-{digest}.json"


def _code_of(model: nn.Module) -> list[str]:
    """Returns the source of the classes of the model's modules that are not torch's own."""
    sources = []
    for kind in sorted({type(module) for module in model.modules()}, key=repr):
        if not kind.__module__.startswith("torch."):
            with suppress(OSError, TypeError):  # typed into an interpreter
                sources.append(inspect.getsource(kind))
    return sources


def read_kept(path: Path) -> dict[str, Any]:
    """Returns the result; empty: there is none, or it cannot be read."""
    with suppress(OSError, ValueError):
        content = read_json(path)
        return content if isinstance(content, dict) else {}
    return {}


def keep(path: Path, result: dict[str, Any], what: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, result)
    except OSError as error:
        log.warning("%s: not cached (%s), so the next run measures again", what, error)
