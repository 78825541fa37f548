"""Run folders on disk, as training leaves them, with anything in them replaced."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cl_train.comparison.pairs import Run, read_run


def _records(speed: float, started_at: float) -> list[dict[str, Any]]:
    """A warm-up window and twelve others, one minute each."""
    return [
        {
            "kind": "train",
            "step": 10 * (number + 1),
            "loss": 3.0 / (number + 1),
            "images_per_s": 10.0 if number == 0 else speed * (1 + 0.002 * (-1) ** number),
            "data_wait_pct": 1.0,
            "warmup": number == 0,
            "time": started_at + 60 * number,
        }
        for number in range(13)
    ]


@dataclass
class Folder:
    """The files of a run: None or a string in the place of a document writes no file, or that text."""

    config: Any
    summary: Any
    records: Any = field(default_factory=list)

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        lines = self.records
        if isinstance(lines, list):
            lines = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
        for name, content in (
            ("config.yaml", self.config if isinstance(self.config, str) else json.dumps(self.config)),  # is YAML too
            ("summary.json", self.summary if isinstance(self.summary, str) else json.dumps(self.summary)),
            ("metrics.jsonl", lines),
        ):
            if content not in (None, "null"):
                (folder / name).write_text(content)
        return folder


def folder_of(speed: float = 100.0, *, started_at: float | None = None, **changes: Any) -> Folder:
    """A completed run of resnet18 in bf16 on a CPU. `changes` are settings, with `__` for a dot.

    By default channels_last=true runs after channels_last=false.
    """
    if started_at is None:
        started_at = 1.7e9 + (1000 if changes.get("channels_last") == "true" else 0)
    config: dict[str, Any] = {
        "channels_last": "false",
        "model": "resnet18",
        "precision": "auto",
        "batch_size": 32,
        "compile": False,
        "seed": 0,
        "data": {"name": "sample", "workers": 2, "image_size": 224},
    }
    for key, value in changes.items():
        group, _, name = key.rpartition("__")
        (config.setdefault(group, {}) if group else config)[name] = value
    summary = {
        "schema_version": 1,
        "status": "completed",
        "model": config["model"],
        "memory_format": "channels_last" if config["channels_last"] == "true" else "contiguous",
        "channels_last_requested": config["channels_last"],
        "precision": "bf16" if config["precision"] == "auto" else config["precision"],
        "compile": config["compile"],
        "device": "cpu",
        "device_name": "a processor",
        "world_size": 1,
        "global_batch_size": config["batch_size"],
        "image_size": config["data"]["image_size"],
        "seed": config["seed"],
        "peak_memory_gib": 1.0,
        "others_pct": 1.0,
        "val": {"top1": 91.0 if config["channels_last"] == "true" else 90.0},
        "environment": {"torch": "2.15.0"},
    }
    return Folder(config, summary, _records(speed, started_at))


def run_of(tmp_path: Path, speed: float = 100.0, *, name: str | None = None, **changes: Any) -> Run:
    """`folder_of`, written and read back; each call makes a new folder."""
    name = name or f"run{len(list(tmp_path.iterdir()))}"
    return read_run(folder_of(speed, **changes).write(tmp_path / name))
