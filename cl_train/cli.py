"""`cl-train <command> key=value ...`: finds the command and turns expected errors into a message and an exit code.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 130 interrupted. A command continues if
its output stream cannot be written (a closed pipe, a full disk).
"""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import IO, Any, NoReturn

from cl_train import __version__
from cl_train.commands import COMMANDS
from cl_train.config.help import command_help
from cl_train.config.schema import ConfigError
from cl_train.config.validation import print_problems, suggest
from cl_train.system.child_process import end_with_torchrun
from cl_train.system.signals import exit_without_teardown


def program() -> NoReturn:
    """The process `cl-train`, `python train.py` or `python -m cl_train`."""
    exit_without_teardown(main())


def main(words: Sequence[str] | None = None) -> int:
    """Run the command that the arguments `words` name (default: sys.argv); returns the exit code."""
    _protect_console()
    return exit_code(_run_command, list(sys.argv[1:] if words is None else words) or ["--help"])


def exit_code(command: Callable[[list[str]], int], words: list[str]) -> int:
    """Call `command` with the arguments `words`; expected errors become one message and an exit code."""
    try:
        return command(words)
    except ConfigError as error:
        print_problems(error)
        return 2
    except OSError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except SystemExit as request:  # raised by a signal handler of a command, or by code of the user
        if not isinstance(request.code, int) or request.code == 0:
            print(f"failed: code called by this command ended it with sys.exit({request.code})", file=sys.stderr)
            return 1
        return request.code


def _run_command(words: list[str]) -> int:
    name, *rest = words
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the working folder was deleted: change to another folder") from None
    end_with_torchrun()  # before the imports, which take seconds
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if "--version" in words:
        print(f"cl-train {__version__}")
        return 0
    if name == "completion":
        from cl_train import completion

        return completion.main(rest)
    if name not in COMMANDS:
        raise ConfigError(f"no command '{name}'{suggest(name, COMMANDS)} (there are {', '.join(COMMANDS)})")
    command = importlib.import_module(f"cl_train.commands.{name}")
    if {"-h", "--help"} & set(rest) and hasattr(command, "SETTINGS"):
        print(command_help(f"cl-train {name} {command.USAGE}", command.__doc__ or "", command.SETTINGS))
        return 0
    code: int = command.main(rest)
    return code


def usage() -> str:
    commands = COMMANDS | {"completion": 'tab completion in bash: eval "$(cl-train completion)"'}
    lines = [f"  {name:<18}{meaning}" for name, meaning in commands.items()]
    return "\n".join(
        ["usage: cl-train COMMAND [key=value ...]", "", *lines, "", "settings: cl-train COMMAND --help; --version"]
    )


# --- console ----------------------------------------------------------------------------------------------------------


def _protect_console() -> None:
    """Output that can no longer be written is discarded."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:  # closed: the next opened file would reuse file descriptor 1 or 2
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
            setattr(sys, name, os.fdopen(descriptor, "w"))
        elif not hasattr(stream.write, "__wrapped__"):
            stream.write, stream.flush = _discarding(stream.write, stream), _discarding(stream.flush, stream)


def _discarding(method: Callable[..., Any], stream: IO[str]) -> Callable[..., Any]:
    @wraps(method)
    def call(*arguments: Any) -> Any:
        try:
            return method(*arguments)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # also for buffers and children
            return 0

    return call
