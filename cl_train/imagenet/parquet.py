"""From the Hugging Face parquet copy of ImageNet to a folder of images or to tar shards. Needs pyarrow.

Columns: `image`, a struct of `bytes` and `path`, and `label`. Files: `train-*.parquet` and `validation-*.parquet`;
`test-*.parquet` has no labels and is skipped.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cl_train.config.schema import ConfigError
from cl_train.data.decode import PNG_MAGIC
from cl_train.data.shards import MANIFEST
from cl_train.imagenet.output_folder import output_folder, write_image
from cl_train.imagenet.shards import sample_name, write_shard
from cl_train.system.files import write_json
from cl_train.system.process_pool import map_in_processes

_ROWS = 64  # read at once


@dataclass(frozen=True)
class _File:
    """A parquet file with the rows of its split that come before it, and its labels and image names."""

    path: Path
    split: str
    shard: str
    first_row: int
    labels: list[int]
    names: list[str]


def unpack_parquet(root: Path, out: Path, *, to: str, workers: int | None = None) -> dict[str, int]:
    """Write `out/{train,val}/<class>/<name>.JPEG` (`to="folder"`), or one shard for each parquet file (`to="shards"`),
    with the same bytes; returns the number of images in each split.

    Classes are WordNet ids if the image names end in them, else numbers. Call it again to continue after an
    interruption.

    Raises:
        ConfigError: pyarrow or the files are missing, a file is damaged or has other columns, duplicate names.
        RuntimeError: a worker process died.
    """
    files = _files(root, workers)
    classes = _class_names(files)
    with output_folder(out, {"parquet": [[file.path.name, len(file.labels)] for file in files], "to": to}):
        write = partial(_write_shard if to == "shards" else _write_images, out, classes)
        counts = list(map_in_processes(write, files, workers, description=to, unit="file"))
        if to == "shards":
            by_shard = {file.shard: count for file, count in zip(files, counts, strict=True)}
            write_json(out / MANIFEST, {"classes": classes, "images": by_shard})
    images: Counter[str] = Counter()
    for file, count in zip(files, counts, strict=True):
        images[file.split] += count
    return images


def _files(root: Path, workers: int | None) -> list[_File]:
    files: list[_File] = []
    for split, pattern in (("train", r"train\b"), ("val", r"val(idation)?\b")):
        paths = sorted(path for path in root.rglob("*.parquet") if re.match(pattern, path.name))
        expected = re.search(r"-of-(\d+)", paths[0].name) if paths else None
        if expected and int(expected[1]) != len(paths):
            raise ConfigError(f"'{root}' has {len(paths)} of {int(expected[1])} {split} files")
        contents = map_in_processes(_labels_and_names, paths, workers, description=f"{split} labels", unit="file")
        row = 0
        for number, (path, (labels, names)) in enumerate(zip(paths, contents, strict=True)):
            files.append(_File(path, split, f"imagenet-{split}-{number:06d}.tar", row, labels, names))
            row += len(labels)
    if not files:
        raise ConfigError(f"'{root}' has no files train-*.parquet or validation-*.parquet")
    return files


def _labels_and_names(path: Path) -> tuple[list[int], list[str]]:
    try:
        import pyarrow.parquet as pq
    except ImportError:
        raise ConfigError("reading parquet files needs pyarrow: pip install 'cl-train[parquet]'") from None
    try:
        table = pq.ParquetFile(path).read(columns=["label", "image.path"], use_threads=False).to_pydict()
        labels, names = table["label"], [image["path"] or "" for image in table["image"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not a file with the columns image and label, or damaged ({error})") from None
    if None in labels or min(labels, default=0) < 0:
        raise ConfigError(f"{path}: rows without a label")
    return labels, names


def _class_names(files: list[_File]) -> list[str]:
    """By label. Raises ConfigError if a label has images of two WordNet ids, or an id two labels."""
    names: dict[int, str] = {}
    places: Counter[str] = Counter()
    for file in files:
        for label, name in zip(file.labels, file.names, strict=True):
            wnid = re.search(r"(n\d{8})\.\w+$", name)
            known = names.setdefault(label, wnid[1] if wnid else f"{label:04d}")
            if wnid and known != wnid[1]:
                raise ConfigError(f"{file.path}: {name} has label {label}, as have images of {known}")
            if name:
                places[f"{file.split}/{known}/{_stem(name, known)}"] += 1
    classes = [names.get(label, f"{label:04d}") for label in range(1 + max(names))]
    if len(set(classes)) < len(classes):
        raise ConfigError("images of one WordNet id have several labels")
    if twice := [place for place, count in places.items() if count > 1]:
        raise ConfigError(f"{len(twice)} names belong to two images, such as {twice[0]}")
    return classes


def _rows(file: _File) -> Iterator[tuple[int, int, str, bytes]]:
    """(row in the split, label, file name, encoded image)"""
    import pyarrow.parquet as pq

    row = 0
    try:
        for batch in pq.ParquetFile(file.path).iter_batches(_ROWS, columns=["image", "label"], use_threads=False):
            for record in batch.to_pylist():
                data = record["image"]["bytes"]
                if not data:
                    raise ValueError(f"row {row} has no image")
                yield file.first_row + row, record["label"], file.names[row], data
                row += 1
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{file.path}: damaged ({error})") from None


def _write_shard(out: Path, classes: list[str], file: _File) -> int:
    samples = ((sample_name(classes[label], row, name), label, data) for row, label, name, data in _rows(file))
    return write_shard(out / file.shard, samples)


def _write_images(out: Path, classes: list[str], file: _File) -> int:
    for row, label, name, data in _rows(file):
        suffix = ".png" if data.startswith(PNG_MAGIC) else ".JPEG"
        stem = _stem(name, classes[label]) or f"{row:08d}"
        write_image(out / file.split / classes[label] / f"{stem}{suffix}", data)
    return len(file.labels)


def _stem(name: str, class_name: str) -> str:
    """`n01440764_10026` of `n01440764_10026_n01440764.JPEG`, the official name of the image."""
    stem = os.path.splitext(os.path.basename(name))[0].removesuffix(f"_{class_name}")
    return re.sub(r"[^A-Za-z0-9_-]", "_", stem)
