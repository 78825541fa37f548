"""Make an ImageNet folder from the official archives, check it, and make smaller or sharded copies.

    cl-train prepare_imagenet tars out=/datasets/imagenet train=ILSVRC2012_img_train.tar \\
        val=ILSVRC2012_img_val.tar devkit=ILSVRC2012_devkit_t12.tar.gz
    cl-train prepare_imagenet verify data.root=/datasets/imagenet deep=true
    cl-train prepare_imagenet resize data.root=/datasets/imagenet out=/datasets/small max_side=400

After an interruption the same command continues.
Exit codes: 0 done, 1 failed or `verify` found problems, 2 wrong usage or unusable input, 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cl_train.config.schema import ConfigError, setting
from cl_train.config.validation import setting_fields, settings_from_arguments, suggest


@dataclass
class SourceSettings:
    """Where the images are."""

    root: str = setting("", "folder that holds train/<class>/* and val/<class>/*")
    workers: int | None = setting(None, "processes; null = as many as cores", minimum=1)


@dataclass
class TarsSettings:
    """Unpack the official archives into train/<wnid>/*.JPEG and val/<wnid>/*.JPEG."""

    out: str = setting("", "folder to make train/ and val/ in")
    train: str | None = setting(None, "ILSVRC2012_img_train.tar; null = leave train/ as it is")
    val: str | None = setting(None, "ILSVRC2012_img_val.tar, or a folder with its flat files, which are moved")
    devkit: str | None = setting(None, "ILSVRC2012_devkit_t12.tar.gz or its folder, or a text file with the val labels")


@dataclass
class VerifySettings:
    """Count classes and images, and find files that are not images."""

    data: SourceSettings = field(default_factory=SourceSettings)
    deep: bool = setting(False, "decode every image: about 10 minutes per core and 600,000 images")
    expect: str = setting("imagenet", "expected numbers of classes and images", choices=("imagenet", "any"))


@dataclass
class ResizeSettings:
    """Copy a folder with smaller images, which load faster."""

    data: SourceSettings = field(default_factory=SourceSettings)
    out: str = setting("", "folder for the copies")
    max_side: int | None = setting(None, "longest side of a copy, pixels; 400 without short_side", minimum=8)
    short_side: int | None = setting(None, "shortest side of a copy, pixels", minimum=8)
    quality: int = setting(90, "JPEG quality of the copies", minimum=1, maximum=100)


def tars(settings: TarsSettings) -> int:
    from cl_train.imagenet.archives import unpack

    sources = (Path(path).expanduser() if path else None for path in (settings.train, settings.val, settings.devkit))
    for split, images in unpack(_folder(settings.out, "out"), *sources).items():
        print(f"{settings.out}/{split}: {images:,} images")
    return 0


def verify(settings: VerifySettings) -> int:
    from cl_train.imagenet.verify import verify as check

    root = _folder(settings.data.root, "data.root")
    official = settings.expect == "imagenet"
    report = check(root, deep=settings.deep, official_counts=official, workers=settings.data.workers)
    print(report)
    return 1 if report.problems else 0


def resize(settings: ResizeSettings) -> int:
    from cl_train.imagenet.resize import resize_folder

    sizes = settings.max_side, settings.short_side, settings.quality
    root, out = _folder(settings.data.root, "data.root"), _folder(settings.out, "out")
    print(resize_folder(root, out, *sizes, workers=settings.data.workers))
    return 0


TASKS: dict[str, tuple[type, Callable[[Any], int]]] = {
    "tars": (TarsSettings, tars),
    "verify": (VerifySettings, verify),
    "resize": (ResizeSettings, resize),
}


def _folder(path: str, key: str) -> Path:
    if not path:
        raise ConfigError(f"{key}=FOLDER is missing")
    return Path(path).expanduser()


def main(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    name, *arguments = words
    if name not in TASKS:
        raise ConfigError(f"no task '{name}'{suggest(name, TASKS)} (there are {', '.join(TASKS)})")
    schema, run = TASKS[name]
    try:
        return run(settings_from_arguments(schema, arguments))
    except (OSError, RuntimeError) as error:  # a full or failing disk, a dead worker
        print(f"failed: {error}. The same command continues", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted. The same command continues", file=sys.stderr)
        return 130


def usage() -> str:
    lines = ["usage: cl-train prepare_imagenet TASK [key=value ...]", "", __doc__ or ""]
    for name, (schema, _) in TASKS.items():
        lines += [f"{name}: {schema.__doc__}"]
        lines += [f"  {key:<14}{item.metadata['help']}" for key, item in setting_fields(schema).items()] + [""]
    return "\n".join(lines)
