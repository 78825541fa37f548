"""Keeps what a caller has set in torch out of the public functions, and gives it back.

torch is imported by the first call: the command line is checked without it.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def own_torch_state(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The decorated function computes as in a new process: see `new_torch_state`."""

    @functools.wraps(function)
    def in_own_state(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with new_torch_state():
            return function(*args, **kwargs)

    return in_own_state


def each_in_own_state(items: Iterator[Result]) -> Iterator[Result]:
    """Yields `items`: each is made in `new_torch_state`, but used in the caller's state."""
    while True:
        with new_torch_state():
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


@contextmanager
def new_torch_state() -> Iterator[None]:
    """The block runs with gradients, without autocast, and with torch's default dtype and device,
    whatever this thread has set. Afterwards everything is as it was, also deterministic algorithms.
    """
    import torch

    dtype, deterministic = torch.get_default_dtype(), torch.get_deterministic_debug_mode()
    with ExitStack() as stack:
        is_in_autocast = torch.autocast_increment_nesting() > 1
        torch.autocast_decrement_nesting()
        for kind in ("cpu", "cuda") if is_in_autocast else ():
            # Without a cache: only the end of the outermost one drops the cast weights, which an
            # optimizer changes.
            stack.enter_context(torch.autocast(kind, enabled=False, cache_enabled=False))
        if torch.get_default_device().type != "cpu":  # it would cost time in every call of torch
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.inference_mode(False))
        try:
            torch.set_default_dtype(torch.float32)
            yield
        finally:
            torch.set_default_dtype(dtype)
            if torch.get_deterministic_debug_mode() != deterministic:
                torch.set_deterministic_debug_mode(deterministic)
