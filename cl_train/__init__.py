"""Train image classifiers and measure the effect of the channels_last memory format.

Each function below can be used separately, in any training loop; docs/python.md has complete
programs. A name is imported when it is first used, so that `import cl_train` does not import torch.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from cl_train import errors
from cl_train.errors import ConfigError, LayoutLost, TrainingFault

if TYPE_CHECKING:
    from cl_train.commands.train import train as train
    from cl_train.data.device import DevicePrefetcher as DevicePrefetcher
    from cl_train.data.for_other_loops import channels_last_collate as channels_last_collate
    from cl_train.data.for_other_loops import image_loader as image_loader
    from cl_train.measure.audit import audit as audit
    from cl_train.measure.auto import choose_memory_format as choose_memory_format
    from cl_train.measure.paired import compare_layouts as compare_layouts
    from cl_train.measure.parity import check_parity as check_parity
    from cl_train.memory_format.convert import convert as convert
    from cl_train.memory_format.guard import layout_guard as layout_guard
    from cl_train.memory_format.layout import classify as classify
    from cl_train.models.load import load_model as load_model

__version__ = "0.3.0"

_MODULES = {
    "DevicePrefetcher": "cl_train.data.device",
    "audit": "cl_train.measure.audit",
    "channels_last_collate": "cl_train.data.for_other_loops",
    "check_parity": "cl_train.measure.parity",
    "choose_memory_format": "cl_train.measure.auto",
    "classify": "cl_train.memory_format.layout",
    "compare_layouts": "cl_train.measure.paired",
    "convert": "cl_train.memory_format.convert",
    "image_loader": "cl_train.data.for_other_loops",
    "layout_guard": "cl_train.memory_format.guard",
    "load_model": "cl_train.models.load",
    "train": "cl_train.commands.train",
}
__all__ = [*_MODULES, "ConfigError", "LayoutLost", "TrainingFault", "errors", "__version__"]

# torch's profiler writes start, stop and "no GPU" lines to stderr otherwise; read when torch is
# imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        exported = ", ".join(_MODULES)
        raise AttributeError(f"module 'cl_train' has no attribute {name!r}; it exports {exported}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
