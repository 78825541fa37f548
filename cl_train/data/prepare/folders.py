"""Output folders that repeated calls complete; a folder of images checked (counts, classes, files),
or copied smaller.

Decoding is most of the loader's time and grows with the number of pixels, so a smaller copy loads
faster. The cost: a second lossy compression, and small crops are enlarged from fewer pixels, so
that training images are less sharp.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg

from cl_train.data.decode import JPEG_MAGIC, PNG_MAGIC, BadImage, EncodedImage, read_file
from cl_train.data.images import EXTENSIONS, listed, unreadable
from cl_train.errors import ConfigError
from cl_train.system.files import lock_file, output_folder, read_json, replacing, write_json
from cl_train.system.processes import map_in_processes

CLASSES, IMAGES = 1000, {"train": 1_281_167, "val": 50_000}
_SHOWN = 10  # bad files
SETTINGS, _LOCK = ".settings.json", ".settings.lock"


@contextmanager
def resumable_folder(
    out: Path, settings: dict[str, Any], *, overwrite: bool, outside: Sequence[Path] = ()
) -> Iterator[None]:
    """Create and lock `out`, for calls with the same settings; in it, a file with its final name is
    whole.

    Raises ConfigError: `out` was started with others, holds files of something else without
    `overwrite`, or lies in one of the folders `outside`, which are read.
    """
    for folder in outside:
        if out.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"out={out} lies inside '{folder}', which is read: give another")
    record = out / SETTINGS
    with (
        output_folder(out, overwrite=overwrite, markers=(SETTINGS, _LOCK)),
        lock_file(out / _LOCK, waiting_for=str(out)),
    ):
        start = read_json(record) if record.is_file() else settings
        changed = [f"{key}={start.get(key)}" for key in settings if start.get(key) != settings[key]]
        if changed:
            what = f"out={out} was started with {', '.join(changed)}"
            raise ConfigError(f"{what}: give another folder")
        write_json(record, settings)
        yield


def write_image(path: Path, data: bytes) -> None:
    """Write under a temporary name, which a repeated call uses again, and rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, path.with_name(f".{path.name}.part")) as temporary:
        temporary.write_bytes(data)


def resize_folder(
    root: Path,
    out: Path,
    max_side: int | None = None,
    short_side: int | None = None,
    quality: int = 90,
    workers: int | None = None,
    overwrite: bool = False,
) -> str:
    """Copy every image below `root` to the same name below `out`, smaller. After an interruption,
    call it again.

    One side, in pixels, is limited: the longest (400 by default) or the shortest. Returns what was
    written, and the images that cannot be decoded, which are left out. Raises ConfigError: a folder
    that cannot be read, or an unusable `out`; RuntimeError: a worker process died.
    """
    from cl_train.data.transforms import resized  # torch, for all workers

    if max_side is not None and short_side is not None:
        raise ConfigError("give either max_side or short_side, not both")
    if not root.is_dir():
        raise ConfigError(f"'{root}' is not a folder")
    if not short_side:
        max_side = max_side or 400
    sizes = {"max_side": max_side, "short_side": short_side, "quality": quality}
    with resumable_folder(out, {"task": "resize", **sizes}, overwrite=overwrite, outside=[root]):
        walk = os.walk(root, onerror=unreadable)
        files = (os.path.join(folder, name) for folder, _, names in walk for name in names)
        images = sorted(file for file in files if file.lower().endswith(EXTENSIONS))
        names = [os.path.relpath(image, root) for image in images]
        copy = partial(_copy, root, out, resized, max_side, short_side, quality)
        results = list(map_in_processes(copy, names, workers, description="resize", unit="img"))
    written = [result for result in results if isinstance(result, tuple)]
    bad = [result for result in results if isinstance(result, str)]
    existed = len(results) - len(written) - len(bad)
    lines = [f"{len(written):,} images written, {existed:,} existed already"]
    if written:
        before, after = (sum(sizes) / 2**20 for sizes in zip(*written, strict=True))
        lines.append(f"{before:,.1f} MiB became {after:,.1f} MiB")
    if bad:
        lines += [f"{len(bad):,} images cannot be decoded and were not copied:", *bad[:_SHOWN]]
    return "\n".join(lines)


def _copy(
    root: Path,
    out: Path,
    resized: Callable[..., Any],
    max_side: int | None,
    short_side: int | None,
    quality: int,
    name: str,
) -> tuple[int, int] | str | None:
    """Write an image of the required size, never enlarged; a small JPEG keeps its bytes.

    Returns the bytes of the image and of its copy; path and reason of a bad image; None: it exists.
    """
    if (out / name).is_file():
        return None
    try:
        data = copy = read_file(root / name)
        encoded = EncodedImage(data)
        pixels, size = encoded.decode(), (encoded.height, encoded.width)
    except BadImage as bad:
        return f"{root / name}: {bad}"
    scale = max_side / max(size) if max_side else (short_side or 1) / min(size)
    if scale < 1:
        height, width = (max(1, round(side * scale)) for side in size)
        pixels = resized(pixels, (height, width)).permute(1, 2, 0).numpy()
    if scale < 1 or encoded.needs_pillow or not data.startswith(JPEG_MAGIC):
        pixels = np.ascontiguousarray(pixels)
        copy = simplejpeg.encode_jpeg(pixels, quality=quality, colorsubsampling="420")
    write_image(out / name, copy)
    return len(data), len(copy)


def verify(
    root: Path, *, deep: bool = False, expect: str = "imagenet", workers: int | None = None
) -> tuple[list[str], list[str]]:
    """Check `root/train` and `root/val`, for the numbers of ImageNet or `expect="any"`; `deep`
    decodes every image.

    Returns a line for each split, and the problems. Raises ConfigError: a folder cannot be read;
    RuntimeError: a worker process died.
    """
    absent = [name for name in ("train", "val") if not (root / name).is_dir()]
    if absent:
        raise ConfigError([f"'{root}' has no folder '{name}'" for name in absent])
    # By split and class: the number of images; other files, with the reason.
    contents: dict[str, dict[str, tuple[int, list[str]]]] = {}
    for split in ("train", "val"):
        folders = [entry.name for entry in os.scandir(root / split) if entry.is_dir()]
        names = sorted(name for name in folders if name[0] != ".")
        check = partial(_check_class, root / split, deep)
        results = map_in_processes(check, names, workers, description=split, unit="class")
        contents[split] = dict(zip(names, results, strict=True))
    lines, problems = [], []
    for split, other in (("train", "val"), ("val", "train")):
        classes, official = contents[split], IMAGES[split]
        images = sum(count for count, _ in classes.values())
        lines.append(f"{split}: {images:,} images in {len(classes):,} classes")
        if expect == "imagenet" and (len(classes), images) != (CLASSES, official):
            expected = f"ILSVRC2012 has {official:,} in {CLASSES:,}"
            problems.append(f"{lines[-1]}; {expected} (another data set: expect=any)")
        if only := sorted(classes.keys() - contents[other]):
            problems.append(f"{len(only)} classes are in {split} only: {listed(only)}")
        if empty := [name for name, (count, _) in classes.items() if not count]:
            problems.append(f"{split}: {len(empty)} classes have no image: {listed(empty)}")
        if bad := [file for _, files in classes.values() for file in files]:
            title = f"{split}: {len(bad)} files are not usable images:"
            problems.append("\n  ".join([title, *bad[:_SHOWN]]))
    return lines, problems


def _check_class(folder: Path, deep: bool, name: str) -> tuple[int, list[str]]:
    images, bad = 0, []
    for below, _, names in os.walk(folder / name, onerror=unreadable):
        for path in (os.path.join(below, name) for name in names if not name.startswith(".")):
            try:
                if not path.lower().endswith(EXTENSIONS):
                    raise BadImage(f"its name does not end in {', '.join(EXTENSIONS)}")
                if deep:
                    EncodedImage(read_file(path)).decode()
                elif not read_file(path, first=8).startswith((JPEG_MAGIC, PNG_MAGIC)):
                    raise BadImage("not an image: its first bytes are of another format")
                images += 1
            except BadImage as error:
                bad.append(f"{path}: {error}")
    return images, sorted(bad)
