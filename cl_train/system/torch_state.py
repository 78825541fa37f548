"""What a caller has set in torch, kept out of the public functions, and given back.

torch is imported by the first call: the command line is checked without it.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
    """Yield `items`, each made in `new_torch_state`, but used in the caller's."""
    while True:
        with new_torch_state():
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


@contextmanager
def new_torch_state() -> Iterator[None]:
    """The block has gradients, no autocast, and torch's default dtype and device, whatever this
    thread has; then all is as it was, deterministic algorithms too.
    """
    import torch

    dtype, deterministic = torch.get_default_dtype(), torch.get_deterministic_debug_mode()
    # Not `autocast(enabled=False)`: only the end of the outermost one drops the cast weights, which
    # an optimizer has changed since.
    casting = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    has_cache, depth = torch.is_autocast_cache_enabled(), torch.autocast_increment_nesting()

    def set_autocast(enabled: bool) -> None:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(has_cache or not enabled)
        for kind in casting:
            torch.set_autocast_enabled(kind, enabled)
        for _ in range(depth):
            (torch.autocast_increment_nesting if enabled else torch.autocast_decrement_nesting)()

    set_autocast(False)
    # A device costs time in every call of torch.
    is_on_cpu = torch.get_default_device().type == "cpu"
    try:
        torch.set_default_dtype(torch.float32)
        with torch.inference_mode(False), nullcontext() if is_on_cpu else torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_deterministic_debug_mode() != deterministic:
            torch.set_deterministic_debug_mode(deterministic)
        set_autocast(True)
        torch.autocast_decrement_nesting()
