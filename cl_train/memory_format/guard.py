"""A guard around anybody's step, which raises at the first operator that loses channels_last."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from typing import Literal

from cl_train.config.schema import ConfigError
from cl_train.memory_format.audit_report import Call
from cl_train.memory_format.operator_recorder import OperatorRecorder


class LayoutLost(RuntimeError):
    """An operator returned contiguous although its input was channels_last."""


class _Guard(OperatorRecorder):
    def __init__(self, on_loss: str, allow: Sequence[str]) -> None:
        super().__init__()
        self._on_loss, self._allow = on_loss, allow
        self._warned: dict[str | tuple[str, type[Warning], int], int] = {}  # each loss is shown once

    def record(self, call: Call) -> None:
        described = (call.name, call.operator, call.module, call.module_type, call.source, call.line)
        if call.outcome != "lost" or any(fnmatch(text, pattern) for text in described for pattern in self._allow):
            return
        where = f"{call.source} `{call.line}`" if call.source else "no line of Python"
        message = (
            f"{call.name} lost channels_last in {call.direction}: {', '.join(call.inputs)} became "
            f"contiguous {list(call.shape)} with strides {list(call.strides)}, at {where}, in module "
            f"{call.module or '(top)'}{f' ({call.module_type})' * bool(call.module_type)}. {call.advice()}"
        )
        if self._on_loss == "raise":
            raise LayoutLost(message)
        file, _, line = call.source.rpartition(":")
        warnings.warn_explicit(message, UserWarning, file or __file__, int(line or 1), registry=self._warned)


@contextmanager
def layout_guard(on_loss: Literal["raise", "warn"] = "raise", allow: Sequence[str] = ()) -> Iterator[None]:
    """Watch every operator of the block, forward and backward, in any training loop; costs as much as a debugger.

    Convert the model and its input first: what never was channels_last cannot be lost. Gradients that a kernel creates
    contiguous without moving a byte do not count.

    Args:
        on_loss: "raise" `LayoutLost` with the operator, line, module, shapes and strides, or "warn" about each loss.
        allow: shell patterns of operators, modules, types of modules, or lines ("model.py:12") that may lose it.
    """
    if on_loss not in ("raise", "warn"):
        raise ConfigError(f"on_loss={on_loss}: must be raise or warn")
    guard = _Guard(on_loss, [allow] if isinstance(allow, str) else allow)
    with guard.module_hooks(), guard:
        yield
