"""Versions, hardware and the state of the checkout, for `summary.json` and for comparisons."""

import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torchvision

from cl_train.config.validation import to_mapping

_DRIVER_VERSION = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]


def describe_environment(device: torch.device) -> dict[str, str | None]:
    """Versions and hardware; None for hardware that this machine does not have."""
    cudnn = torch.backends.cudnn.version() if device.type == "cuda" else None
    return {
        "torch": str(torch.__version__),
        "torchvision": str(torchvision.__version__),
        "python": platform.python_version(),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "cudnn": str(cudnn) if cudnn is not None else None,
        "cpu": cpu_name(),
        "driver": _output_of(_DRIVER_VERSION) if device.type == "cuda" else None,
    }


def measured(settings: Any, device: torch.device, **results: Any) -> dict[str, Any]:
    """The content of a file of measurements: the results, and with which command and settings on which machine."""
    return {
        "schema_version": 1,
        "command": shlex.join(sys.argv),
        "settings": to_mapping(settings),
        "device_name": device_name(device),
        "environment": describe_environment(device),
        **results,
    }


def device_name(device: torch.device) -> str:
    """`NVIDIA H200` or the processor's name and the number of threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()} ({torch.get_num_threads()} threads)"


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def git_state() -> dict[str, str | bool | None]:
    """The commit of this package's checkout, and whether tracked files differ; None outside a checkout."""
    folder = Path(__file__).resolve().parents[2]
    commit = _output_of(["git", "-C", str(folder), "rev-parse", "HEAD"])
    changes = _output_of(["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"])
    return {"commit": commit, "dirty": bool(changes) if commit else None}


def _output_of(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
