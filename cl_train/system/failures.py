"""Failures of the user's code in one line: the message, the line of that code, a remedy."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from cl_train.errors import ConfigError
from cl_train.system.machine import is_out_of_memory

TORCH = f"{Path(torch.__file__).parent}/"
_PACKAGE = f"{Path(__file__).parents[1]}/"


@contextmanager
def failure_explained(what: str, remedy: str, *, memory_too: bool = True) -> Iterator[None]:
    """Turns an exception of a model into a ConfigError; one of memory only with `memory_too`."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if is_out_of_memory(error) and not memory_too:
            raise
        raise ConfigError(f"{what}: {explain_failure(error, remedy)}") from error


def explain_failure(error: BaseException, remedy: str = "") -> str:
    """Returns one line about an exception of a model, with `remedy` if its cause is not known."""
    if isinstance(error, ConfigError):
        return str(error)
    if known := _known_cause(error):
        return known
    text = f"{type(error).__name__}{_where(error)}"
    if message := " ".join(str(error).split())[:600]:
        text += f": {message}"
    return f"{text}; {remedy}" if remedy else text


def _known_cause(error: BaseException) -> str | None:
    operator, _, is_random = str(error).partition(" does not have a deterministic implementation")
    if is_random:
        return f"{operator} has no deterministic kernel: use deterministic=false"
    if "view size is not compatible" in str(error):
        line = _where(error).removeprefix(" at ") or "a .view"
        return f"{line} needs contiguous memory: use .reshape instead of .view"
    if is_out_of_memory(error):
        return f"out of memory{_where(error)}: use a smaller batch or image size"
    return None


def _where(error: BaseException) -> str:
    """Returns the last line of code that is neither torch's nor ours, or nothing."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((TORCH, _PACKAGE)):
            return f" at {short_path(frame.filename)}:{frame.lineno} `{frame.line}`"
    return ""


def short_path(path: str) -> str:
    """Makes `path` relative to site-packages or to the current folder."""
    _, separator, tail = path.rpartition("site-packages/")
    if separator:
        return tail
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path
