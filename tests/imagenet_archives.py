"""A small ImageNet in the layout of the official archives, and archives that no one should unpack."""

import gzip
import io
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from PIL import Image

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


def class_tar(wnid: str, images: int, first_seed: int = 0) -> bytes:
    return tar_of((f"{wnid}_{number}.JPEG", jpeg(first_seed + number)) for number in range(images))


def val_wnid(number: int, wnids: tuple[str, ...] = WNIDS) -> str:
    return wnids[(number * 7) % len(wnids)]


def mat_file(wnids: tuple[str, ...]) -> bytes:
    """`synsets` with the official field names; ids do not follow the order of the WordNet ids, as in the original."""

    def element(kind: int, content: bytes) -> bytes:
        return struct.pack("<II", kind, len(content)) + content + bytes(-len(content) % 8)

    def matrix(array_class: int, shape: tuple[int, int], name: bytes, *parts: bytes) -> bytes:
        head = (
            element(6, struct.pack("<II", array_class, 0)) + element(5, struct.pack("<ii", *shape)) + element(1, name)
        )
        return element(14, head + b"".join(parts))

    def number(value: float) -> bytes:
        return matrix(6, (1, 1), b"", element(9, struct.pack("<d", value)))

    def text(value: str) -> bytes:
        return matrix(4, (1, len(value)), b"", element(4, value.encode("utf-16-le")))

    fields = b"".join(name.ljust(32, b"\0") for name in (b"ILSVRC2012_ID", b"WNID", b"num_children"))
    rows = b"".join(number(id_of(wnid, wnids)) + text(wnid) + number(0) for wnid in wnids)
    head = struct.pack("<HHI", 5, 4, 32)  # the length of a field name, in a small element
    synsets = matrix(2, (len(wnids), 1), b"synsets", head, element(1, fields), rows)
    packed = zlib.compress(synsets)
    return (
        b"MATLAB 5.0 MAT-file".ljust(124)
        + struct.pack("<H", 0x0100)
        + b"IM"
        + struct.pack("<II", 15, len(packed))
        + packed
    )


def id_of(wnid: str, wnids: tuple[str, ...]) -> int:
    return len(wnids) - wnids.index(wnid)


def devkit(val_images: int, wnids: tuple[str, ...] = WNIDS) -> bytes:
    truth = "".join(f"{id_of(val_wnid(number, wnids), wnids)}\n" for number in range(1, val_images + 1))
    folder = "ILSVRC2012_devkit_t12"
    content = tar_of(
        [
            (f"{folder}/readme.txt", b"hello"),
            (f"{folder}/data/ILSVRC2012_validation_ground_truth.txt", truth.encode()),
            (f"{folder}/data/meta.mat", mat_file(wnids)),
        ]
    )
    return gzip.compress(content)


def make_archives(
    folder: Path, per_class: int = 4, val_images: int = 9, wnids: tuple[str, ...] = WNIDS
) -> dict[str, str]:
    """The three official archives, shrunk. Returns the settings of prepare_imagenet.py for them."""
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
    return {key: str(folder / name) for key, (name, _) in contents.items()}


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
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(member, io.BytesIO(b"x"))
    return _with_size(buffer.getvalue(), 0, b"77777777777\0")


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
