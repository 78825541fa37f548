"""What a caller has set in torch, kept out of the public functions, and given back.

torch is imported by the first call: the command line is checked without it.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

    dtype, begin_autocast = torch.get_default_dtype(), _leave_autocast()
    deterministic = torch.get_deterministic_debug_mode()
    try:
        torch.set_default_dtype(torch.float32)
        with torch.inference_mode(False), torch.enable_grad():
            if torch.get_default_device().type == "cpu":
                yield
            else:  # slows every call of torch down
                with torch.device("cpu"):
                    yield
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_deterministic_debug_mode() != deterministic:
            torch.set_deterministic_debug_mode(deterministic)
        begin_autocast()


def _leave_autocast() -> Callable[[], None]:
    """End every autocast of this thread; returns what begins them again.

    Not `autocast(enabled=False)`: only the end of the outermost one drops the cast weights, which
    an optimizer has changed since.
    """
    import torch

    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    has_cache, depth = torch.is_autocast_cache_enabled(), torch.autocast_increment_nesting() - 1
    while torch.autocast_decrement_nesting() > 0:
        pass

    def switch(enabled: bool) -> None:
        torch.clear_autocast_cache()
        for kind in kinds:
            torch.set_autocast_enabled(kind, enabled)

    def begin_again() -> None:
        switch(True)
        torch.set_autocast_cache_enabled(has_cache)
        for _ in range(depth):
            torch.autocast_increment_nesting()

    switch(False)
    torch.set_autocast_cache_enabled(True)
    return begin_again
