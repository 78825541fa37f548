"""WebDataset tar shards: every image is indexed once, then read at random, as from a folder.

Images are sorted by label and key, as in the folder they were made from. `shards.json`, which
`prepare_imagenet shards` writes, lists the classes and the number of images of every shard: with
it, what is missing and wrong labels are errors. Without it the labels are trusted.
docs/imagenet.md describes the members.
"""

import glob
import itertools
import json
import os
import re
import tarfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np

from cl_train.config.schema import ConfigError, DataConfig
from cl_train.data.decode import BadImage
from cl_train.data.images import (
    ImageSource,
    Indices,
    Split,
    digest,
    listed,
    load_index,
    packed,
    save_index,
)
from cl_train.system.processes import map_in_processes

MANIFEST = "shards.json"
_SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val"}
_SPLIT_NAME = re.compile(r"(?:.*[-_.])?(train|val|valid|validation)(?:[-_.].*)?\.\w+")
_WORDNET_ID = re.compile(r"(?:.*/)?(n\d{8})[_/]")
_MAX_LABEL = 1_000_000
_MAX_MEMBER_BYTES = 64 * 2**20  # the largest image of ImageNet has 16 MB


@dataclass(frozen=True)
class ShardSplit(Split):
    """The images of one split, sorted by label and name: shards, and places there in bytes."""

    shards: tuple[str, ...]
    shard: Indices
    offsets: Indices
    sizes: Indices

    def name(self, index: int) -> str:
        return f"{self.shards[self.shard[index]]}/{super().name(index)}"

    def read(self, index: int) -> bytes:
        """Raises BadImage.

        Opens the shard each time, as a folder's images are opened: workers share no descriptor.
        """
        size = int(self.sizes[index])
        try:
            with open(self.shards[self.shard[index]], "rb", buffering=0) as file:
                data = os.pread(file.fileno(), size, int(self.offsets[index]))
        except OSError as error:
            raise BadImage(error.strerror or str(error)) from None
        if not 0 < size == len(data):
            raise BadImage(
                f"{len(data)} of {size} bytes could be read: empty, or the shard was changed"
            )
        return data

    def by_shard(self) -> tuple[Indices, ...]:
        """For each shard the indices of its images, in the order of the file."""
        order = np.lexsort((self.offsets, self.shard))
        return tuple(
            np.split(order, np.cumsum(np.bincount(self.shard, minlength=len(self.shards)))[:-1])
        )


def read_shards(
    root: Path, cfg: DataConfig | None = None, *, training: bool = True, workers: int | None = None
) -> ImageSource:
    """Index the shards of a folder or shell pattern in `workers` processes, or take the index from
    the user's cache. Without `training` the val shards may stand for both. Raises ConfigError:
    none, or damaged or contradicting ones.
    """
    shards, notes = _find_shards(str(root), training)
    files = [*shards["train"], *shards["val"]]
    manifest = Path(files[0]).parent / MANIFEST
    if manifest.is_file():
        files.append(str(manifest))
    key, started_ns = "shards " + "\n".join(files), time.time_ns()
    train, val = (partial(ShardSplit, shards=tuple(shards[name])) for name in ("train", "val"))
    source = load_index(key, train, val)
    if source is None:
        source = _index(shards, manifest if str(manifest) in files else None, workers)
        save_index(key, source, files, started_ns)
    return replace(source, notes=notes)


def split_of(file_name: str) -> str:
    """train, val, or nothing."""
    match = _SPLIT_NAME.fullmatch(file_name)
    return _SPLITS[match[1]] if match else ""


def _find_shards(root: str, training: bool) -> tuple[dict[str, list[str]], tuple[str, ...]]:
    """Absolute paths of the train and val shards, sorted, and a note on other tar files."""
    is_pattern = not os.path.isdir(root)
    shards: dict[str, list[str]] = {"train": [], "val": [], "": []}
    for path in sorted(glob.glob(root if is_pattern else f"{glob.escape(root)}/*.tar")):
        shards[split_of(os.path.basename(path))].append(os.path.abspath(path))
    if not training:
        shards["train"] = shards["train"] or shards["val"]
    advice = ""
    if is_pattern and "{" in root:
        advice = '; braces are not expanded: use a shell pattern, "/data/im-*.tar"'
    lacking = [name for name in ("train", "val") if not shards[name]]
    problems = [
        f"data.root={root}: no {name} shards, *-{name}-*.tar, in it{advice}" for name in lacking
    ]
    if problems:
        raise ConfigError(problems)
    notes: tuple[str, ...] = ()
    if shards[""]:
        notes = (f"these tar files are neither train nor val shards: {listed(shards[''])}",)
    return shards, notes


class _Image(NamedTuple):
    label: int
    name: str
    offset: int
    size: int


def _index(shards: dict[str, list[str]], manifest: Path | None, workers: int | None) -> ImageSource:
    paths = list(dict.fromkeys(shards["train"] + shards["val"]))
    images = map_in_processes(index_shard, paths, workers, description="index shards", unit="shard")
    contents = dict(zip(paths, images, strict=True))
    train, val = (
        _split({path: contents[path] for path in shards[name]}) for name in ("train", "val")
    )
    classes = _checked_classes(contents, manifest)
    lacking = sorted(set(range(len(classes))) - set(train.labels.tolist()))
    if lacking and shards["train"] != shards["val"]:
        raise ConfigError(f"no training image has label {listed(lacking)}; labels start at 0")
    fingerprint = digest(classes, (train, val), ("names", "labels", "sizes"))
    return ImageSource(classes, train, val, fingerprint)


def index_shard(path: str) -> list[_Image]:
    """The images of a shard.

    Raises ConfigError: it is damaged, or a sample lacks its image or its label.
    """
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, int] = {}
    with open_tar(Path(path), path) as archive:
        for member in regular_files(archive, path):
            name = member.name.removeprefix("./")
            folder, _, base = name.rpartition("/")
            # by WebDataset's rule: at the first dot of the file's name
            stem, _, extension = base.partition(".")
            key = f"{folder}/{stem}"
            if (
                not stem
                or name.startswith("/")
                or ".." in folder.split("/")
                or not name.isprintable()
            ):
                raise ConfigError(f"{path}: {name[:200]!r} is not the name of a sample")
            if extension.lower() in ("jpg", "jpeg", "png"):
                if key in images:
                    raise ConfigError(f"{path}: two images for sample '{key}'")
                images[key] = (name, member.offset_data, member.size)
            elif extension.lower() in ("cls", "json"):
                text = read_member(archive, member, path)
                label = _label(text, extension.lower(), f"{path}/{name}")
                if labels.setdefault(key, label) != label:
                    raise ConfigError(
                        f"{path}: sample '{key}' has labels {labels[key]} and {label}"
                    )
    if lacking := [
        f"'{key}' has no {'label' if key in images else 'image'}"
        for key in images.keys() ^ labels.keys()
    ]:
        raise ConfigError(f"{path}: {len(lacking)} incomplete samples: {listed(sorted(lacking))}")
    if not images:
        raise ConfigError(f"{path}: no samples")
    return [_Image(labels[key], *image) for key, image in images.items()]


def _label(text: bytes, extension: str, what: str) -> int:
    label = None
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        if extension == "json":
            label = json.loads(text)["label"]
        elif text.strip().isdigit():
            label = int(text)
    if type(label) is not int or not 0 <= label < _MAX_LABEL:  # true is an int, too
        raise ConfigError(f"{what}: {text[:40]!r} is not a label: expected a number from 0")
    return label


def _split(contents: dict[str, list[_Image]]) -> ShardSplit:
    """All images of these shards, sorted by label and name."""
    rows = sorted(
        (label, name, number, offset, size)
        for number, images in enumerate(contents.values())
        for label, name, offset, size in images
    )
    labels, shard, offsets, sizes = (
        np.array([row[column] for row in rows], np.int64) for column in (0, 2, 3, 4)
    )
    names, starts = packed([os.fsencode(row[1]) for row in rows])
    return ShardSplit(names, starts, labels, tuple(contents), shard, offsets, sizes)


def _checked_classes(contents: dict[str, list[_Image]], manifest: Path | None) -> tuple[str, ...]:
    """Returns the manifest's classes, else WordNet ids in the names, else the labels as text.

    Raises ConfigError: the manifest is contradicted.
    """
    if manifest is None:
        return _classes_of_names(contents)
    classes, problems = _read_manifest(manifest, contents)
    label_of = {name: label for label, name in reversed(list(enumerate(classes)))}
    wrong = [
        f"{path}/{image.name} has label {image.label}"
        for path, images in contents.items()
        for image in images
        if label_of.get(image.name.rpartition("/")[0]) != image.label
    ]
    if wrong:
        problems.append(f"{len(wrong)} labels contradict the names of the samples: {listed(wrong)}")
    if problems:
        raise ConfigError(problems)
    return tuple(classes)


def _classes_of_names(contents: dict[str, list[_Image]]) -> tuple[str, ...]:
    names: dict[int, str] = {}  # the WordNet id of each label's first sample, or nothing
    for image in itertools.chain(*contents.values()):
        wordnet = _WORDNET_ID.match(image.name)
        names.setdefault(image.label, wordnet[1] if wordnet else "")
    labels = range(max(names) + 1)
    if all(names.get(label) for label in labels) and len(set(names.values())) == len(labels):
        return tuple(names[label] for label in labels)
    return tuple(map(str, labels))


def _read_manifest(path: Path, contents: dict[str, list[_Image]]) -> tuple[list[str], list[str]]:
    """Classes, and problems with the number of images. An evaluation needs no train shards."""
    found = {os.path.basename(shard): len(images) for shard, images in contents.items()}
    splits = set(map(split_of, found))
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        classes = [str(name) for name in manifest["classes"]]
        expected = {
            name: count
            for name, count in dict(manifest["images"]).items()
            if split_of(name) in splits
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: cannot be read ({type(error).__name__}: {error})") from None
    differing = sorted(name for name in found | expected if found.get(name) != expected.get(name))
    counts = [
        f"{name} has {found.get(name, 'missing')} of {expected.get(name, 0)} images"
        for name in differing
    ]
    return classes, [f"{path} lists other numbers of images: {listed(counts)}"] if counts else []


# --- tar files that may be damaged ----------------------------------------------------------------


@contextmanager
def _readable(what: str) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except (tarfile.TarError, OSError, ValueError, OverflowError, MemoryError) as error:
        raise ConfigError(
            f"{what}: damaged or truncated, or not a tar archive ({error})"
        ) from error


@contextmanager
def open_tar(source: Path | IO[bytes], what: str) -> Iterator[tarfile.TarFile]:
    """An uncompressed tar file, or a tar within a tar; `what` names it in messages. Raises
    ConfigError.
    """
    with ExitStack() as stack:
        with _readable(what):
            file = stack.enter_context(source.open("rb") if isinstance(source, Path) else source)
            archive = stack.enter_context(tarfile.TarFile(fileobj=file))
        yield archive


def regular_files(archive: tarfile.TarFile, what: str) -> Iterator[tarfile.TarInfo]:
    """The archive's regular files in their order.

    Raises ConfigError for links and devices, a damaged or missing header, or a missing end mark,
    which `tarfile` treats as the end of the archive.
    """
    file: Any = archive.fileobj
    with _readable(what):
        for member in archive:
            if member.isdir() and member.size == 0:
                continue
            if member.size < 0 or not member.isreg() or member.issparse():  # size: CVE-2025-8194
                raise ConfigError(f"{what}: {member.name[:200]!r} is not a regular file")
            yield member
        file.seek(archive.offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"no header and no end mark at byte {archive.offset}")


def read_member(archive: tarfile.TarFile, member: tarfile.TarInfo, what: str) -> bytes:
    """The content of a member. Raises ConfigError unless it has 1 to 64 MiB, all in the archive."""
    if not 0 < member.size <= _MAX_MEMBER_BYTES:
        raise ConfigError(
            f"{what}: {member.name} has {member.size} bytes; expected 1 to {_MAX_MEMBER_BYTES}"
        )
    with _readable(f"{what}: {member.name}"):
        content = cast(IO[bytes], archive.extractfile(member)).read()
        if len(content) != member.size:
            raise tarfile.ReadError("unexpected end of data")
    return content
