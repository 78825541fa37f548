"""From a folder of images to WebDataset tar shards, which `data=shards` reads."""

import io
import os
import re
import tarfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cl_train.data.decode import PNG_MAGIC, BadImage
from cl_train.data.images import VAL_NAMES, Indices, Split, list_folder
from cl_train.data.prepare.folders import resumable_folder
from cl_train.data.tar_shards import MANIFEST, index_shard
from cl_train.errors import ConfigError
from cl_train.system.files import replacing, write_json
from cl_train.system.processes import map_in_processes


def write_shards(
    root: Path,
    out: Path,
    *,
    images_per_shard: int = 1000,
    seed: int = 0,
    workers: int | None = None,
    overwrite: bool = False,
) -> tuple[dict[str, int], list[str]]:
    """Writes `out/<name of root>-{train,val}-NNNNNN.tar` and `shards.json` from the images of
    `root/{train,val}`, with the classes mixed over the shards. After an interruption, call it
    again.

    Returns the images in each shard, and the files that cannot be read and were left out, with the
    reason. Raises ConfigError; RuntimeError: a worker process died.
    """
    images: dict[str, int] = {}
    bad: list[str] = []
    # A new folder in one of these would become a class.
    outside = [root / name for name in ("train", *VAL_NAMES)]
    source = list_folder(root)
    settings: dict[str, Any] = {"task": "shards", "images": source.fingerprint}
    settings |= {"images_per_shard": images_per_shard, "seed": seed}
    with resumable_folder(out, settings, overwrite=overwrite, outside=outside):
        for name, split in (("train", source.train), ("val", source.val)):
            order = np.random.default_rng(seed).permutation(len(split))
            count = -(-len(split) // images_per_shard)
            shares = [(_shard_name(root, name, k), order[k::count]) for k in range(count)]
            write = partial(_write_share, out, split, source.classes)
            results = map_in_processes(write, shares, workers, description=name, unit="shard")
            for (shard, _), (written, unreadable) in zip(shares, results, strict=True):
                images[shard] = written
                bad += unreadable
        write_json(out / MANIFEST, {"classes": source.classes, "images": images})
    return images, bad


def _write_share(
    out: Path, split: Split, classes: tuple[str, ...], share: tuple[str, Indices]
) -> tuple[int, list[str]]:
    """Writes a shard, unless a whole one exists; returns its images and the unreadable ones."""
    path, bad, written = out / share[0], [], 0
    if path.exists():
        with suppress(ConfigError):  # it was damaged since
            return len(index_shard(str(path))[0]), []
    with (
        replacing(path, path.with_name(f".{path.name}.part")) as part,
        tarfile.open(part, "w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for index in share[1].tolist():
            label, name = int(split.labels[index]), split.name(index)
            try:
                data = split.read(index)
            except BadImage as error:
                bad.append(f"{name}: {error}")
                continue
            suffix = "png" if data.startswith(PNG_MAGIC) else "jpg"
            for member_suffix, content in ((suffix, data), ("cls", b"%d" % label)):
                sample = _sample_name(classes[label], index, name)
                member = tarfile.TarInfo(f"{sample}.{member_suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
            written += 1
    return written, bad


def _shard_name(root: Path, split: str, number: int) -> str:
    return f"{re.sub(r'[^A-Za-z0-9_-]', '_', root.resolve().name)}-{split}-{number:06d}.tar"


def _sample_name(class_name: str, index: int, file_name: str) -> str:
    """Returns `class/00000042-stem`: sorted by name, samples are in the order of their index. A key
    cannot contain a dot.
    """
    stem = os.path.splitext(os.path.basename(file_name))[0]
    return f"{class_name}/{index:08d}-{re.sub(r'[^A-Za-z0-9_-]', '_', stem)[:60]}"
