"""A small ImageNet in the layout of the official archives, and archives that no one should
unpack.
"""

import gzip
import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

from cl_train.data.prepare import archives
from tests.data import image_folders

SYNSETS = Path(archives.__file__).with_name("synsets.txt").read_text().split()
WNIDS = ("n01440764", "n01443537", "n02102040")


def jpeg(seed: int) -> bytes:
    return image_folders.jpeg(40, 40, seed)


def tar_of(files: Iterable[tuple[str, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:", format=tarfile.GNU_FORMAT) as archive:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def class_tar(wnid: str, images: int, first_seed: int = 0, prefix: str = "") -> bytes:
    names = [f"{prefix}{wnid}_{number}.JPEG" for number in range(images)]
    return tar_of((name, jpeg(first_seed + number)) for number, name in enumerate(names))


def train_tar(prefix: str = "") -> bytes:
    tars = [class_tar(wnid, 4, 1000 * place, prefix) for place, wnid in enumerate(WNIDS)]
    return tar_of((f"{prefix}{wnid}.tar", tar) for wnid, tar in zip(WNIDS, tars, strict=True))


def val_wnid(number: int) -> str:
    return WNIDS[number * 7 % len(WNIDS)]


def devkit(val_images: int) -> bytes:
    """With ILSVRC2012_IDs, as the official ground truth."""
    labels = [val_wnid(number) for number in range(1, val_images + 1)]
    truth = "".join(f"{SYNSETS.index(wnid) + 1}\n" for wnid in labels)
    readme = "ILSVRC2012_devkit_t12/readme.txt", b"hello"
    path = "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt"
    return gzip.compress(tar_of([readme, (path, truth.encode())]))


def make_archives(folder: Path) -> dict[str, Path]:
    """The three official archives, shrunk; `unpack(out, **make_archives(folder))`."""
    folder.mkdir(parents=True, exist_ok=True)
    val = tar_of((f"ILSVRC2012_val_{n:08d}.JPEG", jpeg(-n % 9999)) for n in range(1, 10))
    contents = {
        "train": ("ILSVRC2012_img_train.tar", train_tar()),
        "val": ("ILSVRC2012_img_val.tar", val),
        "devkit": ("ILSVRC2012_devkit_t12.tar.gz", devkit(9)),
    }
    for name, content in contents.values():
        (folder / name).write_bytes(content)
    return {key: folder / name for key, (name, _) in contents.items()}


# --- hostile train archives -----------------------------------------------------------------------


def _outer(class_archive: bytes) -> bytes:
    return tar_of([(f"{WNIDS[0]}.tar", class_archive)])


def _inner(name: str, content: bytes, kind: bytes = tarfile.REGTYPE) -> bytes:
    """A train archive whose one class archive holds a good image and this member."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:") as archive:
        for member_name, data, type_ in (
            (f"{WNIDS[0]}_1.JPEG", jpeg(1), tarfile.REGTYPE),
            (name, content, kind),
        ):
            member = tarfile.TarInfo(member_name)
            member.size, member.type, member.linkname = len(data), type_, "../../../secret"
            archive.addfile(member, io.BytesIO(data))
    return _outer(buffer.getvalue())


def _with_size(archive: bytes, size: bytes) -> bytes:
    """`archive` with the size in its first header replaced, and a right checksum."""
    header = bytearray(archive[:512])
    header[124:136] = size
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    return bytes(header) + archive[512:]


EIGHT_GIB = b"77777777777\0"
THREE = class_tar(WNIDS[0], 3)
HOSTILE: dict[str, bytes] = {
    "traversal in a class archive": _inner("../../evil_1.JPEG", b"owned"),
    "hard link to a file outside": _inner("n01440764_2.JPEG", b"", tarfile.LNKTYPE),
    "the same name twice": _inner("n01440764_1.JPEG", jpeg(2)),
    "a file of 8 GiB that is not there": _outer(_with_size(class_tar(WNIDS[0], 1), EIGHT_GIB)),
    "a file of negative size": _with_size(_outer(THREE), b"\xff" * 10 + b"\xfc\x00"),
    "cut between two images": _outer(THREE[: 512 + -(-len(jpeg(0)) // 512) * 512]),
    "an empty class archive": _outer(tar_of([])),
}
