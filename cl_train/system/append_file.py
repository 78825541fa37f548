"""Append-only files of whole records, such as logs, that tolerate a full disk."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

from cl_train.system.files import with_file_name

log = logging.getLogger(__name__)


class AppendFile:
    """An append-only file. Records that cannot be written stay in memory and are written with later ones.

    Training must not end because its log cannot be written. The first failure is logged, and so is the recovery.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[bytes] = []
        self._is_failing = False

    def append(self, record: bytes) -> None:
        """Write `record`, which includes the terminator of the file's format (a line feed for lines)."""
        self._waiting.append(record)
        try:
            self.flush()
        except OSError as error:
            if not self._is_failing:
                self._is_failing = True  # first: the log may be the file that fails
                log.warning("%s; the records stay in memory; free some space", error)

    def flush(self) -> None:
        """Write the pending records.

        Raises:
            OSError: the records cannot be written; they remain pending.
        """
        if not self._waiting:
            return
        try:
            self._write(b"".join(self._waiting))
        except OSError as error:
            raise with_file_name(error, self.path) from error
        self._waiting.clear()
        if self._is_failing:
            self._is_failing = False
            log.warning("%s is written again and complete", self.path)

    def keep_waiting(self, wanted: Callable[[bytes], bool]) -> None:
        """Drop the pending records that are not `wanted`."""
        self._waiting = [record for record in self._waiting if wanted(record)]

    def _write(self, data: bytes) -> None:
        with open(self.path, "ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            try:
                if file.write(data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(size)
                raise
