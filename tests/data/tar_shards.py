"""Small tar shards in WebDataset's form, and damage to them."""

import io
import json
import random
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

from cl_train.data.decode import BadImage, EncodedImage
from cl_train.data.tar_shards import MANIFEST, list_shards
from cl_train.errors import ConfigError
from tests.data.image_folders import jpeg
from tests.imagenet_archives import WNIDS, tar_of

Members = list[tuple[str, bytes]]


def members_of(numbers: range) -> Members:
    """Image and label of one sample of each class for each number."""
    found = []
    for number in numbers:
        for label, wnid in enumerate(WNIDS):
            key = f"{wnid}/{wnid}_{number}"
            found += [
                (f"{key}.jpg", jpeg(16 + label, 16 + number % 8)),
                (f"{key}.cls", b"%d" % label),
            ]
    return found


def sound_shards() -> dict[str, Members]:
    """Members by shard; 18 training and 6 validation images."""
    shards = {
        f"im-train-{number:04d}.tar": members_of(range(2 * number, 2 * number + 2))
        for number in range(3)
    }
    return shards | {"im-val-0000.tar": members_of(range(100, 102))}


def write(root: Path, shards: dict[str, Members], *, manifest: bool = True) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name, members in shards.items():
        (root / name).write_bytes(tar_of(members))
    if manifest:
        images = {
            name: sum(member.endswith(".jpg") for member, _ in members)
            for name, members in shards.items()
        }
        (root / MANIFEST).write_text(json.dumps({"classes": WNIDS, "images": images}))
    return root


# Each takes a shard's members, and gives its bytes after the damage.


def _flipped_header(members: Members, rng: random.Random) -> bytes:
    content = bytearray(tar_of(members))
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        offset = rng.choice(archive.getmembers()).offset
    # the last 12 bytes of a header are padding
    content[offset + rng.randrange(500)] ^= 1 << rng.randrange(8)
    return bytes(content)


def _cut_image(members: Members, rng: random.Random) -> bytes:
    place = 2 * rng.randrange(len(members) // 2)
    name, content = members[place]
    cut = [b"", content[: rng.randrange(20)], b"<html>404</html>", bytes(len(content))]
    return tar_of([*members[:place], (name, rng.choice(cut)), *members[place + 1 :]])


DAMAGE: dict[str, Callable[[Members, random.Random], bytes]] = {
    # tarfile pads archives to a multiple of 10,240 bytes
    "truncated": lambda members, rng: tar_of(members)[
        : rng.randrange(len(tar_of(members)) - 10_240)
    ],
    "flipped bit in a header": _flipped_header,
    "cut or replaced image": _cut_image,
}


def silent_losses(root: Path) -> list[str]:
    """Samples of `sound_shards` that `root` lacks or has changed, if neither the index nor the
    decoder said so.
    """
    expected = {
        name: (content, int(label))
        for members in sound_shards().values()
        for (name, content), (_, label) in zip(members[::2], members[1::2], strict=True)
    }
    try:
        with patch("cl_train.data.images.cache_folder", lambda: root / "cache"):
            source = list_shards(root, workers=1)
    except ConfigError as error:
        return [] if str(root) in str(error) else [f"the message does not name the shard: {error}"]
    losses = []
    for split in (source.train, source.val):
        for index in range(len(split)):
            name = split.name(index).partition(".tar/")[2]
            content, label = expected.pop(name, (b"", -1))
            with suppress(BadImage):  # named and counted by the loader
                data = split.read(index)
                EncodedImage(data).decode()
                if data != content or split.labels[index] != label:
                    losses.append(f"{name} changed")
    return losses + [f"{name} lost" for name in expected]


def damage_one(root: Path, kind: str, rng: random.Random) -> None:
    """Write sound shards with a manifest, and damage one of them."""
    shards = sound_shards()
    write(root, shards)
    name = rng.choice(sorted(shards))
    (root / name).write_bytes(DAMAGE[kind](shards[name], rng))
