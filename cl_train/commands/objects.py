"""Objects that a program passes to `cl_train.train`: a module, Datasets, functions.

A setting holds the name of code, `package.module:function`. Objects get such names, in a module
that exists in this process only. `config.yaml` shows them; a later run must be given them again.
"""

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from cl_train.config.schema import SETTINGS_OF_CODE
from cl_train.errors import ConfigError

_MODULE = "objects_of_this_program"


def with_names(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the settings by full key, with names in place of objects. A pair of Datasets as
    `data` becomes `data=dataset`.

    Raises ConfigError: an object where a setting takes none.
    """
    named: dict[str, Any] = {}
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            named |= with_names(value, f"{key}.")
        elif key == "data" and not isinstance(value, str):
            named |= {"data.name": "dataset", "data.dataset": _name_of_datasets(value)}
        elif isinstance(value, list | tuple):
            named[key] = [_named(key, item) for item in value]
        else:
            named[key] = _named(key, value)
    return named


def _named(key: str, value: Any) -> Any:
    if not callable(value):
        return value
    if key not in SETTINGS_OF_CODE:
        raise ConfigError(f"{key}= takes no object ({type(value).__name__})")
    if key == "model" and is_module(value):
        return _name_of(lambda num_classes: value, f"model_{type(value).__name__}")
    name = getattr(value, "__name__", type(value).__name__)
    return _name_of(value, f"{key.replace('.', '_')}_{name}")


def is_module(value: Any) -> bool:
    return hasattr(value, "named_parameters") and not isinstance(value, type)


def _name_of_datasets(value: Any) -> str:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ConfigError("data= takes a name, or two Datasets: data=(training, validation)")
    training, validation = value
    return _name_of(lambda split, size: training if split == "train" else validation, "datasets")


def _name_of(function: Callable[..., Any], name: str) -> str:
    module = sys.modules.setdefault(_MODULE, ModuleType(_MODULE))
    identifier = name if name.isidentifier() else "function"  # <lambda>
    setattr(module, identifier, function)
    return f"{_MODULE}:{identifier}"
