"""Make and check an ImageNet folder.

    cl-train prepare_imagenet tars /datasets/imagenet --train ILSVRC2012_img_train.tar \\
        --val ILSVRC2012_img_val.tar --devkit ILSVRC2012_devkit_t12.tar.gz      unpack the official archives
    cl-train prepare_imagenet verify /datasets/imagenet               counts, classes, files that are no images
    cl-train prepare_imagenet verify /datasets/imagenet --deep         decode every image
    cl-train prepare_imagenet resize /datasets/imagenet --out /datasets/small --max-side 400 --quality 90

Settings are also taken as key=value; `COMMAND --help` lists them. Interrupted? Run the same command again.
Exit codes: 0 done, 1 `verify` found problems, 2 wrong usage or unusable input.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TypeVar

from cl_train.config.schema import ConfigError
from cl_train.config.validation import setting_fields, settings_from_arguments, suggest

COMMANDS = ("tars", "verify", "resize")
T = TypeVar("T")


def parse(command: str, schema: type[T], arguments: list[str]) -> T:
    """Options, key=value words, and the root as a bare word."""
    parser = argparse.ArgumentParser(prog=f"cl-train prepare_imagenet {command}")
    parser.add_argument("words", nargs="*", metavar="ROOT | key=value", help="the folder, and settings as key=value")
    fields = setting_fields(schema)
    for key, item in fields.items():
        flag, meaning = f"--{key.replace('_', '-')}", item.metadata["help"].replace("%", "%%")
        if item.type == "bool":
            parser.add_argument(flag, dest=key, action="store_const", const="true", help=meaning)
        else:
            parser.add_argument(flag, dest=key, metavar=key.upper(), help=meaning)
    given = vars(parser.parse_intermixed_args(arguments))
    words = [word if "=" in word else f"root={word}" for word in given.pop("words")]
    return settings_from_arguments(schema, words + [f"{key}={value}" for key, value in given.items() if value])


def unpack(arguments: list[str]) -> int:
    from cl_train.imagenet.archives import PrepareSettings, prepare

    settings = parse("tars", PrepareSettings, arguments)
    counts = prepare(settings)
    for split, images in counts.items():
        print(f"{settings.root}/{split}: {images:,} images")
    print(f"check them: cl-train prepare_imagenet verify {settings.root}")
    return 0


def verify(arguments: list[str]) -> int:
    from cl_train.imagenet.verify import VerifySettings
    from cl_train.imagenet.verify import verify as check

    report = check(parse("verify", VerifySettings, arguments))
    for split, images in report.images.items():
        print(f"{split}: {images:,} images in {report.classes[split]:,} classes")
    for line in report.notes:
        print(f"note: {line}")
    for line in report.problems:
        print(line)
    print(f"{len(report.problems)} problems" if report.problems else "all is well")
    return 1 if report.problems else 0


def resize(arguments: list[str]) -> int:
    from cl_train.imagenet.resize import ResizeSettings, resize_folder

    print(resize_folder(**dataclasses.asdict(parse("resize", ResizeSettings, arguments))))
    return 0


def main(words: list[str]) -> int:
    try:
        return run(words)
    except OSError as error:  # a full or failing disk, mostly
        print(f"failed: {error}; the same command continues", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the same command continues", file=sys.stderr)
        return 130


def run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print("usage: cl-train prepare_imagenet COMMAND [options]\n")
        print(__doc__)
        return 0 if words else 2
    name, arguments = words[0], words[1:]
    name = "tars" if name == "prepare" else name
    if name not in COMMANDS:
        raise ConfigError(f"no command '{name}'{suggest(name, COMMANDS)} (there are {', '.join(COMMANDS)})")
    return {"tars": unpack, "verify": verify, "resize": resize}[name](arguments)
