"""`cl-train <command> key=value ...`: finds the command and turns expected errors into a message
and an exit code.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 130 interrupted, 141 nobody reads the
output any more (`| head`). A training goes on without its console.
"""

import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from cl_train import __version__
from cl_train.commands import COMMANDS
from cl_train.config.arguments import command_help
from cl_train.config.fields import suggest
from cl_train.errors import ConfigError
from cl_train.system.processes import end_with_parent, exit_without_teardown


def program(*command: str) -> NoReturn:
    """Runs `command` with this process's arguments, and exits. `python train.py` and scripts/ give
    a command; `cl-train` and `python -m cl_train` give none.
    """
    exit_without_teardown(main([*command, *sys.argv[1:]]))


def main(words: Sequence[str]) -> int:
    """Runs the command that `words` name; returns the exit code."""
    return exit_code(_run_command, [*words] or ["--help"])


def exit_code(command: Callable[[list[str]], int], words: list[str]) -> int:
    """Calls `command`; an expected error of it becomes one message and an exit code."""
    try:
        return command(words)
    except ConfigError as error:
        is_first_rank = os.environ.get("RANK", "0").strip("0") == ""
        if is_first_rank or "LOCAL_WORLD_SIZE" not in os.environ:
            title = f"configuration error{'s' if len(error.problems) > 1 else ''}:"
            print("\n  ".join([title, *error.problems]), file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the last flush
        return 128 + signal.SIGPIPE
    except OSError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except SystemExit as request:  # raised by a signal handler of a command, or by code of the user
        if not isinstance(request.code, int) or request.code == 0:
            what = f"code called by this command ended it with sys.exit({request.code})"
            print(f"failed: {what}", file=sys.stderr)
            return 1
        return request.code


def _run_command(words: list[str]) -> int:
    name, *rest = words
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(signal.SIGTERM)  # before the imports, which take seconds
    if name in ("-h", "--help"):
        lines = [f"  {name:<18}{meaning}" for name, meaning in COMMANDS.items()]
        lines = ["usage: cl-train COMMAND [key=value ...]", "", *lines, ""]
        print("\n".join([*lines, "also: COMMAND --help; --version"]))
        return 0
    if "--version" in words:
        print(f"cl-train {__version__}")
        return 0
    if name not in COMMANDS:
        there_are = f"(there are {', '.join(COMMANDS)})"
        raise ConfigError(f"no command '{name}'{suggest(name, COMMANDS)} {there_are}")
    command = importlib.import_module(f"cl_train.commands.{name}")
    if {"-h", "--help"} & set(rest) and hasattr(command, "SETTINGS"):
        usage = f"cl-train {name} {getattr(command, 'USAGE', '[key=value ...]')}"
        print(command_help(usage, command.__doc__ or "", command.SETTINGS))
        return 0
    return int(command.main(rest))
