"""The exceptions that the public functions raise; all are in `cl_train.errors`::

    ValueError
      ConfigError          the request is impossible; nothing was done
        LockHeld           another process uses the folder
    RuntimeError
      Fault                work that began cannot go on
        TrainingFault      the loss is not finite, an evaluation is missing, ...
        CheckpointError    a checkpoint or a file of weights cannot be read or written
        BadImageError      a sample cannot be read, or too many
        WorkerError        a loader worker failed, died or hangs
        RankFault          another process of the run died or hangs
        RecordingError     the step cannot be recorded as a CUDA graph
      LayoutLost           an operator lost channels_last (`layout_guard`)

Each message is complete: it says what happened, why if that is known, and what to do. Any other
exception is a bug, or comes from code of the user. This module imports nothing of cl_train.
"""

from collections.abc import Sequence


class ConfigError(ValueError):
    """The user's request is impossible.

    `problems` holds every problem found; the message has a line for each. Programs exit with 2.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class LockHeld(ConfigError):
    """Another process uses the folder; the message names it: `process 4711 on host since ...`."""


class Fault(RuntimeError):
    """Work that began cannot go on, for a reason outside the program; programs exit with 1."""


class TrainingFault(Fault):
    """The run cannot continue; the message has the reason and what to try."""


class CheckpointError(Fault):
    """A checkpoint or a file of weights cannot be read or written."""


class BadImageError(Fault):
    """A sample cannot be read, or with on_bad_image=skip more than data.max_bad_images."""


class WorkerError(Fault):
    """The next batch will not come: a worker failed, died or hangs, or a stream ended early."""


class RankFault(Fault):
    """Another rank died or hangs."""


class RecordingError(Fault):
    """A step cannot be recorded as a CUDA graph: it waits for the device, memory is short, ..."""


class LayoutLost(RuntimeError):
    """An operator returned a contiguous tensor although its input was channels_last."""
