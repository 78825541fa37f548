"""The ILSVRC2012 development kit: which class each of the 50,000 validation images belongs to.

The kit's ground truth has one ILSVRC id per line; `meta.mat` maps ids to WordNet ids. It is a MATLAB 5 file, of which
the few kinds of arrays in it are read here (MathWorks, "MAT-File Format", chapter 1): SciPy would be a dependency of
40 MB for one table.
"""

from __future__ import annotations

import gzip
import io
import re
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any

from cl_train.config.schema import ConfigError

WNID = re.compile(r"n\d{8}")
_GROUND_TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"
_META = "data/meta.mat"
_MAX_BYTES = 256 * 2**20  # of the whole kit unpacked (2 MB); a bomb is larger

_INT8, _UINT8, _INT16, _UINT16, _INT32, _UINT32, _SINGLE, _DOUBLE = 1, 2, 3, 4, 5, 6, 7, 9
_INT64, _UINT64, _MATRIX, _COMPRESSED, _UTF8, _UTF16, _UTF32 = 12, 13, 14, 15, 16, 17, 18
_NUMBERS = {
    _INT8: "b", _UINT8: "B", _INT16: "h", _UINT16: "H", _INT32: "i", _UINT32: "I",
    _SINGLE: "f", _DOUBLE: "d", _INT64: "q", _UINT64: "Q",
}  # fmt: skip
_CELL, _STRUCT, _CHAR = 1, 2, 4


def validation_labels(source: str | Path) -> list[str]:
    """The WordNet id of validation image 1, 2, 3, ...

    Args:
        source: the kit's `.tar.gz`, the folder it was unpacked to, or a text file with one WordNet id per line.

    Raises:
        ConfigError: none of these, or damaged.
    """
    source = Path(source)
    try:
        if source.is_file() and source.suffix == ".txt":
            labels = source.read_text(encoding="ascii").split()
        else:
            truth, meta = _kit_files(source)
            wnids = synset_ids(meta)
            labels = [wnids[int(line)] for line in truth.split()]
    except (OSError, EOFError, tarfile.TarError, zlib.error, struct.error, KeyError, ValueError, UnicodeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"devkit={source}: cannot be read ({type(error).__name__}: {error})") from error
    bad = next((label for label in labels if not WNID.fullmatch(label)), None)
    if bad is not None or not labels:
        raise ConfigError(
            f"devkit={source}: {bad!r} is no WordNet id such as n01440764" if bad else f"{source} is empty"
        )
    return labels


def _kit_files(source: Path) -> tuple[bytes, bytes]:
    """Ground truth and meta.mat, from the archive (read in memory, never unpacked) or a folder."""
    if source.is_dir():
        folders = [folder for folder in (source, source / "ILSVRC2012_devkit_t12") if (folder / _META).is_file()]
        if not folders:
            raise ConfigError(f"devkit={source}: the folder has no {_META}")
        return (folders[0] / _GROUND_TRUTH).read_bytes(), (folders[0] / _META).read_bytes()
    with gzip.open(source) as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"devkit={source}: unpacks to more than {_MAX_BYTES >> 20} MiB; this is not the official kit")
    found: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
        for member in archive:
            for name in (_GROUND_TRUTH, _META):
                if member.isreg() and member.name.endswith("/" + name):
                    opened = archive.extractfile(member)
                    assert opened is not None
                    found[name] = opened.read()
    missing = {_GROUND_TRUTH, _META} - found.keys()
    if missing:
        raise ConfigError(
            f"devkit={source}: has no {' and no '.join(sorted(missing))}; expected ILSVRC2012_devkit_t12.tar.gz"
        )
    return found[_GROUND_TRUTH], found[_META]


def synset_ids(mat: bytes) -> dict[int, str]:
    """ILSVRC2012_ID -> WNID, of the `synsets` array in meta.mat.

    Raises:
        ValueError: not such a file.
    """
    for name, value in read_mat(mat).items():
        if name == "synsets" and isinstance(value, list):
            return {int(synset["ILSVRC2012_ID"][0]): str(synset["WNID"]) for synset in value}
    raise ValueError("meta.mat has no array 'synsets'")


def read_mat(data: bytes) -> dict[str, Any]:
    """The variables of a MATLAB 5 file: numbers as lists in column order, text as str, structs as lists of dicts.

    Raises:
        ValueError, struct.error, zlib.error: damaged, or another format.
    """
    if len(data) < 128 or data[126:128] not in (b"IM", b"MI"):
        raise ValueError("not a MATLAB 5 file")
    order = "<" if data[126:128] == b"IM" else ">"
    variables = {}
    position = 128
    while position < len(data):
        kind, content, position = _element(data, position, order)
        if kind == _COMPRESSED:
            decompressor = zlib.decompressobj()
            unpacked = decompressor.decompress(content, _MAX_BYTES)
            if decompressor.unconsumed_tail:
                raise ValueError(f"an array of more than {_MAX_BYTES >> 20} MiB")
            kind, content, _ = _element(unpacked, 0, order)
        if kind == _MATRIX:
            name, value = _matrix(content, order)
            variables[name] = value
    return variables


def _element(data: bytes, position: int, order: str) -> tuple[int, bytes, int]:
    """Type and content of the data element at `position`, and where the next one begins."""
    kind, size = struct.unpack_from(order + "II", data, position)
    if kind >> 16:  # the small form: size and type share a word, up to 4 bytes follow
        start, size, kind = position + 4, kind >> 16, kind & 0xFFFF
        end = following = position + 8
        if size > 4:
            raise ValueError("a small element of more than 4 bytes")
        return kind, data[start : start + size], following
    start = position + 8
    end = start + size
    if end > len(data):
        raise ValueError("truncated")
    following = end if kind == _COMPRESSED else end + -size % 8
    return kind, data[start:end], following


def _matrix(data: bytes, order: str) -> tuple[str, Any]:
    """Name and value of one array."""
    if not data:
        return "", []
    _, flags, position = _element(data, 0, order)
    array_class = struct.unpack_from(order + "I", flags)[0] & 0xFF
    _, sizes, position = _element(data, position, order)
    count = 1
    for size in struct.unpack(f"{order}{len(sizes) // 4}i", sizes):
        count *= size
    _, name, position = _element(data, position, order)
    if array_class == _STRUCT:
        value: Any = _struct(data, position, order, count)
    elif array_class == _CELL:
        value = []
        for _ in range(count):
            _, content, position = _element(data, position, order)
            value.append(_matrix(content, order)[1])
    else:
        kind, content, _ = _element(data, position, order)
        value = _text(kind, content, order) if array_class == _CHAR else _numbers(kind, content, order)
    return name.decode("ascii"), value


def _struct(data: bytes, position: int, order: str, count: int) -> list[dict[str, Any]]:
    _, length, position = _element(data, position, order)
    (name_bytes,) = struct.unpack(order + "i", length)
    _, names, position = _element(data, position, order)
    if name_bytes <= 0:
        raise ValueError("field names of no length")
    fields = [names[at : at + name_bytes].split(b"\0")[0].decode("ascii") for at in range(0, len(names), name_bytes)]
    rows = []
    for _ in range(count):
        row = {}
        for field in fields:
            _, content, position = _element(data, position, order)
            row[field] = _matrix(content, order)[1]
        rows.append(row)
    return rows


def _numbers(kind: int, content: bytes, order: str) -> list[float]:
    letter = _NUMBERS[kind]
    return list(struct.unpack(f"{order}{len(content) // struct.calcsize(letter)}{letter}", content))


def _text(kind: int, content: bytes, order: str) -> str:
    if kind in (_INT8, _UINT8, _UTF8):
        return content.decode("utf-8")
    ending = "le" if order == "<" else "be"
    return content.decode(f"utf-32-{ending}" if kind == _UTF32 else f"utf-16-{ending}")
