"""The list of a split's images, and folders of them. Imports no torch."""

import contextlib
import hashlib
import json
import os
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cl_train.config.fields import suggest_path
from cl_train.config.schema import IMAGE_FORMATS, DataConfig
from cl_train.data.decode import read_file
from cl_train.data.walk import files_below, is_hidden, unreadable
from cl_train.errors import ConfigError
from cl_train.system.files import cache_folder, replacing
from cl_train.system.tables import counted

Indices = npt.NDArray[np.int64]

VAL_NAMES = ("val", "valid", "validation", "test")
EXTENSIONS = (".jpg", ".jpeg", ".png")
CACHED_FROM = 50_000  # images; listing fewer takes less than a second
_NAMED = 5  # names in a message; a folder can hold a thousand


@dataclass(frozen=True)
class Split:
    """The encoded images of one split, in a fixed order.

    `names` holds the encoded names one after the other; name i begins at `starts[i]`. They are
    arrays, because a forked worker that reads a list of Python objects copies its memory page by
    page.
    """

    names: npt.NDArray[np.uint8]
    starts: Indices
    labels: Indices

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        """Returns the name for messages: a path, or a path and a member."""
        return os.fsdecode(self.names[self.starts[index] : self.starts[index + 1]].tobytes())

    def read(self, index: int) -> bytes:
        """Returns the encoded file. Raises BadImage."""
        raise NotImplementedError


@dataclass(frozen=True)
class ImageSource:
    """Both splits of a data set. `classes` are in the order of the labels, `fingerprint` identifies
    the list of images and not their content, `notes` are remarks for the user, a sentence each.
    """

    classes: tuple[str, ...]
    train: Any  # Split, or the user's Dataset; None: evaluation only
    val: Any
    fingerprint: str
    notes: tuple[str, ...] = ()


def packed(names: Sequence[bytes]) -> tuple[npt.NDArray[np.uint8], Indices]:
    """Returns `names` and `starts` of a `Split`."""
    starts = np.cumsum([0, *map(len, names)], dtype=np.int64)
    return np.frombuffer(b"".join(names), np.uint8), starts


def digest(classes: Sequence[str], splits: Sequence[Split], arrays: Sequence[str]) -> str:
    """Returns a hash of the class names and of these arrays of each split."""
    content = hashlib.sha256("\0".join(classes).encode("utf-8", "surrogateescape"))
    for split in splits:
        for name in arrays:
            content.update(getattr(split, name).data)
    return content.hexdigest()[:16]


def listed(names: Sequence[object]) -> str:
    """Returns the first few names and the number of the others, for a message."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (", ".join(map(str, names[:_NAMED])) or "nothing") + more


# --- folders: root/train/<class>/* and root/val/<class>/*, or one folder that is split in two -----


@dataclass(frozen=True)
class FolderSplit(Split):
    """Image files below `folder`; `names` are relative to it."""

    folder: Path

    def name(self, index: int) -> str:
        return os.path.join(self.folder, super().name(index))

    def read(self, index: int) -> bytes:
        return read_file(self.name(index))


def list_folder(root: Path, cfg: DataConfig | None = None, *, training: bool = True) -> ImageSource:
    """Lists the images below `root`, or takes the list from the user's cache folder. Raises
    ConfigError: a folder is missing or cannot be read, or the classes do not fit.
    """
    cfg = cfg or DataConfig()
    key = f"folders {root.resolve()}{(cfg.val_split, cfg.val_fraction, cfg.extensions, training)}"
    base, val = _split_folders(root, cfg, training)
    splits = partial(FolderSplit, folder=base), partial(FolderSplit, folder=val)
    return stored(key, splits, lambda: _index(base, val, cfg, training=training))


def list_images(root: Path, classes: Sequence[str], extensions: Sequence[str]) -> ImageSource:
    """Returns as `val` all images below `root`, or below its folder of validation images if it has
    one, sorted by name. An image below the folder of a class has its label, others have -100.
    Raises ConfigError.
    """
    folder = next((root / name for name in VAL_NAMES if (root / name).is_dir()), root)
    found = files_below(folder, extensions)
    note = ignored_files(folder, found.others, extensions, found.hidden)
    if not found.images:
        what = f"data.root '{root}' has no images ({', '.join(extensions)}) in it or below it"
        raise ConfigError(f"{what}. {note}" if note else what)
    label_of = {os.fsencode(name): label for label, name in enumerate(classes)}
    labels = [label_of.get(name.partition(b"/")[0], -100) for name in found.images]
    split = FolderSplit(*packed(found.images), np.array(labels, np.int64), folder)
    return ImageSource(tuple(classes), None, split, "", (note,) if note else ())


def _split_folders(root: Path, cfg: DataConfig, training: bool) -> tuple[Path, Path]:
    """Returns the folders of the classes of both splits: the same one twice if it is to be split,
    or without training.
    """
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "does not exist"
        advice = "; give the folder that holds train/ and val/, not a URL, or try data=sample"
        raise ConfigError(f"data.root '{root}' {what}{suggest_path(root) or advice}")
    train, val_names = root / "train", [cfg.val_split] if cfg.val_split else VAL_NAMES
    val = next((root / name for name in val_names if (root / name).is_dir()), None)
    if cfg.val_fraction is not None:
        if val is not None and train.is_dir():
            raise ConfigError(f"'{val}' exists: use it without data.val_fraction, or move it away")
        return (train, train) if train.is_dir() else (root, root)
    if val is not None and (train.is_dir() or not training):
        return train if training else val, val
    lacking = " or ".join(f"'{name}'" for name in val_names) if val is None else "'train'"
    raise ConfigError(
        f"data.root '{root}' has no folder {lacking}. Found: {listed(sorted(os.listdir(root)))}."
        " Classes without a split: data.val_fraction=0.1; ImageNet's archives: cl-train"
        " prepare_imagenet; no data: data=sample"
    )


def _index(
    base: Path, val: Path, cfg: DataConfig, *, training: bool
) -> tuple[ImageSource, list[bytes]]:
    """Returns the source, and the folders that it was made from if it is worth storing."""
    classes = class_names(base)
    if unknown := sorted(set(class_names(val)) - set(classes)):
        raise ConfigError(
            f"'{val}' has {counted(len(unknown), 'class')} that '{base}' lacks: {listed(unknown)}"
        )
    listings = {
        folder: _list(folder, classes, cfg.extensions, needs_all=training and folder == base)
        for folder in dict.fromkeys((base, val))
    }
    images = listings[base][0], listings[val][0]
    if cfg.val_fraction is not None:
        images = divided(images[0], cfg.val_fraction)
    train, held_out = split_of(images[0], base), split_of(images[1], val)
    notes = tuple(note for _, _, note in listings.values() if note)
    fingerprint = digest(classes, (train, held_out), ("names", "starts", "labels"))
    source = ImageSource(tuple(classes), train, held_out, fingerprint, notes)
    folders = [folder for _, of_split, _ in listings.values() for folder in of_split]
    return source, folders if len(train) + len(held_out) >= CACHED_FROM else []


def class_names(folder: Path) -> list[str]:
    """Returns the names of the class folders in `folder`. Raises ConfigError: there are none."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        unreadable(error)
    classes = [e.name for e in entries if e.is_dir() and not is_hidden(os.fsencode(e.name))]
    if not classes:
        raise ConfigError(
            f"'{folder}' has no class folders (one folder per class). Found:"
            f" {listed([entry.name for entry in entries])}. ImageNet's validation images are sorted"
            " into classes by cl-train prepare_imagenet"
        )
    return classes


def ignored_files(
    folder: Path | str,
    others: Sequence[str],
    extensions: Sequence[str],
    hidden: Sequence[str] = (),
) -> str:
    """Returns a line on names without one of the extensions, and on hidden ones; else empty."""
    names = [*others, *hidden]
    if not names:
        return ""
    kinds = Counter(os.path.splitext(name)[1].lower() or "without extension" for name in others)
    shown = [f"{count} {kind}" for kind, count in kinds.most_common()]
    shown += [f"{len(hidden)} hidden"] if hidden else []
    note = f"ignored in '{folder}': {counted(len(names), 'file')} ({listed(shown)})"
    if readable := sorted(kinds.keys() & IMAGE_FORMATS.keys() - set(extensions)):
        wider = ",".join(dict.fromkeys((*EXTENSIONS, *readable)))
        return f"{note}, such as '{names[0]}'; data.extensions=[{wider}] reads them"
    return f"{note}, such as '{names[0]}'"


def _list(
    folder: Path, classes: list[str], extensions: Sequence[str], *, needs_all: bool
) -> tuple[list[list[bytes]], list[bytes], str]:
    """Returns each class's images, relative to `folder`, the folders that were read, and a note.
    Raises ConfigError: a class has no images; without `needs_all` only if it has other files.
    """
    found = files_below(folder, extensions)
    images: dict[bytes, list[bytes]] = {os.fsencode(name): [] for name in classes}
    for name in found.images:
        class_name, is_below, _ = name.partition(b"/")
        if is_below:
            images[class_name].append(name)
        else:  # beside the classes
            found.others.append(os.fsdecode(name))
    note = ignored_files(folder, found.others, extensions, found.hidden)
    with_others = {name.partition("/")[0] for name in found.others}
    empty = [
        name
        for name, of_class in zip(classes, images.values(), strict=True)
        if not of_class and (needs_all or name in with_others)
    ]
    if empty or not any(images.values()):
        raise ConfigError(
            f"'{folder}': no images ({', '.join(extensions)}) for {len(empty or classes)} of"
            f" {len(classes)} classes: {listed(empty or classes)}. {note}"
        )
    return list(images.values()), found.folders, note


def divided(
    files: list[list[bytes]], val_fraction: float
) -> tuple[list[list[bytes]], list[list[bytes]]]:
    """Splits the files: in each class those with the smallest hashes of their names are for
    validation, so that adding a file moves at most one other. At least one image of each class is
    trained, and one of two or more is validated.
    """
    train, val = [], []
    for names in files:
        count = min(len(names) - 1, max(1, round(len(names) * val_fraction)))
        chosen = set(sorted(names, key=lambda name: hashlib.sha256(name).digest())[:count])
        train.append([name for name in names if name not in chosen])
        val.append([name for name in names if name in chosen])
    return train, val


def split_of(files: list[list[bytes]], folder: Path) -> FolderSplit:
    labels = np.repeat(np.arange(len(files), dtype=np.int64), [len(of_class) for of_class in files])
    return FolderSplit(*packed([name for of_class in files for name in of_class]), labels, folder)


# --- stored lists: listing a million files can take minutes ---------------------------------------


def stored(
    key: str,
    splits: Sequence[Callable[..., Split]],
    make: Callable[[], tuple[ImageSource, Sequence[str | bytes]]],
) -> ImageSource:
    """Returns the list that is stored as `key`, or makes it and stores it.

    `make` returns the list and the paths that it was made from; the stored list is valid while
    their `_status` is the same. `splits` make each split from its stored arrays.
    """
    name = hashlib.sha256(os.fsencode(key)).hexdigest()[:16]
    path, started_ns = cache_folder() / f"index-{name}.npz", time.time_ns()
    if (source := _load(path, splits)) is not None:
        return source
    source, made_from = make()
    with contextlib.suppress(OSError):
        status = _status(made_from)
        if status and max(max(times_ns) for _, _, *times_ns in status.values()) <= started_ns:
            _save(path, source, status)
    return source


def _status(paths: Collection[str | bytes]) -> dict[str, list[int]]:
    """Returns size, inode and times (ns): a tool can set the time of modification, but not that of
    the inode's change.
    """
    pairs = zip(paths, map(os.stat, paths), strict=True)
    return {
        os.fsdecode(path): [found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]
        for path, found in pairs
    }


def _save(path: Path, source: ImageSource, status: dict[str, list[int]]) -> None:
    header = {name: getattr(source, name) for name in ("classes", "fingerprint", "notes")}
    header["status"] = status
    arrays = {"header": np.frombuffer(json.dumps(header).encode(), np.uint8)}
    for name in ("train", "val"):
        values = vars(getattr(source, name)).items()
        arrays |= {f"{name}/{part}": each for part, each in values if isinstance(each, np.ndarray)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def _load(path: Path, splits: Sequence[Callable[..., Split]]) -> ImageSource | None:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            header = json.loads(arrays["header"].tobytes())
            if header["status"] != _status(header["status"]):
                return None
            train, val = (
                make(**{n.removeprefix(of): arrays[n] for n in arrays.files if n.startswith(of)})
                for of, make in zip(("train/", "val/"), splits, strict=True)
            )
            classes, notes = tuple(header["classes"]), tuple(header["notes"])
            return ImageSource(classes, train, val, header["fingerprint"], notes)
    # TypeError: an array is missing
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
        return None
