"""Untrusted, uncompressed tar archives: damage is an error, and no header can make a read exceed an image's size.

`tarfile` treats a damaged or missing header as the end of the archive and does not validate sizes in headers.
"""

import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from cl_train.config.schema import ConfigError

MAX_MEMBER_BYTES = 64 * 2**20  # the largest image of ImageNet has 16 MB
_FOLDER_NAME = re.compile(r"(?!.*\.\.)[\w./-]*")


class _BoundedFile:
    def __init__(self, file: IO[bytes], what: str) -> None:
        self._file, self._what = file, what
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MAX_MEMBER_BYTES:
            raise ConfigError(f"{self._what}: a header asks for {size} bytes; damaged, or not an archive of images")
        return self._file.read(size)


@contextmanager
def open_tar(source: Path | IO[bytes], what: str) -> Iterator[tarfile.TarFile]:
    """A tar file, or a tar within a tar, for `regular_files` and `read_member`. `what` names it in messages.

    Raises ConfigError if it cannot be opened, or is not a tar archive.
    """
    try:
        file = source.open("rb") if isinstance(source, Path) else source
    except OSError as error:
        raise ConfigError(f"{what}: {error.strerror}") from None
    with file:
        try:
            archive = tarfile.TarFile(fileobj=cast(IO[bytes], _BoundedFile(file, what)))
        except (tarfile.TarError, OSError) as error:
            raise ConfigError(f"{what}: not a tar archive, or damaged ({error})") from None
        with archive:
            yield archive


def regular_files(archive: tarfile.TarFile, what: str) -> Iterator[tarfile.TarInfo]:
    """The archive's regular files in their order. Folders are skipped.

    Raises ConfigError for links and devices, a damaged or missing header, or a missing end mark.
    """
    file: Any = archive.fileobj
    try:
        for member in archive:
            if member.size < 0:  # tarfile would seek backwards forever (CVE-2025-8194)
                raise ConfigError(f"{what}: {member.name[:200]!r} has {member.size} bytes; damaged")
            if member.isdir() and _FOLDER_NAME.fullmatch(member.name):
                continue
            if not member.isreg() or member.issparse():
                raise ConfigError(f"{what}: {member.name[:200]!r} is not a regular file")
            yield member
        file.seek(archive.offset)
        end = file.read(tarfile.BLOCKSIZE)
    except ConfigError:
        raise
    except (tarfile.TarError, OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"{what}: damaged or truncated at byte {archive.offset} ({error})") from error
    if end != bytes(tarfile.BLOCKSIZE):
        raise ConfigError(f"{what}: damaged or truncated at byte {archive.offset}: no header and no end mark")


def read_member(archive: tarfile.TarFile, member: tarfile.TarInfo, what: str) -> bytes:
    """The content of a member. Raises ConfigError unless it has 1 to MAX_MEMBER_BYTES bytes, all in the archive."""
    if not 0 < member.size <= MAX_MEMBER_BYTES:
        raise ConfigError(f"{what}: {member.name} has {member.size} bytes; expected 1 to {MAX_MEMBER_BYTES}")
    source = archive.extractfile(member)
    assert source is not None
    try:
        content = source.read()
    except (tarfile.TarError, OSError) as error:
        raise ConfigError(f"{what}: damaged at {member.name} ({error})") from error
    if len(content) != member.size:
        raise ConfigError(f"{what}: truncated at {member.name}")
    return content
