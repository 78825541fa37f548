"""The log of a run: console, `train.log`, and one line for the error that ends it."""

from __future__ import annotations

import errno
import logging
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TextIO

import torch
from tqdm import tqdm

from cl_train.comparison.alternation import is_out_of_memory
from cl_train.data.bad_images import BadImageError
from cl_train.data.workers import WorkerError
from cl_train.system.checkpoint_file import CheckpointError
from cl_train.system.files import AppendFile
from cl_train.system.heartbeat import RankFault
from cl_train.training.nonfinite import TrainingFault
from cl_train.training.preflight import memory_problem

log = logging.getLogger("cl_train")


class RunLog:
    """Context manager: log to the console and, from `open_file` on, to `train.log`; log the error that ends the run."""

    def __init__(self) -> None:
        self._handlers: list[logging.Handler] = [_Console(sys.stdout)]

    def __enter__(self) -> RunLog:
        self._propagate, log.propagate = log.propagate, False
        log.setLevel(logging.INFO)
        log.addHandler(self._handlers[0])
        return self

    def open_file(self, folder: Path) -> None:
        self._handlers.append(_LogFile(folder / "train.log"))
        log.addHandler(self._handlers[-1])

    def only_warnings(self) -> None:
        """For ranks other than 0."""
        self._handlers[0].setLevel(logging.WARNING)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if (message := describe_failure(error)) is not None:
            log.error("the run failed: %s", message)
        log.propagate = self._propagate
        for handler in reversed(self._handlers):  # the file first: the console shows its last warning
            handler.close()
            log.removeHandler(handler)


class _Console(logging.StreamHandler[TextIO]):
    """Lines appear above the progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(self.stream):
            super().emit(record)


class _LogFile(logging.Handler):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        self._file = AppendFile(path)

    def emit(self, record: logging.LogRecord) -> None:
        self._file.append((self.format(record) + "\n").encode(errors="surrogateescape"))

    def close(self) -> None:
        with suppress(OSError):  # the console has shown the warning and every line
            self._file.flush()
        super().close()


def describe_failure(error: BaseException | None) -> str | None:
    """One line for an anticipated error; None for a bug, which needs a traceback."""
    if isinstance(error, TrainingFault | CheckpointError | BadImageError | WorkerError | RankFault | ConnectionError):
        return str(error)
    if isinstance(error, OSError):
        remedy = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check the file and its folder"
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return f"{what}; {remedy}, then continue with resume=auto"
    if error is not None and is_out_of_memory(error):
        device = torch.device("cuda" if isinstance(error, torch.OutOfMemoryError) else "cpu")
        return f"{memory_problem(error, device)}. Lower batch_size; accumulate_steps keeps the global batch"
    return None
