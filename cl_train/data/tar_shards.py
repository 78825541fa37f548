"""WebDataset tar shards: every image is indexed once, then read at random, as from a folder.

Images are sorted by label and key, as in the folder they were made from. `shards.json`, which
`prepare_imagenet shards` writes, lists the classes and the number of images of every shard: with
it, missing images are errors. The labels are trusted. docs/imagenet.md describes the members.
"""

import glob
import json
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple, cast

import numpy as np

from cl_train.config.schema import DataConfig
from cl_train.data.decode import BadImage
from cl_train.data.images import (
    EXTENSIONS,
    ImageSource,
    Indices,
    Split,
    digest,
    ignored_files,
    listed,
    packed,
    stored,
)
from cl_train.data.walk import is_hidden
from cl_train.errors import ConfigError
from cl_train.system.files import naming
from cl_train.system.processes import map_in_processes

MANIFEST = "shards.json"
_SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val"}
_SPLIT_NAME = re.compile(r"(?:.*[-_.])?(train|val|valid|validation)(?:[-_.].*)?\.\w+")
_MAX_MEMBER_BYTES = 64 * 2**20  # the largest image of ImageNet has 16 MB


@dataclass(frozen=True)
class ShardSplit(Split):
    """The images of one split, sorted by label and name: the number of each image's shard in
    `shards`, and its place there in bytes.
    """

    shards: tuple[str, ...]
    shard: Indices
    offsets: Indices
    sizes: Indices

    def name(self, index: int) -> str:
        return f"{self.shards[self.shard[index]]}/{super().name(index)}"

    def read(self, index: int) -> bytes:
        """Opens the shard for each image, so that workers share no descriptor."""
        size = int(self.sizes[index])
        try:
            with open(self.shards[self.shard[index]], "rb", buffering=0) as file:
                data = os.pread(file.fileno(), size, int(self.offsets[index]))
        except OSError as error:
            raise BadImage(error.strerror or str(error)) from None
        if not 0 < size == len(data):
            raise BadImage(f"{len(data)} of {size} bytes could be read")
        return data


def list_shards(
    root: Path, cfg: DataConfig | None = None, *, training: bool = True, workers: int | None = None
) -> ImageSource:
    """Indexes the shards of a folder or shell pattern in `workers` processes, or takes the index
    from the user's cache folder. Without `training` the val shards may stand for both splits.
    Raises ConfigError.
    """
    shards = _find_shards(str(root), training)
    manifest = Path(shards["val"][0]).parent / MANIFEST
    files = [*shards["train"], *shards["val"], *([str(manifest)] if manifest.is_file() else [])]
    splits = [partial(ShardSplit, shards=tuple(shards[name])) for name in ("train", "val")]
    extensions = tuple(map(str.lower, cfg.extensions if cfg else EXTENSIONS))
    key = f"members {extensions} " + "\n".join(files)
    return stored(key, splits, lambda: (_index(shards, manifest, extensions, workers), files))


def _split_of(path: str) -> str:
    """Returns train, val, or nothing, by the file's name."""
    match = _SPLIT_NAME.fullmatch(os.path.basename(path))
    return _SPLITS[match[1]] if match else ""


def _find_shards(root: str, training: bool) -> dict[str, list[str]]:
    """Absolute paths of the train and val shards, sorted."""
    pattern = f"{glob.escape(root)}/*.tar" if os.path.isdir(root) else root
    paths = sorted(map(os.path.abspath, glob.glob(pattern)))
    shards = {name: [p for p in paths if _split_of(p) == name] for name in ("train", "val")}
    if not training:
        shards["train"] = shards["train"] or shards["val"]
    if lacking := [name for name in ("train", "val") if not shards[name]]:
        raise ConfigError(
            f"data.root={root}: no {' and no '.join(lacking)} shards, *-train-*.tar and"
            ' *-val-*.tar: give their folder, or a shell pattern such as "/data/im-*.tar" (braces'
            " are not expanded)"
        )
    return shards


class _Image(NamedTuple):
    label: int
    name: str
    offset: int
    size: int


def _index(
    shards: dict[str, list[str]],
    manifest: Path,
    extensions: Sequence[str],
    workers: int | None,
) -> ImageSource:
    paths = list(dict.fromkeys(shards["train"] + shards["val"]))
    read = partial(index_shard, extensions=extensions)
    results = map_in_processes(read, paths, workers, description="index shards", unit="shard")
    contents, ignored = dict[str, list[_Image]](), list[str]()
    for path, (images, others) in zip(paths, results, strict=True):
        contents[path] = images
        ignored += others
    train, val = (
        _split({path: contents[path] for path in shards[name]}) for name in ("train", "val")
    )
    count = int(max(train.labels.max(), val.labels.max())) + 1
    classes = tuple(map(str, range(count)))
    if manifest.is_file():
        classes = _read_manifest(manifest, contents)
    found = len(np.unique(train.labels)) if shards["train"] != shards["val"] else len(classes)
    if found < len(classes) or count > len(classes):
        what = f"the training images have {found} labels, the highest is {count - 1}"
        raise ConfigError(f"{what}: of {len(classes)} classes each class needs an image")
    fingerprint = digest(classes, (train, val), ("names", "labels", "sizes"))
    keys = [os.path.splitext(image.name)[0] for images in contents.values() for image in images]
    notes = [ignored_files(manifest.parent, ignored, extensions)]
    if dotted := [key for key in keys if "." in os.path.basename(key)]:
        notes.append(f"{len(dotted)} keys have dots ({listed(dotted)}): they end at the last one")
    return ImageSource(classes, train, val, fingerprint, tuple(filter(None, notes)))


def index_shard(
    path: str, extensions: Sequence[str] = EXTENSIONS
) -> tuple[list[_Image], list[str]]:
    """Returns the images of a shard, and the members that belong to no sample.

    A sample's image and label have the same name up to the last dot; a key with other dots may lack
    one. Raises ConfigError: the shard is damaged, or a sample has not one image and one label.
    """
    names, ignored = set[str](), list[str]()
    images: dict[str, list[tuple[str, int, int]]] = {}
    labels: dict[str, int] = {}
    with naming(path), open_tar(Path(path), path) as archive:
        for member in regular_files(archive, path):
            name = member.name.removeprefix("./")
            if name in names:
                raise ConfigError(f"{path}: the name '{name}' occurs twice")
            names.add(name)
            key, suffix = os.path.splitext(name)
            if is_hidden(os.fsencode(os.path.basename(name))):
                ignored.append(name)
            elif suffix.lower() in extensions:
                images.setdefault(key, []).append((name, member.offset_data, member.size))
            elif suffix.lower() == ".cls":
                labels[key] = _label(read_member(archive, member, path), f"{path}/{name}")
            else:
                ignored.append(name)
    found, problems = list[_Image](), list[str]()
    for key in images | labels:
        of_key = images.get(key, [])
        if len(of_key) == 1 and key in labels:
            found.append(_Image(labels[key], *of_key[0]))
        elif len(of_key) < 2 and "." in os.path.basename(key):
            ignored += [name for name, *_ in of_key] or [f"{key}.cls"]
        else:
            kinds = f"{len(of_key)} images" if of_key else "no image"
            problems.append(f"'{key}' has {'no label' if len(of_key) == 1 else kinds}")
    if problems or not found:
        what = f"{len(problems)} incomplete samples: {listed(sorted(problems))}"
        note = ignored_files(path, ignored, extensions)
        raise ConfigError(f"{path}: {what if problems else 'no samples'}. {note}".rstrip(". "))
    return found, ignored


def _label(text: bytes, where: str) -> int:
    if text.strip().isdigit() and int(text) < 10**6:
        return int(text)
    raise ConfigError(f"{where}: {text[:40]!r} is not a label: expected a number from 0")


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


def _read_manifest(path: Path, contents: dict[str, list[_Image]]) -> tuple[str, ...]:
    """Returns the classes that `shards.json` lists. Raises ConfigError: shards of these splits have
    other numbers of images than it lists.
    """
    counts = {os.path.basename(shard): len(images) for shard, images in contents.items()}
    splits = set(map(_split_of, counts))  # an evaluation needs no train shards
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        classes = tuple(manifest["classes"])
        expected = {
            name: count for name, count in manifest["images"].items() if _split_of(name) in splits
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: cannot be read ({type(error).__name__}: {error})") from None
    differing = [
        f"{name} has {counts.get(name, 'missing')} of {expected.get(name, 0)} images"
        for name in sorted(counts | expected)
        if counts.get(name) != expected.get(name)
    ]
    if differing:
        raise ConfigError(f"{path} lists other numbers of images: {listed(differing)}")
    return classes


# --- tar files that may be damaged ----------------------------------------------------------------


@contextmanager
def open_tar(source: Path | IO[bytes], what: str) -> Iterator[tarfile.TarFile]:
    """Opens an uncompressed tar file, or a tar within a tar; `what` names it in messages. Raises
    ConfigError, also from within the block: it is damaged.
    """
    try:
        with (
            source.open("rb") if isinstance(source, Path) else source as file,
            tarfile.TarFile(fileobj=file) as archive,
        ):
            yield archive
    except ConfigError:
        raise
    except (tarfile.TarError, ValueError, OverflowError, MemoryError) as error:
        raise ConfigError(f"{what}: damaged or truncated, or no tar archive ({error})") from error


def regular_files(archive: tarfile.TarFile, what: str) -> Iterator[tarfile.TarInfo]:
    """Yields the files. Raises ConfigError: a link or device; TarError: a damaged header, or no end
    mark, which `tarfile` takes for the end of the archive.
    """
    for member in archive:
        if member.isdir() and member.size == 0:
            continue
        if member.size < 0 or not member.isreg() or member.issparse():  # size: CVE-2025-8194
            raise ConfigError(f"{what}: {member.name[:200]!r} is not a regular file")
        yield member
    file = cast(IO[bytes], archive.fileobj)
    file.seek(archive.offset)
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError(f"no header and no end mark at byte {archive.offset}")


def read_member(archive: tarfile.TarFile, member: tarfile.TarInfo, what: str) -> bytes:
    """Returns its bytes. Raises ConfigError unless it has 1 byte to 64 MiB, all in the archive."""
    content = b""
    if 0 < member.size <= _MAX_MEMBER_BYTES:
        content = cast(IO[bytes], archive.extractfile(member)).read()
    if not 0 < len(content) == member.size:
        raise ConfigError(f"{what}: {member.name}: {len(content)} of {member.size} bytes were read")
    return content
