"""From the official ILSVRC2012 archives to `train/<wnid>/*.JPEG` and `val/<wnid>/*.JPEG`.

The train archive is a tar of 1000 tars, the validation archive is flat, its labels are in the development kit. All are
streamed. Nothing is extracted to a path that an archive names: a member must be a regular file with an official name,
and is written to a path computed here. Anything else is an error.
"""

import gzip
import os
import re
import shutil
import tarfile
import zlib
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import IO, cast

from tqdm import tqdm

from cl_train.config.schema import ConfigError
from cl_train.data.shards import open_tar, read_member, regular_files
from cl_train.imagenet.resumable import SETTINGS, resumable_folder, write_image

_PARTIAL = ".partial"  # an incomplete class folder; after an interruption the next run removes it
_CLASS_TAR = re.compile(r"(n\d{8})\.tar")
_TRAIN_IMAGE = re.compile(r"(n\d{8})_\d+\.JPEG")
_VAL_IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG")
_GROUND_TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"
_MAX_KIT_BYTES = 64 * 2**20  # unpacked, 2 MB; more is a decompression bomb
Members = list[tuple[tarfile.TarInfo, re.Match[str]]]


def unpack(
    out: Path, train: Path | None, val: Path | None, devkit: Path | None, overwrite: bool = False
) -> dict[str, int]:
    """Make `out/train` from ILSVRC2012_img_train.tar, and `out/val` from ILSVRC2012_img_val.tar, or from a folder with
    its flat files, which are moved; val needs `devkit`, see `validation_labels`. After an interruption, call it again.

    Returns the number of images in each requested split. Raises ConfigError: archives or labels that cannot be used.
    """
    given = {"train": train, "val": val, "devkit": devkit}
    problems = [f"{name}={path}: no such file" for name, path in given.items() if path and not path.exists()]
    if train is None and val is None:
        problems.append("nothing to do: give train=ILSVRC2012_img_train.tar or val=ILSVRC2012_img_val.tar, or both")
    if val is not None and devkit is None:
        problems.append("val=... needs devkit=ILSVRC2012_devkit_t12.tar.gz: the validation archive has no labels")
    unknown = [] if train is None or (out / SETTINGS).exists() else sorted(out.glob("train/n????????"))
    if unknown:
        problems.append(f"{unknown[0]} was made by another program and may lack images: move the classes away")
    if problems:
        raise ConfigError(problems)
    labels = validation_labels(devkit) if devkit is not None else []
    counts = {}
    sorts_in_place = val is not None and val.is_dir() and val.resolve().is_relative_to(out.resolve())
    with resumable_folder(out, {"task": "tars"}, overwrite=overwrite or sorts_in_place):
        if train is not None:
            counts["train"] = _unpack_train(train, out / "train")
        if val is not None:
            counts["val"] = _place_val(val, labels, out / "val")
    return counts


def _unpack_train(archive: Path, folder: Path) -> int:
    with open_tar(archive, str(archive)) as outer:
        members = _official_members(outer, str(archive), _CLASS_TAR)
        if not members:
            raise ConfigError(f"{archive}: no class archives (n01440764.tar, ...); is it ILSVRC2012_img_train.tar?")
        waiting = [(member, match[1]) for member, match in members if not (folder / match[1]).exists()]
        _check_space(folder.parent, sum(member.size for member, _ in waiting))
        for member, wnid in tqdm(waiting, "train", unit="class", disable=None):
            _unpack_class(cast(IO[bytes], outer.extractfile(member)), f"{archive}: {member.name}", wnid, folder)
    return sum(len(os.listdir(folder / match[1])) for _, match in members)


def _unpack_class(stream: IO[bytes], what: str, wnid: str, folder: Path) -> None:
    """Unpack one class; `folder/wnid` is created only when it is complete."""
    partial = folder / _PARTIAL
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with open_tar(stream, what) as archive:
            members = _official_members(archive, what, _TRAIN_IMAGE)
            for member, match in members:
                if match[1] != wnid:
                    raise ConfigError(f"{what}: {member.name} is an image of another class")
                (partial / match[0]).write_bytes(read_member(archive, member, what))
        if not members:
            raise ConfigError(f"{what}: no images")
        os.replace(partial, folder / wnid)
    finally:  # after an error; the disk may be full
        shutil.rmtree(partial, ignore_errors=True)
        if not any(folder.iterdir()):
            folder.rmdir()


def _place_val(source: Path, labels: list[str], folder: Path) -> int:

    def target(match: re.Match[str]) -> Path:
        number = int(match[1])
        if not 1 <= number <= len(labels):
            raise ConfigError(f"{source}: image number {number}, but there are {len(labels)} labels")
        return folder / labels[number - 1] / match[0]

    if source.is_dir():
        for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
            match = _VAL_IMAGE.fullmatch(entry.name)
            if match and entry.is_file(follow_symlinks=False):
                path = target(match)
                path.parent.mkdir(parents=True, exist_ok=True)
                os.rename(entry.path, path)
    else:
        with open_tar(source, str(source)) as archive:
            members = _official_members(archive, str(source), _VAL_IMAGE)
            waiting = [(member, path) for member, match in members if not (path := target(match)).exists()]
            _check_space(folder.parent, sum(member.size for member, _ in waiting))
            for member, path in tqdm(waiting, "val", unit="image", disable=None):
                write_image(path, read_member(archive, member, str(source)))
    names = (f"{wnid}/ILSVRC2012_val_{number:08d}.JPEG" for number, wnid in enumerate(labels, start=1))
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ConfigError(f"{source}: {len(missing)} of {len(labels)} images are missing, such as {missing[0]}")
    return len(labels)


def _official_members(archive: tarfile.TarFile, what: str, pattern: re.Pattern[str]) -> Members:
    found: dict[str, tuple[tarfile.TarInfo, re.Match[str]]] = {}
    for member in regular_files(archive, what):
        match = pattern.fullmatch(member.name.removeprefix("./"))
        if not match or match[0] in found:
            raise ConfigError(f"{what}: {member.name[:200]!r} is a duplicate, or no name of the official archive")
        found[match[0]] = (member, match)
    return list(found.values())


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(f"{folder}: {free / 1e9:.1f} GB free, {needed / 1e9:.1f} GB needed")


# --- the development kit ----------------------------------------------------------------------------------------------


def synsets() -> list[str]:
    """The 1,000 WordNet ids; ILSVRC2012_ID 1 comes first. This is not their alphabetical order."""
    return (files("cl_train.imagenet") / "synsets.txt").read_text(encoding="ascii").split()


def validation_labels(source: Path) -> list[str]:
    """The WordNet id of validation image 1, 2, 3, ...

    `source`: ILSVRC2012_devkit_t12.tar.gz, the folder it was unpacked to, or a text file with one label per line:
    ILSVRC2012_ID (1 to 1000) or WordNet id. Raises ConfigError if it is none of these, or damaged.
    """
    what, known = f"devkit={source}", synsets()
    try:
        lines = _ground_truth(source, what).decode("ascii").split()
    except (OSError, EOFError, zlib.error, UnicodeError) as error:
        raise ConfigError(f"{what}: cannot be read ({type(error).__name__}: {error})") from error
    labels = [known[int(line) - 1] if re.fullmatch(r"[1-9]\d{0,2}|1000", line) else line for line in lines]
    bad = next((label for label in labels or ["nothing"] if not re.fullmatch(r"n\d{8}", label)), None)
    if bad is not None:
        raise ConfigError(f"{what}: {bad[:40]!r} is neither an ILSVRC2012_ID (1 to 1000) nor a WordNet id")
    return labels


def _ground_truth(source: Path, what: str) -> bytes:
    if source.is_file() and source.suffix == ".txt":
        return source.read_bytes()
    if source.is_dir():
        inner = source / "ILSVRC2012_devkit_t12"
        return ((inner if inner.is_dir() else source) / _GROUND_TRUTH).read_bytes()
    with gzip.open(source) as packed:
        content = packed.read(_MAX_KIT_BYTES)
        if packed.read(1):
            raise ConfigError(f"{what}: more than {_MAX_KIT_BYTES >> 20} MiB unpacked: not the official kit")
    with open_tar(BytesIO(content), what) as archive:
        for member in regular_files(archive, what):
            if member.name.endswith("/" + _GROUND_TRUTH):
                return read_member(archive, member, what)
    raise ConfigError(f"{what}: has no {_GROUND_TRUTH}; expected ILSVRC2012_devkit_t12.tar.gz")
