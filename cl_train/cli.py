"""`cl-train <command> key=value ...`: finds the command and turns expected errors into a message and an exit code.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 130 interrupted.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from cl_train.config.schema import ConfigError
from cl_train.config.validation import stop_with, suggest

COMMANDS = {
    "train": "train a model, or compare settings with -m",
    "compare": "compare finished runs, or check that both layouts of a model compute the same",
    "benchmark": "both memory formats of a model in one process: speed, memory, where the time goes",
    "audit": "which operators lose channels_last, where, and what it costs",
    "convert": "convert a saved model and check its outputs",
    "zoo": "many models in both memory formats, in one table",
    "loader_benchmark": "images per second of the data loader, against other loaders",
    "prepare_imagenet": "unpack, check and resize ImageNet",
}


def main(words: Sequence[str] | None = None) -> int:
    """Run the command that `words` name (the process's arguments by default); returns the exit code."""
    name, *rest = list(sys.argv[1:] if words is None else words) or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    try:
        if name not in COMMANDS:
            raise ConfigError(f"no command '{name}'{suggest(name, COMMANDS)} (there are {', '.join(COMMANDS)})")
        code: int = importlib.import_module(f"cl_train.commands.{name}").main(rest)
        return code
    except ConfigError as error:
        stop_with(error)


def usage() -> str:
    lines = [f"  {name:<18}{meaning}" for name, meaning in COMMANDS.items()]
    return "\n".join(
        ["usage: cl-train COMMAND [key=value ...]", "", *lines, "", "cl-train COMMAND --help: its settings"]
    )
