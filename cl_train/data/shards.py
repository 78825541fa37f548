"""WebDataset tar shards: every image is indexed once, then read at random, as from a folder.

`*-train-*.tar` and `*-val-*.tar` (or `validation`, `valid`), with members `KEY.jpg|.jpeg|.png` and `KEY.cls` (the label
as a number) or `KEY.json` (`{"label": 0}`). Images are sorted by label and key, so that shards made from a folder give
the same images in the same order as the folder. The order of the members in a shard does not matter.

`shards.json`, which `prepare_imagenet shards` writes, lists the classes and the number of images of every shard. With
it, missing shards and members and wrong labels are errors. In other shards, a wrong label is detected if it is outside
the range or contradicts the WordNet id in the key, and a missing sample if only a part of it is missing. A shard with
the same samples as another is an error: it would count twice.
"""

import glob
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cl_train.config.schema import ConfigError
from cl_train.data.decode import BadImage
from cl_train.data.source import (
    ImageSource,
    Indices,
    Split,
    cache_path,
    fingerprint,
    listed,
    load_index,
    packed,
    save_index,
)
from cl_train.data.tar import open_tar, read_member, regular_files
from cl_train.system.processes import map_in_processes

MANIFEST = "shards.json"
IMAGE_EXTENSIONS = ("jpg", "jpeg", "png")
_SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val"}
_SPLIT_NAME = re.compile(r"(?:.*[-_.])?(train|val|valid|validation)(?:[-_.].*)?\.\w+")
_WORDNET_ID = re.compile(r"(?:.*/)?(n\d{8})[_/]")
_SHOWN = 10
_MAX_LABEL = 1_000_000
_MAX_SHARDS = 100_000


@dataclass(frozen=True)
class ShardSplit(Split):
    """The images of one split, sorted by label and name.

    `shards` are paths; `shard`, `offsets` and `sizes` hold for each image the number of its shard, and its place there
    in bytes.
    """

    shards: tuple[str, ...]
    shard: Indices
    offsets: Indices
    sizes: Indices

    def name(self, index: int) -> str:
        return f"{self.shards[self.shard[index]]}/{super().name(index)}"

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


def read_shards(root: str | Path, workers: int | None = None, *, training: bool = True) -> ImageSource:
    """Index the shards below `root`, or take the index from the user's cache if no shard has another size or time.

    Args:
        root: a folder with shards, or a path with brace patterns: `/data/im-{train-{0000..1023},val-{00..63}}.tar`.
        workers: processes that read shards for the index; None = as many as cores.
        training: False = without train shards the val shards stand for both.

    Raises:
        ConfigError: no shards, damaged or missing ones, samples without image or label, contradicting labels.
    """
    shards, notes = _find_shards(str(root), training)
    paths = [*shards["train"], *shards["val"]]
    manifest = Path(paths[0]).parent / MANIFEST
    if manifest.is_file():
        paths.append(str(manifest))
    stored_at, started_ns = cache_path("shards", paths[0]), time.time_ns()
    train, val = (partial(ShardSplit, shards=tuple(shards[name])) for name in ("train", "val"))
    source = load_index(stored_at, train, val, paths)
    if source is None:
        source = _index(shards, manifest if manifest.is_file() else None, workers)
        save_index(stored_at, source, paths, started_ns)
    return replace(source, notes=notes)


# --- which files ------------------------------------------------------------------------------------------------------


def split_of(file_name: str) -> str:
    """train, val, or nothing."""
    match = _SPLIT_NAME.fullmatch(file_name)
    return _SPLITS[match[1]] if match else ""


def expand_braces(pattern: str) -> list[str]:
    """`a-{00..02}.tar` and `{x,y}.tar`, nested, as the shell expands them; sorted. Raises ConfigError if too many."""
    paths = list(islice(_expansions(pattern), _MAX_SHARDS + 1))
    if len(paths) > _MAX_SHARDS:
        raise ConfigError(f"data.root={pattern}: more than {_MAX_SHARDS:,} shards")
    return sorted(set(paths))


def _expansions(pattern: str) -> Iterator[str]:
    group = re.search(r"\{((?:[^{}]|\{[^{}]*\})*)\}", pattern)  # with groups of one level inside
    if group is None:
        yield pattern
        return
    words: Iterable[str] = re.split(r",(?![^{]*\})", group[1])  # at commas outside of inner groups
    if span := re.fullmatch(r"(\d+)\.\.(\d+)", group[1]):
        words = (f"{number:0{len(span[1])}d}" for number in range(int(span[1]), int(span[2]) + 1))
    for word in words:
        yield from _expansions(pattern[: group.start()] + word + pattern[group.end() :])


def _find_shards(root: str, training: bool) -> tuple[dict[str, list[str]], tuple[str, ...]]:
    """Absolute paths of the train and val shards, sorted, and a note on other tar files."""
    explicit = "{" in root or root.endswith(".tar")
    paths = expand_braces(root) if explicit else sorted(glob.glob(os.path.join(glob.escape(root), "*.tar")))
    absent = [path for path in paths if not os.path.isfile(path)]
    if absent:
        raise ConfigError(f"data.root={root}: {len(absent)} of {len(paths)} shards do not exist: {listed(absent)}")
    found: dict[str, list[str]] = {"train": [], "val": [], "": []}
    for path in paths:
        found[split_of(os.path.basename(path))].append(os.path.abspath(path))
    others = found.pop("")
    if not training:
        found["train"] = found["train"] or found["val"]
    problems = [f"data.root={root}: no {name} shards (*-{name}-*.tar)" for name, files in found.items() if not files]
    _raise_all(problems + ([] if explicit else _gaps(found["train"] + found["val"])))
    notes = (f"{len(others)} tar files are neither train nor val shards: {listed(others)}",) if others else ()
    return found, notes


def _gaps(paths: list[str]) -> list[str]:
    """Missing numbers in series such as `im-train-000000.tar`, which reveal missing shards."""
    series: dict[tuple[str, str], set[int]] = {}
    for path in paths:
        if match := re.fullmatch(r"(.*?)(\d+)(\D*\.tar)", path):
            series.setdefault((match[1], match[3]), set()).add(int(match[2]))
    return [
        f"{start}N{end}: shards are missing, N = {listed(lost)}"
        for (start, end), numbers in series.items()
        if len(numbers) > 1 and (lost := sorted(set(range(max(numbers))) - numbers))
    ]


# --- contents of a shard ----------------------------------------------------------------------------------------------


class _Content(NamedTuple):
    """One shard."""

    path: str
    images: list[tuple[int, str, int, int]]  # label, name, offset, size
    problems: Sequence[str] = ()  # each names the shard


def _index(shards: dict[str, list[str]], manifest: Path | None, workers: int | None) -> ImageSource:
    paths = shards["train"] + shards["val"]
    contents = list(map_in_processes(index_shard, paths, workers, description="index shards", unit="shard"))
    _raise_all([problem for content in contents for problem in content.problems])
    count = len(shards["train"])
    _raise_all([*_copies(contents[:count]), *_copies(contents[count:])])
    train, val = _split(contents[:count]), _split(contents[count:])
    classes = _checked_classes(train.labels, contents, manifest)
    return ImageSource(classes, train, val, fingerprint(classes, (train, val), ("names", "labels", "sizes")))


def _copies(contents: list[_Content]) -> Iterator[str]:
    """Shards with the same samples as another one; the order of their members may differ."""
    first: dict[frozenset[tuple[int, str, int]], str] = {}
    for content in contents:
        samples = frozenset((label, name, size) for label, name, _, size in content.images)
        if (other := first.setdefault(samples, content.path)) != content.path:
            yield f"{content.path} has the samples of {other}, which would count twice: move one away"


def index_shard(path: str) -> _Content:
    try:
        images, labels = _samples(path)
    except ConfigError as error:
        return _Content(path, [], error.problems)
    return _Content(path, [(labels[key], *image) for key, image in images.items()])


def _samples(path: str) -> tuple[dict[str, tuple[str, int, int]], dict[str, int]]:
    """By key: name, offset and size of the image, and the label. Raises ConfigError."""
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, int] = {}
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
    if odd := [f"'{key}' has no {'label' if key in images else 'image'}" for key in images.keys() ^ labels.keys()]:
        raise ConfigError(f"{path}: {len(odd)} incomplete samples: {listed(sorted(odd))}")
    if not images:
        raise ConfigError(f"{path}: no samples")
    return images, labels


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
    if type(label) is not int or not 0 <= label < _MAX_LABEL:  # true is an int, too
        raise ConfigError(f"{what}: {text[:40]!r} is not a label: expected a number from 0")
    return label


def _split(contents: list[_Content]) -> ShardSplit:
    """All images, sorted by label and name."""
    rows = sorted(
        (label, name, number, offset, size)
        for number, content in enumerate(contents)
        for label, name, offset, size in content.images
    )
    labels, shard, offsets, sizes = (np.array([row[column] for row in rows], np.int64) for column in (0, 2, 3, 4))
    names, starts = packed([os.fsencode(row[1]) for row in rows])
    return ShardSplit(names, starts, labels, tuple(content.path for content in contents), shard, offsets, sizes)


def _checked_classes(train_labels: Indices, contents: list[_Content], manifest: Path | None) -> tuple[str, ...]:
    """The names of the classes: from the manifest, else the WordNet ids in the names, else the labels as text.

    Raises ConfigError for labels outside the range, without a training image, or in contradiction to the names; and for
    images that the manifest lists and the shards lack.
    """
    pairs: dict[tuple[str, int], str] = {}  # class in the name, label -> the first sample with both
    for content in contents:
        for label, name, _, _ in content.images:
            pairs.setdefault((_class_in(name, by_folder=manifest is not None), label), f"{content.path}/{name}")
    problems: list[str] = []
    wrong: list[str] = []
    if manifest is not None:
        classes, problems = _check_manifest(manifest, contents)
        known = {(name, label) for label, name in enumerate(classes)}
        wrong = [f"{sample} has label {pair[1]}" for pair, sample in pairs.items() if pair not in known]
    elif all(name for name, _ in pairs):
        by_name: dict[str, int] = {}
        by_label: dict[int, str] = {}
        for (name, label), sample in pairs.items():
            if by_name.setdefault(name, label) != label or by_label.setdefault(label, name) != name:
                wrong.append(f"{sample} has label {label}")
        classes = [by_label[label] for label in sorted(by_label)]
    else:
        classes = [str(label) for label in sorted({label for _, label in pairs})]
    if wrong:
        problems.append(f"{len(wrong)} labels contradict the names of the samples: {listed(wrong)}")
    counts = np.bincount(train_labels, minlength=max(len(classes), *(label + 1 for _, label in pairs)))
    has_train = any(split_of(os.path.basename(content.path)) == "train" for content in contents)
    if (empty := np.flatnonzero(counts == 0).tolist()) and has_train:
        problems.append(f"no training image has label {listed(empty)}; labels start at 0")
    _raise_all(problems)
    return tuple(classes)


def _class_in(name: str, *, by_folder: bool) -> str:
    """The folder of a sample, or else the WordNet id in its name, if there is one."""
    if by_folder:
        return name.rpartition("/")[0]
    found = _WORDNET_ID.match(name)
    return found[1] if found else ""


def _check_manifest(path: Path, contents: list[_Content]) -> tuple[list[str], list[str]]:
    """Classes, and problems with the number of images."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        classes, expected = [str(name) for name in manifest["classes"]], dict(manifest["images"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: cannot be read ({type(error).__name__}: {error})") from None
    found = {os.path.basename(content.path): len(content.images) for content in contents}
    splits = {split_of(name) for name in found}  # an evaluation needs no train shards
    expected = {name: count for name, count in expected.items() if split_of(name) in splits}
    return classes, [
        f"{path}: {name} has {found.get(name, 'missing')} images, {expected.get(name, 0)} are listed"
        for name in sorted(found.keys() | expected.keys())
        if found.get(name) != expected.get(name)
    ]


def _raise_all(problems: list[str]) -> None:
    if problems:
        more = [f"... and {len(problems) - _SHOWN} more problems"] if len(problems) > _SHOWN else []
        raise ConfigError(problems[:_SHOWN] + more)
