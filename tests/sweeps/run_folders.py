"""Run folders on disk, as training leaves them, with anything in them replaced."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cl_train.system.run_folder import Run, read_run


@dataclass
class Folder:
    """The files of a run; in the place of a document, None writes no file, a string that text."""

    config: Any
    summary: Any
    records: Any

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        files = {"config.yaml": self.config, "summary.json": self.summary}  # JSON is YAML too
        lines = {name: [document] for name, document in files.items() if document is not None}
        if self.records is not None:
            lines["metrics.jsonl"] = self.records
        for name, documents in lines.items():
            texts = [one if isinstance(one, str) else json.dumps(one) for one in documents]
            (folder / name).write_text("".join(f"{text}\n" for text in texts))
        return folder


def folder_of(speed: float = 100.0, *, started_at: float | None = None, **changes: Any) -> Folder:
    """A completed run of resnet18 in bf16 on a CPU: a warm-up window and twelve others, one minute
    each.

    By default channels_last=true runs after channels_last=false. `changes` are settings, with `__`
    for a dot.
    """
    data = {"name": "sample", "workers": 2, "image_size": 224}
    config: dict[str, Any] = {"channels_last": "false", "model": "resnet18", "precision": "auto"}
    config |= {"batch_size": 32, "compile": False, "seed": 0, "data": data}
    for key, value in changes.items():
        group, _, name = key.rpartition("__")
        (config.setdefault(group, {}) if group else config)[name] = value
    is_converted = config["channels_last"] == "true"
    summary: dict[str, Any] = {
        "model": config["model"],
        "status": "completed",
        "memory_format": "channels_last" if is_converted else "contiguous",
        "precision": "bf16" if config["precision"] == "auto" else config["precision"],
    }
    summary |= {"device": "cpu", "device_name": "a processor", "world_size": 1, "lost_pct": 1.0}
    summary |= {"global_batch_size": config["batch_size"], "peak_memory_gib": 1.0}
    summary["environment"] = {"torch": "2.15.0"}
    summary["val"] = {"top1": 91.0 if is_converted else 90.0}
    started_at = started_at or 1.7e9 + (1000 if is_converted else 0)
    same = {"kind": "train", "data_wait_pct": 1.0, "warmup": False}
    records: list[dict[str, Any]] = [
        {"step": 10 * n + 10, "loss": 3.0 / (n + 1), "time": started_at + 60 * n}
        | {"images_per_s": speed * (1 + 0.002 * (-1) ** n)}
        | same
        for n in range(13)
    ]
    records[0] |= {"images_per_s": 10.0, "warmup": True}
    records += [{"kind": "val", "step": 70, "loss": 2.0}, {"kind": "val", "step": 130, "loss": 1.0}]
    return Folder(config, summary, records)


def run_of(tmp_path: Path, speed: float = 100.0, *, name: str | None = None, **changes: Any) -> Run:
    """`folder_of`, written and read back; each call makes a new folder."""
    name = name or f"run{len(list(tmp_path.iterdir()))}"
    return read_run(folder_of(speed, **changes).write(tmp_path / name))
