"""Make an ImageNet folder from the official archives, check it, and make smaller or sharded copies.

    cl-train prepare_imagenet tars out=/datasets/imagenet train=ILSVRC2012_img_train.tar \\
        val=ILSVRC2012_img_val.tar devkit=ILSVRC2012_devkit_t12.tar.gz
    cl-train prepare_imagenet verify data.root=/datasets/imagenet deep=true
    cl-train prepare_imagenet resize data.root=/datasets/imagenet out=/datasets/small max_side=400
    cl-train prepare_imagenet shards data.root=/datasets/imagenet out=/datasets/imagenet-wds

After an interruption, run the same command again to continue.
Exit codes: 0 done, 1 failed or `verify` found problems, 2 wrong usage or unusable input, 130
interrupted.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cl_train.config.arguments import settings_from_arguments
from cl_train.config.fields import Range, suggest
from cl_train.config.schema import IMAGE_FORMATS, OVERWRITE_HELP, setting
from cl_train.errors import ConfigError


@dataclass
class _Output:
    out: str = setting("", "folder to write to", required=True)
    overwrite: bool = setting(False, OVERWRITE_HELP)


@dataclass
class _Folder:
    root: str = setting("", "folder of train/<class>/* and val/*", key="data.root", required=True)
    workers: int | None = setting(None, "processes; null = cores", Range(1), key="data.workers")


@dataclass
class Tars(_Output):
    """Unpack the official archives into train/<wnid>/*.JPEG and val/<wnid>/*.JPEG."""

    train: str | None = setting(None, "ILSVRC2012_img_train.tar; null = leave train/ as it is")
    val: str | None = setting(None, "ILSVRC2012_img_val.tar; null = leave val/ as it is")
    devkit: str | None = setting(None, "ILSVRC2012_devkit_t12.tar.gz, with the labels of val")


@dataclass
class Verify(_Folder):
    """Count classes and images, and find files that are not images."""

    deep: bool = setting(False, "decode every image: about 10 minutes per core and 600,000 images")
    extensions: list[str] = setting(
        [".jpg", ".jpeg", ".png"],
        "extensions of image files",
        choices=tuple(IMAGE_FORMATS),
        key="data.extensions",
    )
    expect: str = setting("imagenet", "numbers of classes and images", choices=("imagenet", "any"))


@dataclass
class Resize(_Output, _Folder):
    """Copy a folder with smaller images, which load faster."""

    max_side: int | None = setting(None, "longest side, pixels; 400 without short_side", Range(8))
    short_side: int | None = setting(None, "shortest side, pixels", Range(8))
    quality: int = setting(90, "JPEG quality of the copies", Range(1, 100))


@dataclass
class Shards(_Output, _Folder):
    """Copy any folder of images into tar shards for data=shards and WebDataset."""

    images_per_shard: int = setting(1000, "images in each shard", Range(1))
    seed: int = setting(0, "seed of the assignment of images to shards", Range(0))


TASKS: dict[str, type] = {task.__name__.lower(): task for task in (Tars, Verify, Resize, Shards)}
_PATHS = ("root", "out", "train", "val", "devkit")
USAGE = f"{'|'.join(TASKS)} [key=value ...]"
SETTINGS: dict[str, type] = {f"{name}: {task.__doc__}": task for name, task in TASKS.items()}


def main(words: list[str]) -> int:
    name = words[0] if words else ""
    if name not in TASKS:
        tasks = ", ".join(TASKS)
        hint = suggest(name, TASKS)
        raise ConfigError(f"the first argument must be a task ({tasks}), not '{name}'{hint}")
    settings = vars(settings_from_arguments(TASKS[name], words[1:]))
    options = {
        key: Path(value).expanduser() if key in _PATHS and value else value
        for key, value in settings.items()
    }
    try:
        lines, is_right = _run(name, options)
    except (OSError, RuntimeError) as error:  # a full or failing disk, a worker process that died
        print(f"failed: {error}. Run the same command again to continue", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0 if is_right else 1


def _run(task: str, options: dict[str, Any]) -> tuple[list[str], bool]:
    """Returns a task's report, and whether it found nothing wrong."""
    from cl_train.data.prepare import archives, folders, shards

    if task == "resize":
        from cl_train.data.prepare import resize  # torch, which the other tasks do not need

        return [resize.resize_folder(**options)], True
    if task == "verify":
        lines, problems = folders.verify(**options)
        return [*lines, *(problems or ["0 problems found"])], not problems
    if task == "shards":
        images, bad = shards.write_shards(**options)
        summary = f"{options['out']}: {sum(images.values()):,} images in {len(images):,} shards"
        return [summary, *(f"left out: {line}" for line in bad)], not bad
    counts = archives.unpack(**options)
    return [f"{options['out']}: {count:,} {split} images" for split, count in counts.items()], True
