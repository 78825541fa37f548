"""From Hugging Face parquet files, of ImageNet or of other images, to a folder or to tar shards.

Columns: an image, a struct of `bytes` and `path`, and an integer label. `datasets` writes the bytes
of downloaded images, and only the paths of local ones. Needs pyarrow.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from cl_train.config.validation import optional_module
from cl_train.data.decode import PNG_MAGIC, BadImage, EncodedImage, read_file
from cl_train.data.images import listed
from cl_train.data.tar_shards import MANIFEST, split_of
from cl_train.errors import ConfigError
from cl_train.imagenet.folders import resumable_folder, write_image
from cl_train.imagenet.shards import sample_name, shard_name, write_shard
from cl_train.system.files import write_json
from cl_train.system.processes import map_in_processes


@dataclass(frozen=True)
class _File:
    """A parquet file without its pixels."""

    path: Path
    split: str
    image_column: str
    label_names: tuple[str, ...]  # empty: its labels have none
    labels: list[int]
    names: list[str]
    shard: str = ""
    first_row: int = 0  # the rows of its split that come before it


def unpack_parquet(
    root: Path, out: Path, *, to: str, workers: int | None = None, overwrite: bool = False
) -> dict[str, int]:
    """Write `out/{train,val}/<class>/<name>.JPEG` (`to="folder"`), or one shard for each parquet
    file (`to="shards"`), with the same bytes; returns the number of images in each split. After an
    interruption, call it again.

    Classes are named by the WordNet ids that image names end in, else by the file's ClassLabel,
    else by number. Raises ConfigError: files or `out` that cannot be used, with the reason;
    RuntimeError: a worker process died.
    """
    files = _files(root, workers)
    classes = _class_names(files)
    names = [[file.path.name, len(file.labels)] for file in files]
    with resumable_folder(out, {"task": "parquet", "files": names, "to": to}, overwrite=overwrite):
        write = partial(_write, out, classes, to)
        counts = list(map_in_processes(write, files, workers, description=to, unit="file"))
        if to == "shards":
            by_shard = dict(zip([file.shard for file in files], counts, strict=True))
            write_json(out / MANIFEST, {"classes": classes, "images": by_shard})
    return Counter(file.split for file in files for _ in file.labels)


def _files(root: Path, workers: int | None) -> list[_File]:
    files: list[_File] = []
    for split in ("train", "val"):
        paths = sorted(path for path in root.rglob("*.parquet") if split_of(path.name) == split)
        expected = re.search(r"-of-(\d+)", paths[0].name) if paths else None
        if expected and int(expected[1]) != len(paths):
            raise ConfigError(f"'{root}' has {len(paths)} of {int(expected[1])} {split} files")
        row = 0
        read = partial(_read_file, split)
        labels = map_in_processes(read, paths, workers, description=f"{split} labels", unit="file")
        for number, file in enumerate(labels):
            files.append(replace(file, shard=shard_name(root, split, number), first_row=row))
            row += len(file.labels)
    if not files:
        raise ConfigError(f"'{root}' has no files *train*.parquet or *validation*.parquet")
    return files


def _read_file(split: str, path: Path) -> _File:
    pq = optional_module("pyarrow.parquet", "prepare_imagenet parquet")
    try:
        file = pq.ParquetFile(path)
        metadata = json.loads((file.schema_arrow.metadata or {}).get(b"huggingface", b"{}"))
        features = metadata.get("info", {}).get("features", {})
        columns = dict[str, str]()  # the first of each type
        for name, feature in features.items():
            if isinstance(feature, dict):  # a list has the type of its elements
                columns.setdefault(str(feature.get("_type")), name)
        image, label = columns.get("Image", "image"), columns.get("ClassLabel", "label")
        if not re.fullmatch(r"u?int\d+", str(file.schema_arrow.field(label).type)):
            raise ValueError(f"its column {label} holds no integers")
        table = file.read(columns=[label, f"{image}.path"], use_threads=False)
        labels = table[label].to_pylist()
        names = [row["path"] or "" for row in table[image].to_pylist()]
        label_names = tuple(map(str, features.get(label, {}).get("names") or ()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = "not a file with columns for image and label, or damaged"
        raise ConfigError(f"{path}: {what} ({error})") from None
    if None in labels or min(labels, default=0) < 0:
        raise ConfigError(f"{path}: rows without a label")
    return _File(path, split, image, label_names, labels, names)


def _class_names(files: list[_File]) -> list[str]:
    """Class names by label. Raises ConfigError: two labels, or two images, would have one name."""
    if other := [file.path for file in files if file.label_names != files[0].label_names]:
        raise ConfigError(f"{other[0]}: its labels have other names than those of {files[0].path}")
    rows = [
        (file.split, label, name)
        for file in files
        for label, name in zip(file.labels, file.names, strict=True)
    ]
    wnids = {label: re.search(r"(n\d{8})\.\w+$", name) for _, label, name in rows}
    names = [re.sub(r"[^\w ,()+-]", "_", name).strip() for name in files[0].label_names]
    names = names or [f"{label:04d}" for label in range(len(wnids))]
    if max(wnids, default=0) >= len(names):
        which = "have a name" if files[0].label_names else "occur"
        what = f"labels go up to {max(wnids)}, but only {len(names)} {which}"
        raise ConfigError(f"{files[0].path.parent}: {what}")
    classes = [wnid[1] if (wnid := wnids.get(label)) else name for label, name in enumerate(names)]
    if twice := [name for name, count in Counter(classes).items() if count > 1 or not name]:
        raise ConfigError(f"several labels have one name: {listed(twice)}")
    places = Counter(
        f"{split}/{classes[label]}/{_stem(name, classes[label])}"
        for split, label, name in rows
        if name
    )
    if twice := [place for place, count in places.items() if count > 1]:
        raise ConfigError(f"{len(twice)} names belong to two images, such as {twice[0]}")
    return classes


def _rows(file: _File) -> Iterator[tuple[int, int, str, bytes]]:
    """(row in the split, label, file name, encoded image)"""
    pq = optional_module("pyarrow.parquet", "prepare_imagenet parquet")
    row = 0
    try:
        table = pq.ParquetFile(file.path)
        for batch in table.iter_batches(64, columns=[file.image_column], use_threads=False):
            for record in batch.to_pylist():
                data, name = record[file.image_column]["bytes"], file.names[row]
                if not data:
                    data = read_file(file.path.parent / name) if name else b""
                    EncodedImage(data)  # BadImage: whoever wrote the table could name any file
                yield file.first_row + row, file.labels[row], name, data
                row += 1
    except (OSError, ValueError, TypeError, KeyError, BadImage) as error:
        what = f"damaged (row {row}, {file.names[row]!r}: {error})"
        raise ConfigError(f"{file.path}: {what}") from None


def _write(out: Path, classes: list[str], to: str, file: _File) -> int:
    """Returns the number of images."""
    if to == "shards":
        samples = (
            (sample_name(classes[label], row, name), label, data)
            for row, label, name, data in _rows(file)
        )
        return write_shard(out / file.shard, samples)
    for row, label, name, data in _rows(file):
        suffix = ".png" if data.startswith(PNG_MAGIC) else ".JPEG"
        stem = _stem(name, classes[label]) or f"{row:08d}"
        write_image(out / file.split / classes[label] / f"{stem}{suffix}", data)
    return len(file.labels)


def _stem(name: str, class_name: str) -> str:
    """`n01440764_10026` of `n01440764_10026_n01440764.JPEG`, the official name of the image."""
    stem = os.path.splitext(os.path.basename(name))[0].removesuffix(f"_{class_name}")
    return re.sub(r"[^A-Za-z0-9_-]", "_", stem)
