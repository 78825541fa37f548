"""A small ImageNet in the layout of the official archives, and archives that no one should unpack."""

import gzip
import io
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from PIL import Image

from cl_train.imagenet.archives import synsets

WNIDS = ("n01440764", "n01443537", "n02102040")


def jpeg(seed: int, side: int = 40) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=60)
    return buffer.getvalue()


def tar_of(files: Iterable[tuple[str, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:", format=tarfile.GNU_FORMAT) as archive:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def class_tar(wnid: str, images: int, first_seed: int = 0, prefix: str = "") -> bytes:
    return tar_of((f"{prefix}{wnid}_{number}.JPEG", jpeg(first_seed + number)) for number in range(images))


def val_wnid(number: int, wnids: tuple[str, ...] = WNIDS) -> str:
    return wnids[(number * 7) % len(wnids)]


def devkit(val_images: int, wnids: tuple[str, ...] = WNIDS) -> bytes:
    """With ILSVRC2012_IDs as in the official ground truth; classes that ImageNet lacks are written as they are."""
    known, labels = synsets(), [val_wnid(number, wnids) for number in range(1, val_images + 1)]
    truth = "".join(f"{known.index(wnid) + 1 if wnid in known else wnid}\n" for wnid in labels)
    path = "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt"
    return gzip.compress(tar_of([("ILSVRC2012_devkit_t12/readme.txt", b"hello"), (path, truth.encode())]))


def make_archives(
    folder: Path, per_class: int = 4, val_images: int = 9, wnids: tuple[str, ...] = WNIDS
) -> dict[str, Path]:
    """The three official archives, shrunk; `unpack(out, **make_archives(folder))`."""
    folder.mkdir(parents=True, exist_ok=True)
    classes = [(f"{wnid}.tar", class_tar(wnid, per_class, 1000 * place)) for place, wnid in enumerate(wnids)]
    images = [(f"ILSVRC2012_val_{number:08d}.JPEG", jpeg(-number % 9999)) for number in range(1, val_images + 1)]
    contents = {
        "train": ("ILSVRC2012_img_train.tar", tar_of(classes)),
        "val": ("ILSVRC2012_img_val.tar", tar_of(images)),
        "devkit": ("ILSVRC2012_devkit_t12.tar.gz", devkit(val_images, wnids)),
    }
    for name, content in contents.values():
        (folder / name).write_bytes(content)
    return {key: folder / name for key, (name, _) in contents.items()}


# --- hostile train archives -------------------------------------------------------------------------------------------


def _inner(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    """A train archive whose one class archive starts with a good image and goes on with `members`."""
    buffer = io.BytesIO()
    good = jpeg(1)
    with tarfile.open(fileobj=buffer, mode="w:", format=tarfile.PAX_FORMAT) as archive:
        for member, content in [(_file(f"{WNIDS[0]}_1.JPEG", good), good), *members]:
            archive.addfile(member, io.BytesIO(content) if content else None)
    return tar_of([(f"{WNIDS[0]}.tar", buffer.getvalue())])


def _file(name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.type, member.linkname = len(content), kind, link
    return member


def _with_size(archive: bytes, at: int, size: bytes) -> bytes:
    """`archive` with the size field of the header at byte `at` replaced, and a right checksum."""
    header = bytearray(archive[at : at + 512])
    header[124:136] = size
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    return archive[:at] + bytes(header) + archive[at + 512 :]


def blocks(content: bytes) -> int:
    """The size of `content` in a tar."""
    return -(-len(content) // 512) * 512


def _pax_bomb() -> bytes:
    member = _file(f"{WNIDS[0]}.tar", b"x")
    member.pax_headers = {"comment": "A" * 100}
    return _with_size(member.tobuf(tarfile.PAX_FORMAT) + b"x".ljust(512, b"\0"), 0, b"77777777777\0")


BODY = jpeg(2)
EVIL = b"owned"
HOSTILE: dict[str, Callable[[], bytes]] = {
    "traversal in the outer archive": lambda: tar_of([("../n01440764.tar", class_tar(WNIDS[0], 1))]),
    "traversal in a class archive": lambda: _inner((_file("../../evil_1.JPEG", EVIL), EVIL)),
    "absolute path": lambda: _inner((_file("/tmp/n01440764_2.JPEG", EVIL), EVIL)),
    "symlink, then a file through it": lambda: _inner(
        (_file("n01440764_2.JPEG", kind=tarfile.SYMTYPE, link="../../.."), b""), (_file("n01440764_2.JPEG", EVIL), EVIL)
    ),
    "hard link to a file outside": lambda: _inner(
        (_file("n01440764_2.JPEG", kind=tarfile.LNKTYPE, link="../../../secret"), b"")
    ),
    "character device": lambda: _inner((_file("n01440764_2.JPEG", kind=tarfile.CHRTYPE), b"")),
    "FIFO": lambda: _inner((_file("n01440764_2.JPEG", kind=tarfile.FIFOTYPE), b"")),
    "the same name twice": lambda: _inner((_file("n01440764_1.JPEG", BODY), BODY)),
    "a file of 8 GiB that is not there": lambda: tar_of(
        [("n01440764.tar", _with_size(tar_of([("n01440764_1.JPEG", BODY)]), 0, b"77777777777\0"))]
    ),
    "a file of negative size": lambda: _with_size(
        tar_of([("n01440764.tar", class_tar(WNIDS[0], 1))]), 0, b"\xff" * 10 + b"\xfc\x00"
    ),
    "a pax header of 8 GiB": _pax_bomb,
    "truncated class archive": lambda: tar_of([("n01440764.tar", class_tar(WNIDS[0], 3)[:2048])]),
    "truncated outer archive": lambda: tar_of([("n01440764.tar", class_tar(WNIDS[0], 3))])[:-10_000],
    "cut between two images": lambda: tar_of([("n01440764.tar", class_tar(WNIDS[0], 3)[: 512 + blocks(jpeg(0))])]),
    "an image of another class": lambda: tar_of([("n01440764.tar", class_tar(WNIDS[1], 1))]),
    "a setuid program": lambda: tar_of([("run.sh", EVIL)]),
    "a class archive twice": lambda: tar_of([("n01440764.tar", class_tar(WNIDS[0], 1))] * 2),
    "no archive at all": lambda: b"hello" * 1000,
    "an empty class archive": lambda: tar_of([("n01440764.tar", tar_of([]))]),
}  # fmt: skip
