"""A guard for training loops: raises at the first operator that loses channels_last."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from typing import Any, Literal

from cl_train.errors import ConfigError, LayoutLost
from cl_train.memory_format.audit_report import Call
from cl_train.memory_format.layout_recorder import LayoutRecorder


@contextmanager
def layout_guard(
    on_loss: Literal["raise", "warn"] = "raise",
    allow: Sequence[str] = (),
    strict: bool = False,
) -> Iterator[None]:
    """Watch every operator of the block in this thread; it makes a step as slow as a debugger does.

    Convert the model and its input first: what never was channels_last cannot be lost. A loss in
    tokens is reported at the operator that reads them.

    Args:
        on_loss: "raise" `LayoutLost` with the operator, line, module, shapes and strides, or "warn"
            about each loss once.
        allow: shell patterns of operators, modules, types of modules, or lines ("model.py:12") that
            may lose channels_last.
        strict: also report each call that converts something contiguous: the batch, a weight, or a
            gradient that a kernel of torch creates so, such as that of a global mean.

    Raises:
        LayoutLost: an operator lost channels_last.
        ConfigError: `on_loss` is neither "raise" nor "warn".
    """
    if on_loss not in ("raise", "warn"):
        raise ConfigError(f"on_loss={on_loss}: must be raise or warn")
    allowed = [allow] if isinstance(allow, str) else allow
    warned: dict[Any, Any] = {}  # each loss is shown once

    def check(call: Call) -> None:
        # Outside the modules a copy converts the batch, as it should.
        pays = call.moved_bytes and (call.module_type or call.copy != "explicit")
        if call.outcome != "lost" and not (strict and pays):
            return
        places = (call.source, call.source.rpartition("/")[2], call.line)
        names = (call.operator, call.name, call.module, call.module_type, *places)
        if any(fnmatch(name, pattern) for name in names for pattern in allowed):
            return
        message = _message(call)
        if on_loss == "raise":
            raise LayoutLost(message)
        file, _, line = call.source.rpartition(":")
        place = (file or __file__, int(line or 1))
        warnings.warn_explicit(message, UserWarning, *place, registry=warned)

    with LayoutRecorder(on_call=check).watching():
        yield


def _message(call: Call) -> str:
    module = f"module {call.module or '(top)'} ({call.module_type or 'no module'})"
    if call.outcome != "lost":
        return (
            f"{call.name} converts in {call.direction} what is contiguous of "
            f"{', '.join(call.inputs)}, at {call.where}, in {module}: "
            f"{call.contiguous or call.cause}"
        )
    became = f"{', '.join(call.inputs)} became contiguous" if call.inputs else "it wrote contiguous"
    return (
        f"{call.name} lost channels_last in {call.direction}: {became} {list(call.shape)} with "
        f"strides {list(call.strides)}, at {call.where}, in {module}. {call.advice()}"
    )
