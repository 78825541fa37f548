"""The records of a run: `metrics.jsonl`, `config.yaml` and `summary.json`, and the trackers that receive them too.

Rank 0 writes; the methods of the other ranks do nothing. A full disk does not end a run: records stay in memory until
they can be written (see `AppendFile`).
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cl_train.system.files import AppendFile, retry, write_json, write_text
from cl_train.training.trackers import Trackers


class RecordWriter:
    """Writes the records of one run.

    Args:
        folder: the run folder; None = do nothing.
        trackers: receive every record too.
        resumed_step: the step at which the run starts, 0 for a new run. Later records belong to lost work of an earlier
            process and are dropped, so that no chart has duplicate steps.
        is_evaluated: the evaluation after `resumed_step` is part of the resumed state.
    """

    def __init__(
        self, folder: Path | None, trackers: Trackers, *, resumed_step: int = 0, is_evaluated: bool = True
    ) -> None:
        self._folder, self._trackers, self._resumed_step = folder, trackers, resumed_step
        if folder is None:
            return
        self._metrics = AppendFile(folder / "metrics.jsonl")
        self._drop_lost_work(resumed_step, is_evaluated)

    def start(self, yaml: str, config: Mapping[str, Any]) -> None:
        """`config.yaml`, and the flat `config` for the trackers."""
        if self._folder is None:
            return
        write_text(self._folder / "config.yaml", yaml)
        in_sweep = (self._folder.parent / "sweep.json").is_file()
        group = self._folder.parent.name if in_sweep else None
        start = {"kind": "start", "step": self._resumed_step, "folder": str(self._folder), "group": group}
        self._trackers.send({**start, "config": dict(config)})

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Append one record."""
        if self._folder is None:
            return
        record = finite_or_null({"kind": kind, "step": step, **values, "time": time.time()})
        self._metrics.append((json.dumps(record) + "\n").encode())
        self._trackers.send(record)

    def _drop_lost_work(self, step: int, is_evaluated: bool) -> None:
        def is_kept(line: bytes) -> bool:
            record = read_record(line)
            if record is None or not 0 < record["step"] <= step:
                return False
            return record["step"] < step or is_evaluated or record["kind"] == "train"

        path = self._metrics.path
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        write_text(path, b"".join(line for line in lines if is_kept(line)).decode())

    def finish(self, summary: Mapping[str, Any], *, retries: bool = True) -> None:
        """`summary.json`, after all records; the end for the trackers.

        Raises OSError: the disk is full or failing, with `retries` still after a minute (see `retry`).
        """
        if self._folder is None:
            return
        finite = finite_or_null(summary)
        self._trackers.send({"kind": "end", "step": summary["steps"], "summary": finite})
        path = self._folder / "summary.json"

        def write() -> None:
            self._metrics.flush()
            write_json(path, finite, indent=2)

        retry(write) if retries else write()


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`, without a last line that a killed process left incomplete."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    return [record for record in map(read_record, lines) if record is not None]


def read_record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    is_record = isinstance(record, dict) and isinstance(record.get("step"), int) and "kind" in record
    return record if is_record else None


def finite_or_null(value: Any) -> Any:
    """JSON has no NaN or Infinity: they become null."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)
