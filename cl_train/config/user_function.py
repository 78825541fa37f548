"""Code outside the package: functions of the user, `package.module:function`, and modules of optional packages."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from cl_train.config.schema import ConfigError
from cl_train.config.validation import suggest


def user_function(setting: str, name: str) -> Callable[..., Any]:
    """The function `package.module:function`, also of a module in the working folder. Raises ConfigError."""
    module_name, _, function_name = name.partition(":")
    if ":" not in name:
        raise ConfigError(f"{setting}={name}: use package.module:function")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the import may raise any exception of the user's code
        what = error if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{setting}={name}: cannot import '{module_name}' from here ({what})") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        near = suggest(function_name, [known for known in vars(module) if not known.startswith("_")])
        raise ConfigError(f"{setting}={name}: module '{module_name}' has no function '{function_name}'{near}")
    return function


def optional_module(module: str, setting: str) -> ModuleType:
    """Import a module of an optional package, which `setting` needs. Raises ConfigError."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ConfigError(f"{setting}: {package} is not installed; pip install {package}") from None
