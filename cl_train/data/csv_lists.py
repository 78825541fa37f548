"""Images that a CSV file names: `data=csv data.root=IMAGES data.csv=labels.csv`. Imports no torch.

A header names the columns: the image (path, image, file, filename or id), a path below `data.root`,
perhaps without its suffix; `label`; perhaps `split`. All bad rows are reported with their lines.
"""

import csv
import os
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cl_train.config.schema import DataConfig
from cl_train.data.images import (
    CACHED_FROM,
    VAL_NAMES,
    FolderSplit,
    ImageSource,
    digest,
    divided,
    listed,
    packed,
    split_of,
    stored,
)
from cl_train.data.walk import files_below
from cl_train.errors import ConfigError

_IMAGE_COLUMNS = ("path", "image", "file", "filename", "id")


class _Row(NamedTuple):
    line: int
    image: str  # relative to data.root
    label: str
    split: str  # train without that column


def list_csv(root: Path, cfg: DataConfig, *, training: bool) -> ImageSource:
    """Lists the images of `data.csv` and `data.val_csv`, sorted by label and name as those of a
    folder, or takes the list from the user's cache folder. Raises ConfigError.
    """
    named = [cfg.csv or str(root / "labels.csv"), *([cfg.val_csv] if cfg.val_csv else [])]
    tables = [os.path.abspath(os.path.expanduser(name)) for name in named]
    layout = (tables, cfg.val_split, cfg.val_fraction, cfg.extensions, training)
    split = partial(FolderSplit, folder=root)
    make = partial(_index, root, tables, cfg, training=training)
    return stored(f"csv {root.resolve()}{layout}", (split, split), make)


def list_csv_images(root: Path, cfg: DataConfig, classes: Sequence[str]) -> ImageSource:
    """Returns the images of `data.csv` in its order as `val`; a label that is no class is -100."""
    rows, notes = _rows(str(cfg.csv), _Images(root, cfg.extensions), needs_label=False)
    label_of = {name: label for label, name in enumerate(classes)}
    labels = np.array([label_of.get(row.label, -100) for row in rows], np.int64)
    split = FolderSplit(*packed([os.fsencode(row.image) for row in rows]), labels, root)
    return ImageSource(tuple(classes), None, split, "", notes)


def _index(
    root: Path, tables: Sequence[str], cfg: DataConfig, *, training: bool
) -> tuple[ImageSource, Sequence[str | bytes]]:
    """Returns the source, and the files and folders it was made from if it is worth storing."""
    images = _Images(root, cfg.extensions)
    (rows, notes), *of_val = (_rows(table, images) for table in tables)
    val_name = cfg.val_split or next((n for n in VAL_NAMES if any(n == r.split for r in rows)), "")
    train = [row for row in rows if row.split == "train"]
    val = of_val[0][0] if of_val else [row for row in rows if row.split == val_name]
    if others := len(rows) - len(train) - (0 if of_val else len(val)):
        notes += (f"{others} rows of other splits in '{tables[0]}' are left out",)
    if cfg.val_fraction is None and not training:
        train = val = val or train
    if bool(val) == (cfg.val_fraction is not None):
        raise ConfigError(
            f"{tables[0]}: give the validation images once: data.val_csv=FILE, a column split with"
            " train and val, or data.val_fraction=0.1"
        )
    classes = _sorted({row.label for row in train})
    known = set(classes)
    untrained = [row for row in val if row.label not in known]
    what = "no training image has the label"
    _refuse(tables[-1], [f"line {row.line}: {what} '{row.label}'" for row in untrained], images)
    files = _by_class(train, classes), _by_class(val, classes)
    if cfg.val_fraction is not None:
        files = divided(files[0], cfg.val_fraction)
    splits = split_of(files[0], root), split_of(files[1], root)
    fingerprint = digest(classes, splits, ("names", "starts", "labels"))
    notes += of_val[0][1] if of_val else ()
    source = ImageSource(tuple(classes), *splits, fingerprint, notes)
    return source, [*tables, *images.folders] if len(rows) >= CACHED_FROM else []


def _by_class(rows: Sequence[_Row], classes: Sequence[str]) -> list[list[bytes]]:
    names: dict[str, list[bytes]] = {name: [] for name in classes}
    for row in rows:
        names[row.label].append(os.fsencode(row.image))
    return list(map(sorted, names.values()))


class _Images:
    """The images below `root`, by their paths with and without suffix."""

    def __init__(self, root: Path, extensions: Sequence[str]) -> None:
        found = files_below(root, extensions)
        self.folders = found.folders
        self._root, self._what = root, f"{', '.join(extensions)} below '{root}'"
        names = list(map(os.fsdecode, found.images))
        self._named = {os.path.splitext(name)[0]: name for name in reversed(names)}
        self._named |= {name: name for name in names}

    def __str__(self) -> str:
        return self._what

    def find(self, named: str) -> str | None:
        """Returns the path below `root` of the image that a row names, or None."""
        path = os.path.relpath(named, self._root) if os.path.isabs(named) else named
        return self._named.get(os.path.normpath(path))


def _rows(
    table: str, images: _Images, *, needs_label: bool = True
) -> tuple[list[_Row], tuple[str, ...]]:
    """Returns the rows, each image once, and a note on repetitions. Raises ConfigError."""
    first, problems, repeated = dict[str, _Row](), list[str](), 0
    for line, named, label, split in _cells(table, needs_label=needs_label):
        image = images.find(named) if named else None
        row = _Row(line, image or "", label, split)
        if image is None:
            problems.append(
                f"line {line}: no image '{named}'" if named else f"line {line}: no name"
            )
        elif not split or (needs_label and not label):
            problems.append(f"line {line}: no {'label' if split else 'split'}")
        elif (other := first.setdefault(image, row)) is not row:
            repeated += 1
            if other[2:] != row[2:]:
                was = f"{other.split} '{other.label}' in line {other.line}"
                problems.append(f"line {line}: '{named}' is {split} '{label}', and {was}")
    _refuse(table, problems, images)
    if not first:
        raise ConfigError(f"{table}: no rows below the header")
    notes = (f"{repeated} rows of '{table}' repeat others",) if repeated else ()
    return list(first.values()), notes


def _cells(table: str, *, needs_label: bool) -> Iterator[tuple[int, str, str, str]]:
    """Yields line, image, label and split of each row. Raises ConfigError."""
    try:
        with open(
            os.path.expanduser(table), newline="", encoding="utf-8-sig", errors="surrogateescape"
        ) as file:
            header = file.readline()
            file.seek(0)
            reader = csv.reader(file, delimiter=_delimiter(header), strict=True)
            names = [name.strip().lower() for name in next(reader, [])]
            image = next((name for name in _IMAGE_COLUMNS if name in names), None)
            if image is None or ("label" not in names and needs_label):
                raise ConfigError(
                    f"{table}: the first line must name the columns, {'|'.join(_IMAGE_COLUMNS)} and"
                    f" label, perhaps split; it is {header.strip()[:80]!r}"
                )
            for row in reader:
                cells = dict(zip(names, map(str.strip, row), strict=False))
                if any(cells.values()):
                    split = cells.get("split", "").lower() if "split" in names else "train"
                    yield reader.line_num, cells.get(image, ""), cells.get("label", ""), split
    except csv.Error as error:
        raise ConfigError(f"{table}: line {reader.line_num}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{table}: {error.strerror}") from None


def _delimiter(header: str) -> str:
    try:
        return csv.Sniffer().sniff(header, ",;\t|").delimiter
    except csv.Error:  # one column
        return ","


def _sorted(labels: set[str]) -> list[str]:
    """Sorts labels as numbers if all of them are."""
    are_numbers = all(re.fullmatch(r"[-+]?\d*\.?\d+", label) for label in labels)
    return sorted(labels, key=lambda label: (float(label) if are_numbers else 0, label))


def _refuse(table: str, problems: list[str], images: _Images) -> None:
    if problems:
        what = f"{len(problems)} rows cannot be used (images: {images})"
        raise ConfigError(f"{table}: {what}: {listed(problems)}")
