"""WebDataset tar shards: every image is indexed once, then read at random, as from a folder.

`*-train-*.tar` and `*-val*.tar` (or `validation`, `valid`), with members `KEY.jpg|.jpeg|.png` and `KEY.cls` (the label
as a number) or `KEY.json` (`{"label": 0}`). Images are sorted by label and key, so that shards made from a folder give
the same images in the same order as the folder. The order of the members in a shard does not matter.

`shards.json`, which `prepare_imagenet shards` writes, lists the classes and the number of images of every shard. With
it, missing shards and members and wrong labels are errors. In the shards of others, a wrong label is found if it is
outside the range or contradicts the WordNet id in the key, and a missing sample if only a part of it is missing.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from cl_train.config.schema import ConfigError
from cl_train.data.decode import BadImage
from cl_train.data.source import ImageSource, Indices
from cl_train.data.tar import open_tar, read_member, regular_files
from cl_train.system.files import cache_folder
from cl_train.system.locks import lock_file
from cl_train.system.process_pool import map_in_processes

MANIFEST = "shards.json"
IMAGE_EXTENSIONS = ("jpg", "jpeg", "png")
_SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val"}
_SPLIT_NAME = re.compile(r"(?:.*[-_.])?(train|val|valid|validation)(?:[-_.].*)?\.tar")
_WORDNET_ID = re.compile(r"(?:.*/)?(n\d{8})[_/]")
_ARRAYS = ("ends", "labels", "shard", "offsets", "sizes")
_SHOWN = 10
_MAX_LABEL = 1_000_000


@dataclass(frozen=True)
class ShardSplit:
    """The images of one split; implements `cl_train.data.source.Split`.

    `shards` are paths. The arrays hold for each image its label, the number of its shard, its offset and size there in
    bytes, and where its name ends in `names`.
    """

    shards: tuple[str, ...]
    names: bytes
    ends: Indices
    labels: Indices
    shard: Indices
    offsets: Indices
    sizes: Indices

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        start = self.ends[index - 1] if index else 0
        return f"{self.shards[self.shard[index]]}/{os.fsdecode(self.names[start : self.ends[index]])}"

    def read(self, index: int) -> bytes:
        """Raises BadImage. Opens the shard each time, as a folder's images are opened: workers share no descriptor."""
        size = int(self.sizes[index])
        if size == 0:
            raise BadImage("the file is empty")
        try:
            descriptor = os.open(self.shards[self.shard[index]], os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = os.pread(descriptor, size, int(self.offsets[index]))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise BadImage(error.strerror or str(error)) from None
        if len(data) < size:
            raise BadImage(f"only {len(data)} of {size} bytes could be read: the shard has changed since the start")
        return data

    def by_shard(self) -> tuple[Indices, ...]:
        """For each shard the indices of its images, in the order of the file."""
        order = np.lexsort((self.offsets, self.shard))
        return tuple(np.split(order, np.cumsum(np.bincount(self.shard, minlength=len(self.shards)))[:-1]))


def read_shards(root: str | Path, workers: int | None = None) -> ImageSource:
    """Index the shards below `root`, or take the index from the user's cache if no shard has another size or time.

    Args:
        root: a folder with shards, or a path with brace patterns: `/data/im-{train-{0000..1023},val-{00..63}}.tar`.
        workers: processes that read shards for the index; None = as many as cores.

    Raises:
        ConfigError: no shards, damaged or missing ones, samples without image or label, contradicting labels.
    """
    shards = _find_shards(str(root))
    paths = shards["train"] + shards["val"]
    manifest = Path(paths[0]).parent / MANIFEST
    status = [f"{path}\0{os.stat(path).st_size}\0{os.stat(path).st_mtime_ns}" for path in paths]
    status.append(manifest.read_text(encoding="utf-8") if manifest.is_file() else "")
    digest = hashlib.sha256("\0".join(status).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    cache = cache_folder() / f"shards-{hashlib.sha256(os.fsencode(paths[0])).hexdigest()[:16]}.npz"
    cache.parent.mkdir(parents=True, exist_ok=True)
    with lock_file(cache.with_suffix(".lock"), waiting_for="the index of the shards"):  # ranks of one machine
        return _load(cache, digest, shards) or _index(cache, digest, shards, _read_manifest(manifest, paths), workers)


def _index(
    cache: Path, digest: str, shards: dict[str, list[str]], manifest: _Manifest | None, workers: int | None
) -> ImageSource:
    paths = shards["train"] + shards["val"]
    contents = list(
        map_in_processes(
            partial(index_shard, by_folder=manifest is not None),
            paths,
            workers,
            description="index shards",
            unit="shard",
        )
    )
    _raise_all([problem for content in contents for problem in content.problems])
    count = len(shards["train"])
    train, val = _split(shards["train"], contents[:count]), _split(shards["val"], contents[count:])
    classes = _classes(train, contents, manifest)
    arrays: dict[str, Any] = {"digest": np.array(digest), "classes": np.array(classes)}
    for name, split in (("train", train), ("val", val)):
        arrays |= {f"{name}_{field}": getattr(split, field) for field in _ARRAYS}
        arrays[f"{name}_names"] = np.frombuffer(split.names, np.uint8)
    with suppress(OSError):  # without a cache the shards are indexed at every start
        temporary = cache.with_suffix(f".{os.getpid()}.npz")
        np.savez(temporary, allow_pickle=False, **arrays)
        temporary.replace(cache)
    return _source(classes, train, val)


def _load(cache: Path, digest: str, shards: dict[str, list[str]]) -> ImageSource | None:
    """The stored index; None if there is none, or if it is of other shards."""
    try:
        with open(cache, "rb") as file, np.load(file, allow_pickle=False) as stored:
            if str(stored["digest"]) != digest:
                return None
            splits = [
                ShardSplit(
                    tuple(shards[name]),
                    stored[f"{name}_names"].tobytes(),
                    **{field: stored[f"{name}_{field}"] for field in _ARRAYS},
                )
                for name in ("train", "val")
            ]
            return _source(tuple(stored["classes"].tolist()), *splits)
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        return None


def _source(classes: tuple[str, ...], train: ShardSplit, val: ShardSplit) -> ImageSource:
    digest = hashlib.sha256("\0".join(classes).encode())
    for split in (train, val):
        digest.update(split.names + split.labels.tobytes() + split.sizes.tobytes())
    return ImageSource(classes, train, val, digest.hexdigest()[:16], train_shards=train.by_shard())


# --- which files ------------------------------------------------------------------------------------------------------


def expand_braces(pattern: str) -> list[str]:
    """`a-{00..02}.tar` and `{x,y}.tar`, nested, as the shell expands them."""
    start = pattern.find("{")
    if start < 0:
        return [pattern]
    depth, parts, begin = 0, [], start + 1
    for place in range(start, len(pattern)):
        depth += {"{": 1, "}": -1}.get(pattern[place], 0)
        if (pattern[place] == "," and depth == 1) or depth == 0:
            parts.append(pattern[begin:place])
            begin = place + 1
        if depth == 0:
            break
    else:
        raise ConfigError(f"data.root={pattern}: a brace is not closed")
    span = re.fullmatch(r"(\d+)\.\.(\d+)", parts[0]) if len(parts) == 1 else None
    if span:
        low, high = int(span[1]), int(span[2])
        alternatives = [f"{number:0{len(span[1])}d}" for number in range(low, high + 1)]
    else:
        alternatives = [word for part in parts for word in expand_braces(part)]
    return [pattern[:start] + one + rest for one, rest in product(alternatives, expand_braces(pattern[begin:]))]


def _find_shards(root: str) -> dict[str, list[str]]:
    """Absolute paths of the train and val shards, sorted."""
    explicit = "{" in root or root.endswith(".tar")
    paths = expand_braces(root) if explicit else sorted(glob.glob(os.path.join(glob.escape(root), "*.tar")))
    absent = [path for path in paths if not os.path.isfile(path)]
    if absent:
        raise ConfigError(f"data.root={root}: {len(absent)} of {len(paths)} shards do not exist: {_shown(absent)}")
    found: dict[str, list[str]] = {"train": [], "val": []}
    for path in paths:
        match = _SPLIT_NAME.fullmatch(os.path.basename(path))
        if match:
            found[_SPLITS[match[1]]].append(os.path.abspath(path))
    missing = [f"no {name} shards (*-{name}-*.tar)" for name, files in found.items() if not files]
    gaps = [] if explicit else [line for files in found.values() for line in _gaps(files)]
    _raise_all([f"data.root={root}: {problem}" for problem in missing + gaps])
    return found


def _gaps(paths: list[str]) -> list[str]:
    """Missing numbers in series such as `im-train-000000.tar` or `im-train-0-of-8.tar`: no shard is lost unnoticed."""
    series: dict[tuple[str, ...], set[int]] = {}
    for path in paths:
        match = re.fullmatch(r"(.*?)(\d+)(-of-\d+)?(\D*\.tar)", os.path.basename(path))
        if match:
            series.setdefault((match[1], match[3] or "", match[4]), set()).add(int(match[2]))
    problems = []
    for (start, of, end), numbers in series.items():
        count = int(of[4:]) if of else max(numbers) + 1
        lost = sorted(set(range(count)) - numbers) if of or len(numbers) > 1 else []
        if lost:
            problems.append(f"{len(lost)} shards '{start}N{of}{end}' are missing, N = {_shown(lost)}")
    return problems


@dataclass(frozen=True)
class _Manifest:
    path: Path
    classes: tuple[str, ...]
    images: dict[str, int]  # of each shard


def _read_manifest(path: Path, shards: list[str]) -> _Manifest | None:
    if not path.is_file():
        return None
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        manifest = _Manifest(path, tuple(map(str, stored["classes"])), {k: int(n) for k, n in stored["images"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: cannot be read ({type(error).__name__}: {error})") from None
    odd = sorted({os.path.basename(name) for name in shards} ^ manifest.images.keys())
    if odd:
        raise ConfigError(f"{path} lists other shards than there are; missing or unknown: {_shown(odd)}")
    return manifest


# --- what a shard holds -----------------------------------------------------------------------------------------------


@dataclass
class _Content:
    """One shard. images: (label, name, offset, size). classes: (class, label) -> the first sample with both.
    problems: each names the shard."""

    path: str
    images: list[tuple[int, str, int, int]] = field(default_factory=list)
    classes: dict[tuple[str, int], str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def index_shard(path: str, by_folder: bool) -> _Content:
    """`by_folder`: the class of a sample is its folder; else it is the WordNet id in its name, if there is one."""
    content = _Content(path)
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, int] = {}
    try:
        with open_tar(Path(path), path) as archive:
            for member in regular_files(archive, path):
                name = member.name.removeprefix("./")
                key, extension = _key(name, path)
                if extension in IMAGE_EXTENSIONS:
                    if key in images:
                        raise ConfigError(f"{path}: two images for sample '{key}'")
                    images[key] = (name, member.offset_data, member.size)
                elif extension in ("cls", "json"):
                    label = _label(read_member(archive, member, path), extension, f"{path}/{name}")
                    if labels.setdefault(key, label) != label:
                        raise ConfigError(f"{path}: sample '{key}' has labels {labels[key]} and {label}")
    except ConfigError as error:
        content.problems += error.problems
        return content
    odd = [f"'{key}' has no {'label' if key in images else 'image'}" for key in sorted(images.keys() ^ labels.keys())]
    if odd or not images:
        content.problems.append(
            f"{path}: {len(odd)} incomplete samples: {_shown(odd)}" if odd else f"{path}: no samples"
        )
        return content
    for key, (name, offset, size) in images.items():
        content.images.append((labels[key], name, offset, size))
        found = _WORDNET_ID.match(name)
        class_name = name.rpartition("/")[0] if by_folder else found[1] if found else ""
        content.classes.setdefault((class_name, labels[key]), f"{path}/{name}")
    return content


def _key(name: str, path: str) -> tuple[str, str]:
    """Key and extension of a member, by WebDataset's rule: the extension begins at the first dot of the file's name."""
    folder, _, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    if not stem or name.startswith("/") or ".." in folder.split("/") or not name.isprintable():
        raise ConfigError(f"{path}: {name[:200]!r} is not the name of a sample")
    return f"{folder}/{stem}", extension.lower()


def _label(text: bytes, extension: str, what: str) -> int:
    try:
        label = json.loads(text)["label"] if extension == "json" else int(text) if text.strip().isdigit() else None
    except (ValueError, KeyError, TypeError, RecursionError):
        label = None
    if not isinstance(label, int) or not 0 <= label < _MAX_LABEL:
        raise ConfigError(f"{what}: {text[:40]!r} is not a label")
    return label


def _split(shards: list[str], contents: list[_Content]) -> ShardSplit:
    """All images, sorted by label and name."""
    rows = sorted(
        (label, name, number, offset, size)
        for number, content in enumerate(contents)
        for label, name, offset, size in content.images
    )
    names = [os.fsencode(row[1]) for row in rows]
    label, number, offset, size = (np.array([row[column] for row in rows], np.int64) for column in (0, 2, 3, 4))
    ends = np.cumsum([len(name) for name in names], dtype=np.int64)
    return ShardSplit(tuple(shards), b"".join(names), ends, label, number, offset, size)


def _classes(train: ShardSplit, contents: list[_Content], manifest: _Manifest | None) -> tuple[str, ...]:
    """The names of the classes: from the manifest, else WordNet ids in the names, else the labels as text.

    Raises:
        ConfigError: labels outside the range, labels without a training image, or labels that contradict the names.
    """
    pairs = {pair: sample for content in contents for pair, sample in content.classes.items()}
    by_name: dict[str, dict[int, str]] = {}
    for (name, label), sample in pairs.items():
        by_name.setdefault(name, {})[label] = sample
    problems = []
    if manifest is not None:
        classes = manifest.classes
        for content in contents:
            expected = manifest.images[os.path.basename(content.path)]
            if len(content.images) != expected:
                problems.append(f"{content.path}: {len(content.images)} images; {manifest.path} says {expected}")
        known = {name: label for label, name in enumerate(classes)}
        wrong = [f"{sample} has label {label}" for (name, label), sample in pairs.items() if known.get(name) != label]
    else:
        are_wordnet_ids = all(re.fullmatch(r"n\d{8}", name) for name in by_name)
        labels = sorted({label for _, label in pairs})
        by_label = {label: name for name, label in pairs}
        classes = tuple(by_label[label] if are_wordnet_ids else str(label) for label in labels)
        contradictions = [found for found in by_name.values() if are_wordnet_ids and len(found) > 1]
        wrong = [f"{sample} has label {label}" for found in contradictions for label, sample in found.items()]
        if are_wordnet_ids and len(by_label) < len(by_name):
            wrong.append(f"{len(by_name)} WordNet ids share {len(by_label)} labels")
    if wrong:
        problems.append(f"{len(wrong)} labels contradict the names of the samples: {_shown(wrong)}")
    counts = np.bincount(train.labels, minlength=max(len(classes), *(label + 1 for _, label in pairs)))
    if not counts.all():
        problems.append(
            f"no training image has label {_shown(np.flatnonzero(counts == 0).tolist())}; labels start at 0"
        )
    _raise_all(problems)
    return classes


def _raise_all(problems: list[str]) -> None:
    if problems:
        more = [f"... and {len(problems) - _SHOWN} more problems"] if len(problems) > _SHOWN else []
        raise ConfigError(problems[:_SHOWN] + more)


def _shown(items: Sequence[object]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(map(str, items[:_SHOWN])) + more
