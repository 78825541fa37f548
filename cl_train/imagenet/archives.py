"""ImageNet (ILSVRC2012) from its official archives to `train/<wnid>/*.JPEG` and `val/<wnid>/*.JPEG`.

The train archive is a tar of 1000 tars, the validation archive is flat, its labels are in the development kit.
Everything is streamed: the space needed is that of the images, and an interruption costs at most one class.

Archives are foreign data. Nothing is ever extracted to a path that an archive names: a member must be a regular file
with a name of the official form, and is written to a path computed here. Anything else stops the run.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn, cast

from tqdm import tqdm

from cl_train.config.schema import ConfigError, setting
from cl_train.imagenet.devkit import validation_labels

CLASSES, TRAIN_IMAGES, VAL_IMAGES = 1000, 1_281_167, 50_000
MD5 = {
    "train": "1d675b47d978889d74fa0da5fadfb00e",
    "val": "29b22e2961454d5413ddabcf34fc5622",
    "devkit": "fa75699e90414af021442c21a62c3abf",
}
DONE = ".done"  # in a class folder and in val/: everything is there; its content is the number of images
PARTIAL = ".partial"  # what is being written; an interrupted run leaves it, the next one removes it

_CLASS_TAR = re.compile(r"(n\d{8})\.tar")
_TRAIN_IMAGE = re.compile(r"(n\d{8})_\d+\.JPEG")
_VAL_IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG")
_MAX_IMAGE_BYTES = 64 * 2**20  # the largest of ImageNet has 16 MB
_CHUNK = 1 << 20


@dataclass
class PrepareSettings:
    """python scripts/prepare_imagenet.py tars root=/datasets/imagenet train=... val=... devkit=..."""

    root: str = setting("", "folder to make train/ and val/ in")
    train: str | None = setting(None, "ILSVRC2012_img_train.tar; null = leave train/ as it is")
    val: str | None = setting(None, "ILSVRC2012_img_val.tar, or a folder of its flat files, which are moved")
    devkit: str | None = setting(None, "ILSVRC2012_devkit_t12.tar.gz or its folder, or a text file of val WordNet ids")
    md5: bool = setting(False, "check the archives' MD5 sums first (minutes)")


def prepare(settings: PrepareSettings) -> dict[str, int]:
    """Make `train/` and `val/`; run it again after any interruption.

    Returns:
        The number of images in each split that was asked for.

    Raises:
        ConfigError: paths, archives or labels that cannot be used, with the reason.
    """
    _check_settings(settings)
    if settings.md5:
        _check_md5(settings)
    root = Path(settings.root)
    counts = {}
    if settings.train:
        counts["train"] = prepare_train(Path(settings.train), root / "train")
    if settings.val:
        labels = validation_labels(settings.devkit or "")
        counts["val"] = prepare_val(Path(settings.val), labels, root / "val")
    return counts


def _check_settings(settings: PrepareSettings) -> None:
    problems = []
    if not settings.root:
        problems.append("root=FOLDER is missing: where to make train/ and val/")
    if not settings.train and not settings.val:
        problems.append("nothing to do: give train=ILSVRC2012_img_train.tar and/or val=ILSVRC2012_img_val.tar")
    if settings.val and not settings.devkit:
        problems.append("val=... needs devkit=ILSVRC2012_devkit_t12.tar.gz: the validation archive has no labels")
    for name in ("train", "val", "devkit"):
        path = getattr(settings, name)
        if path and not Path(path).exists():
            problems.append(f"{name}={path}: no such file")
    if problems:
        raise ConfigError(problems)


def _check_md5(settings: PrepareSettings) -> None:
    problems = []
    for name, expected in MD5.items():
        path = getattr(settings, name)
        if not path or not Path(path).is_file() or Path(path).suffix == ".txt":
            continue
        digest = hashlib.md5(usedforsecurity=False)
        with open(path, "rb") as file, _progress(f"md5 {name}", os.path.getsize(path), "B") as bar:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                bar.update(len(chunk))
        if digest.hexdigest() != expected:
            problems.append(
                f"{name}={path}: MD5 {digest.hexdigest()}, the official archive has {expected}: download it again"
            )
    if problems:
        raise ConfigError(problems)


# --- train ------------------------------------------------------------------------------------------------------------


def prepare_train(archive: Path, folder: Path) -> int:
    """Unpack the tar of class tars; a class folder appears only when it is complete. Returns the number of images.

    Raises:
        ConfigError: see `prepare`.
    """
    _remove_partial(folder)
    with _open_tar(_open_file(archive), archive) as outer:
        members = list(_regular_members(outer, archive, _CLASS_TAR))
        _refuse_duplicates((member.name for member, _ in members), archive)
        waiting = [(member, match[1]) for member, match in members if _done_count(folder / match[1]) is None]
        _check_strangers(folder, [wnid for _, wnid in waiting])
        _check_space(folder, sum(member.size for member, _ in waiting))
        with _progress("train", len(members), "class", len(members) - len(waiting)) as bar:
            for member, wnid in waiting:
                stream = outer.extractfile(member)
                assert stream is not None
                _unpack_class(stream, f"{archive}: {member.name}", wnid, folder)
                bar.update()
    shutil.rmtree(folder / PARTIAL, ignore_errors=True)
    if not members:
        raise ConfigError(f"{archive}: has no class archives (n01440764.tar, ...): is it ILSVRC2012_img_train.tar?")
    return sum(_done_count(folder / match[1]) or 0 for _, match in members)


def _unpack_class(stream: IO[bytes], what: str, wnid: str, folder: Path) -> None:
    """One class into `folder/wnid`: written beside it, then renamed, marker included."""
    partial = folder / PARTIAL / wnid
    partial.mkdir(parents=True)
    count = 0
    with _open_tar(stream, what) as archive:
        for member, match in _regular_members(archive, what, _TRAIN_IMAGE):
            if match[1] != wnid:
                raise ConfigError(f"{what}: holds {member.name}, an image of another class")
            _copy_member(archive, member, partial / match[0], what)
            count += 1
    if count == 0:
        raise ConfigError(f"{what}: holds no image")
    (partial / DONE).write_text(f"{count}\n", encoding="ascii")
    os.replace(partial, folder / wnid)


def _check_strangers(folder: Path, wnids: list[str]) -> None:
    """Class folders that something else made: an interrupted `tar` leaves them half full, so they cannot be trusted."""
    strangers = [wnid for wnid in wnids if (folder / wnid).exists()]
    if strangers:
        raise ConfigError(
            f"{folder} already has {len(strangers)} class folders that were not completed by this program, such as "
            f"{strangers[0]}: they may be half full. Move them away, or leave out train= and check them with verify"
        )


# --- validation -------------------------------------------------------------------------------------------------------


def prepare_val(source: Path, labels: list[str], folder: Path) -> int:
    """Sort the flat validation images into class folders. Returns the number of images.

    Raises:
        ConfigError: see `prepare`.
    """
    done = _done_count(folder)
    if done is not None:
        return done
    _remove_partial(folder)
    for wnid in sorted(set(labels)):
        (folder / wnid).mkdir(parents=True, exist_ok=True)
    place = _move_images if source.is_dir() else _unpack_images
    placed = place(source, labels, folder)
    missing = sorted(set(range(1, len(labels) + 1)) - placed)
    if missing:
        raise ConfigError(f"{source}: {len(missing)} of {len(labels)} images are missing, such as number {missing[0]}")
    shutil.rmtree(folder / PARTIAL, ignore_errors=True)
    (folder / DONE).write_text(f"{len(placed)}\n", encoding="ascii")
    return len(placed)


def _unpack_images(source: Path, labels: list[str], folder: Path) -> set[int]:
    (folder / PARTIAL).mkdir()
    placed: set[int] = set()
    with _open_tar(_open_file(source), source) as archive:
        members = list(_regular_members(archive, source, _VAL_IMAGE))
        _refuse_duplicates((match[0] for _, match in members), source)
        _check_space(folder, sum(member.size for member, _ in members))
        with _progress("val", len(members), "image") as bar:
            for member, match in members:
                number = int(match[1])
                target = folder / _label(labels, number, source) / match[0]
                if not target.exists():  # what has its final name is whole
                    partial = folder / PARTIAL / match[0]
                    _copy_member(archive, member, partial, source)
                    os.replace(partial, target)
                placed.add(number)
                bar.update()
    return placed


def _move_images(source: Path, labels: list[str], folder: Path) -> set[int]:
    """Renames within a file system; run again, it finds what it has moved already."""
    placed = set()
    for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
        match = _VAL_IMAGE.fullmatch(entry.name)
        if match and entry.is_file(follow_symlinks=False):
            os.rename(entry.path, folder / _label(labels, int(match[1]), source) / match[0])
    for number, wnid in enumerate(labels, start=1):
        if (folder / wnid / f"ILSVRC2012_val_{number:08d}.JPEG").is_file():
            placed.add(number)
    return placed


def _label(labels: list[str], number: int, source: Path) -> str:
    if not 1 <= number <= len(labels):
        raise ConfigError(f"{source}: has image number {number}, but there are labels for 1 to {len(labels)} only")
    return labels[number - 1]


# --- archives ---------------------------------------------------------------------------------------------------------


class _BoundedFile:
    """A file of which no read is larger than an image may be: a header that claims more is an attack on memory."""

    def __init__(self, file: IO[bytes], what: object) -> None:
        self._file, self._what = file, what
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _MAX_IMAGE_BYTES:
            raise ConfigError(f"{self._what}: a header claims {size} bytes: this is not an official archive")
        return self._file.read(size)


@contextmanager
def _open_tar(file: IO[bytes], what: object) -> Iterator[tarfile.TarFile]:
    """An uncompressed tar, from a file or from within another tar."""
    with file:
        try:
            archive = tarfile.TarFile(fileobj=cast(IO[bytes], _BoundedFile(file, what)))
        except (tarfile.TarError, OSError) as error:
            raise ConfigError(f"{what}: not a tar archive, or damaged ({error})") from None
        with archive:
            yield archive


def _open_file(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def _regular_members(
    archive: tarfile.TarFile, what: object, pattern: re.Pattern[str]
) -> Iterator[tuple[tarfile.TarInfo, re.Match[str]]]:
    """The archive's members, each a regular file whose whole name matches; plain folders are passed over.

    `tarfile` takes a damaged header for the end of the archive, so that the end is checked here.
    """
    try:
        for member in archive:
            match = pattern.fullmatch(member.name.removeprefix("./"))
            if member.size < 0:  # tarfile would go backwards, for ever (CVE-2025-8194)
                raise ConfigError(f"{what}: holds a file of {member.size} bytes: this is not an official archive")
            if member.isdir() and re.fullmatch(r"[\w./-]*", member.name) and ".." not in member.name:
                continue
            if not match or not member.isreg() or member.issparse():
                kind = (
                    "a link" if member.islnk() or member.issym() else "a file" if member.isreg() else "a special file"
                )
                raise ConfigError(f"{what}: holds {kind} named {member.name[:200]!r}: this is not an official archive")
            yield member, match
        archive.fileobj.seek(archive.offset)
        end = archive.fileobj.read(tarfile.BLOCKSIZE)
    except (tarfile.TarError, OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{what}: damaged ({error}); download it again") from error
    if end != bytes(tarfile.BLOCKSIZE):
        raise ConfigError(f"{what}: truncated or damaged at byte {archive.offset}; download it again")


def _copy_member(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path, what: object) -> None:
    """Write a member to `target`, which must not exist."""
    if not 0 < member.size <= _MAX_IMAGE_BYTES:
        raise ConfigError(f"{what}: {member.name} has {member.size} bytes; images have 1 to {_MAX_IMAGE_BYTES}")
    source = archive.extractfile(member)
    assert source is not None
    try:
        content = source.read()
    except (tarfile.TarError, OSError) as error:
        raise ConfigError(f"{what}: damaged at {member.name} ({error}); download it again") from error
    if len(content) != member.size:
        raise ConfigError(f"{what}: truncated at {member.name}; download it again")
    try:
        with target.open("xb") as file:
            file.write(content)
    except FileExistsError:
        raise ConfigError(f"{what}: holds {member.name} twice: this is not an official archive") from None


def _refuse_duplicates(names: Iterable[str], what: object) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigError(f"{what}: holds {name} twice: this is not an official archive")
        seen.add(name)


# --- the target folder ------------------------------------------------------------------------------------------------


def _done_count(folder: Path) -> int | None:
    """The number of images that the marker of a completed folder tells; None without a marker."""
    try:
        return int((folder / DONE).read_text(encoding="ascii"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def _remove_partial(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / PARTIAL).exists():
            shutil.rmtree(folder / PARTIAL)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from None


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(f"{folder}: {free / 1e9:.1f} GB free, {needed / 1e9:.1f} GB needed")


def _progress(what: str, total: int, unit: str, done: int = 0) -> tqdm[NoReturn]:
    """A bar on a terminal; elsewhere a line every half minute."""
    seconds = 0.1 if sys.stderr.isatty() else 30.0
    return tqdm(desc=what, total=total, unit=unit, initial=done, unit_scale=unit == "B", mininterval=seconds)
