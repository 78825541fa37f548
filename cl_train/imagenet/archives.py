"""From the official ILSVRC2012 archives to `train/<wnid>/*.JPEG` and `val/<wnid>/*.JPEG`.

The train archive is a tar of 1000 tars, the validation archive is flat, its labels are in the development kit. All are
streamed: no temporary space is needed, and an interruption loses at most one class.

Nothing is extracted to a path that an archive names: a member must be a regular file with an official name, and
is written to a path computed here. Anything else is an error.
"""

import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tqdm import tqdm

from cl_train.config.schema import ConfigError
from cl_train.data.tar import open_tar, read_member, regular_files
from cl_train.imagenet.devkit import validation_labels
from cl_train.imagenet.output_folder import write_image
from cl_train.system.locks import lock_file

CLASSES, TRAIN_IMAGES, VAL_IMAGES = 1000, 1_281_167, 50_000
DONE = ".done"  # in a completed class folder and in a completed val/; its content is the number of images
_PARTIAL = ".partial"  # an incomplete class folder; after an interruption the next run removes it

_CLASS_TAR = re.compile(r"(n\d{8})\.tar")
_TRAIN_IMAGE = re.compile(r"(n\d{8})_\d+\.JPEG")
_VAL_IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG")
Members = list[tuple[tarfile.TarInfo, re.Match[str]]]


def unpack(out: Path, train: Path | None, val: Path | None, devkit: Path | None) -> dict[str, int]:
    """Make `out/train` and `out/val`. After an interruption, call it again to continue.

    Args:
        train: ILSVRC2012_img_train.tar.
        val: ILSVRC2012_img_val.tar, or a folder with its flat files, which are moved.
        devkit: see `validation_labels`; needed for val.

    Returns:
        The number of images in each requested split.

    Raises:
        ConfigError: paths, archives or labels that cannot be used, with the reason.
    """
    given = {"train": train, "val": val, "devkit": devkit}
    problems = [f"{name}={path}: no such file" for name, path in given.items() if path and not path.exists()]
    if train is None and val is None:
        problems.append("nothing to do: give train=ILSVRC2012_img_train.tar or val=ILSVRC2012_img_val.tar, or both")
    if val is not None and devkit is None:
        problems.append("val=... needs devkit=ILSVRC2012_devkit_t12.tar.gz: the validation archive has no labels")
    if problems:
        raise ConfigError(problems)
    counts = {}
    if train is not None:
        with _folder(out / "train") as folder:
            counts["train"] = _unpack_train(train, folder)
    if val is not None and devkit is not None:
        labels = validation_labels(devkit)
        with _folder(out / "val") as folder:
            counts["val"] = done_count(folder) or _place_val(val, labels, folder)
    return counts


def done_count(folder: Path) -> int | None:
    """The number of images of a folder that this program completed; None for an incomplete or a foreign folder."""
    try:
        return int((folder / DONE).read_text(encoding="ascii"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


@contextmanager
def _folder(folder: Path) -> Iterator[Path]:
    """Create and lock the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with lock_file(folder.parent / f".{folder.name}.lock", waiting_for=str(folder)):
            yield folder
    except PermissionError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from None


def _unpack_train(archive: Path, folder: Path) -> int:
    with open_tar(archive, str(archive)) as outer:
        members = _official_members(outer, str(archive), _CLASS_TAR)
        if not members:
            raise ConfigError(f"{archive}: no class archives (n01440764.tar, ...); is it ILSVRC2012_img_train.tar?")
        waiting = [(member, match[1]) for member, match in members if done_count(folder / match[1]) is None]
        if unknown := [wnid for _, wnid in waiting if (folder / wnid).exists()]:
            raise ConfigError(
                f"{folder} already has {len(unknown)} class folders that this program did not complete, such as"
                f" {unknown[0]}. They may lack images: move them away, or leave out train= and run verify"
            )
        _check_space(folder, sum(member.size for member, _ in waiting))
        for member, wnid in tqdm(waiting, "train", unit="class", disable=None):
            stream = outer.extractfile(member)
            assert stream is not None
            _unpack_class(stream, f"{archive}: {member.name}", wnid, folder)
    return sum(done_count(folder / match[1]) or 0 for _, match in members)


def _unpack_class(stream: IO[bytes], what: str, wnid: str, folder: Path) -> None:
    """Unpack one class; `folder/wnid` is created only when it is complete."""
    partial = folder / _PARTIAL
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        with open_tar(stream, what) as archive:
            members = _official_members(archive, what, _TRAIN_IMAGE)
            for member, match in members:
                if match[1] != wnid:
                    raise ConfigError(f"{what}: {member.name} is an image of another class")
                (partial / match[0]).write_bytes(read_member(archive, member, what))
        if not members:
            raise ConfigError(f"{what}: no images")
        (partial / DONE).write_text(f"{len(members)}\n", encoding="ascii")
        os.replace(partial, folder / wnid)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # after an error; the disk may be full


def _place_val(source: Path, labels: list[str], folder: Path) -> int:
    """Sort the flat validation images into class folders: copied from the archive, or moved from a folder."""
    for wnid in set(labels):
        (folder / wnid).mkdir(exist_ok=True)
    paths = [folder / wnid / f"ILSVRC2012_val_{number:08d}.JPEG" for number, wnid in enumerate(labels, start=1)]

    def target(match: re.Match[str]) -> Path:
        number = int(match[1])
        if not 1 <= number <= len(paths):
            raise ConfigError(f"{source}: image number {number}, but there are {len(paths)} labels")
        return paths[number - 1]

    if source.is_dir():
        for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
            match = _VAL_IMAGE.fullmatch(entry.name)
            if match and entry.is_file(follow_symlinks=False):
                os.rename(entry.path, target(match))
    else:
        _unpack_val(source, target, folder)
    if missing := [path.name for path in paths if not path.is_file()]:
        raise ConfigError(f"{source}: {len(missing)} of {len(paths)} images are missing, such as {missing[0]}")
    (folder / DONE).write_text(f"{len(labels)}\n", encoding="ascii")
    return len(labels)


def _unpack_val(source: Path, target: Callable[[re.Match[str]], Path], folder: Path) -> None:
    with open_tar(source, str(source)) as archive:
        members = _official_members(archive, str(source), _VAL_IMAGE)
        _check_space(folder, sum(member.size for member, _ in members))
        for member, match in tqdm(members, "val", unit="image", disable=None):
            path = target(match)
            if not path.exists():
                write_image(path, read_member(archive, member, str(source)))


def _official_members(archive: tarfile.TarFile, what: str, pattern: re.Pattern[str]) -> Members:
    """All files of the archive with the match of their name; other names and duplicates are errors."""
    found: dict[str, tuple[tarfile.TarInfo, re.Match[str]]] = {}
    for member in regular_files(archive, what):
        match = pattern.fullmatch(member.name.removeprefix("./"))
        if not match or match[0] in found:
            reason = "is a duplicate" if match else "is not a name of the official archive"
            raise ConfigError(f"{what}: {member.name[:200]!r} {reason}")
        found[match[0]] = (member, match)
    return list(found.values())


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(f"{folder}: {free / 1e9:.1f} GB free, {needed / 1e9:.1f} GB needed")
