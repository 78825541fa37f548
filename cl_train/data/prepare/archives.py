"""From the official ILSVRC2012 archives to `train/<wnid>/*.JPEG` and `val/<wnid>/*.JPEG`.

The train archive is a tar of 1000 tars, the validation archive is flat, its labels are in the
development kit. All are streamed. A member must be a regular file with an official name, and is
written to a path computed here: no archive names a path.
"""

import gzip
import os
import re
import shutil
import tarfile
import zlib
from importlib.resources import files
from pathlib import Path
from typing import IO, cast

from tqdm import tqdm

from cl_train.data.prepare.folders import resumable_folder, write_image
from cl_train.data.tar_shards import open_tar, read_member, regular_files
from cl_train.errors import ConfigError

_GROUND_TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"


def unpack(
    out: Path,
    *,
    train: Path | None = None,
    val: Path | None = None,
    devkit: Path | None = None,
    overwrite: bool = False,
) -> dict[str, int]:
    """Makes `out/train` from ILSVRC2012_img_train.tar, and `out/val` from ILSVRC2012_img_val.tar
    and ILSVRC2012_devkit_t12.tar.gz, which has the labels. After an interruption, call it again.
    Returns the number of images in each requested split. Raises ConfigError.
    """
    paths = {"train": train, "val": val, "devkit": devkit}
    missing = [(name, path) for name, path in paths.items() if path and not path.is_file()]
    problems = [f"{name}={path}: no such file" for name, path in missing]
    if train is None and val is None:
        advice = "give train=ILSVRC2012_img_train.tar or val=ILSVRC2012_img_val.tar"
        problems.append(f"nothing to do: {advice}")
    if val is not None and devkit is None:
        advice = "devkit=ILSVRC2012_devkit_t12.tar.gz: the archive itself has no labels"
        problems.append(f"val=... needs {advice}")
    if problems:
        raise ConfigError(problems)

    labels = validation_labels(devkit) if devkit is not None else []
    counts = {}
    with resumable_folder(out, {"task": "tars"}, overwrite=overwrite):
        if train is not None:
            counts["train"] = _unpack_train(train, out / "train")
        if val is not None:
            counts["val"] = _unpack_val(val, labels, out / "val")
    return counts


def _unpack_train(archive: Path, folder: Path) -> int:
    with open_tar(archive, str(archive)) as outer:
        members = _official_members(outer, str(archive), r"n\d{8}\.tar")
        for name, member in tqdm(members.items(), "train", unit="class", disable=None):
            stream = cast(IO[bytes], outer.extractfile(member))
            _unpack_class(stream, f"{archive}: {member.name}", folder / name[:-4])
    return sum(len(os.listdir(folder / name[:-4])) for name in members)


def _unpack_class(stream: IO[bytes], what: str, folder: Path) -> None:
    """Creates the folder of a class only when it is complete."""
    if folder.exists():
        return
    partial = folder.with_name(".partial")  # after an interruption the next run removes it
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with open_tar(stream, what) as archive:
            members = _official_members(archive, what, rf"{folder.name}_\d+\.JPEG")
            for name, member in members.items():
                (partial / name).write_bytes(read_member(archive, member, what))
        os.replace(partial, folder)
    finally:  # after an error; the disk may be full
        shutil.rmtree(partial, ignore_errors=True)
        if not any(folder.parent.iterdir()):
            folder.parent.rmdir()


def _unpack_val(archive: Path, labels: list[str], folder: Path) -> int:
    def target(name: str) -> Path:
        number = int(name[-13:-5])
        if not 1 <= number <= len(labels):
            what = f"image number {number}, but there are {len(labels)} labels"
            raise ConfigError(f"{archive}: {what}")
        return folder / labels[number - 1] / name

    with open_tar(archive, str(archive)) as images:
        members = _official_members(images, str(archive), r"ILSVRC2012_val_\d{8}\.JPEG")
        for name, member in tqdm(members.items(), "val", unit="image", disable=None):
            if not target(name).exists():
                write_image(target(name), read_member(images, member, str(archive)))
    names = [f"ILSVRC2012_val_{number:08d}.JPEG" for number in range(1, len(labels) + 1)]
    if missing := [name for name in names if not target(name).is_file()]:
        what = f"{len(missing)} of {len(labels)} images are missing, such as {missing[0]}"
        raise ConfigError(f"{archive}: {what}")
    return len(labels)


def _official_members(
    archive: tarfile.TarFile, what: str, pattern: str
) -> dict[str, tarfile.TarInfo]:
    members: dict[str, tarfile.TarInfo] = {}
    for member in regular_files(archive, what):
        name = member.name.removeprefix("./")
        if not re.fullmatch(pattern, name) or name in members:
            problem = "is a duplicate, or no name of the official archive"
            raise ConfigError(f"{what}: {name[:200]!r} {problem} ({pattern})")
        members[name] = member
    if not members:
        raise ConfigError(f"{what}: no files with the names of the official archive ({pattern})")
    return members


def validation_labels(devkit: Path) -> list[str]:
    """Returns the WordNet ids of images 1, 2, 3, ... Raises ConfigError: `devkit` has no labels."""
    what = f"devkit={devkit}"
    # in the order of ILSVRC2012_ID, which is not alphabetical
    wnids = (files("cl_train.data.prepare") / "synsets.txt").read_text(encoding="ascii").split()
    by_id = {str(number): wnid for number, wnid in enumerate(wnids, start=1)}
    try:
        with gzip.open(devkit) as packed, open_tar(cast(IO[bytes], packed), what) as archive:
            members = regular_files(archive, what)
            truth = next(m for m in members if m.name.endswith(_GROUND_TRUTH))
            lines = read_member(archive, truth, what).decode("ascii").split()
        return [by_id[line] for line in lines]
    except (OSError, EOFError, zlib.error, UnicodeError, KeyError, StopIteration) as error:
        why = str(error) or "not in it"
        raise ConfigError(f"{what}: not the .tar.gz, nor its {_GROUND_TRUTH} ({why})") from error
