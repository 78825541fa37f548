"""From the bytes of a file to pixels, uint8 [height, width, 3], RGB.

simplejpeg (libjpeg-turbo) decodes ordinary JPEGs. Files that it refuses or warns about (CMYK and YCCK, PNGs named
.JPEG, stray bytes between markers) are decoded by Pillow, which therefore determines which images are bad. EXIF
orientation is ignored, as in torchvision, TensorFlow and the published accuracies.
"""

import io
import os
import stat
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image

from cl_train.config.schema import ConfigError

Pixels = npt.NDArray[np.uint8]

MAX_PIXELS = 100_000_000  # ten times the largest image of ImageNet; 300 MB decoded
MAX_FILE_BYTES = 256 * 2**20
MAX_SCANS = 1_000  # of a progressive JPEG; encoders write about ten
MAX_SCANNED_PIXELS = 2_000_000_000  # scans x pixels: each scan passes over the whole image, also an empty one
JPEG_MAGIC, PNG_MAGIC = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
FORMATS = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".webp": "WEBP"}
FORMATS |= {".bmp": "BMP", ".tif": "TIFF", ".tiff": "TIFF"}
_DEFAULT_FORMATS = ("JPEG", "PNG")  # the formats that Pillow may parse: fewer parsers, fewer vulnerabilities
_START_OF_SCAN = b"\xff\xda"
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device"}


class BadImage(Exception):
    """A sample cannot be decoded. The message is the reason, without the file's name."""


def formats_of(extensions: Sequence[str]) -> tuple[str, ...]:
    """Pillow's names of the formats with these extensions. Raises ConfigError for unknown ones."""
    if not extensions or any(extension.lower() not in FORMATS for extension in extensions):
        raise ConfigError(f"data.extensions={list(extensions)}: use some of {', '.join(FORMATS)}")
    return tuple(dict.fromkeys(FORMATS[extension.lower()] for extension in extensions))


def read_file(path: str | bytes | Path, first: int = -1) -> bytes:
    """The whole file, or its `first` bytes.

    Raises BadImage unless it is a regular file that is readable, not empty and not too large. It is opened without
    blocking, because opening a FIFO without a writer would block forever.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise BadImage(f"not a regular file but {_KINDS.get(stat.S_IFMT(status.st_mode), 'something else')}")
            if status.st_size == 0:
                raise BadImage("the file is empty")
            if status.st_size > MAX_FILE_BYTES:
                raise BadImage(f"{status.st_size} bytes, more than the limit of {MAX_FILE_BYTES}")
            return file.read(first)
    except OSError as error:
        raise BadImage(error.strerror or str(error)) from None


class Encoded:
    """An image whose header has been read and checked; its pixels are not decoded yet.

    Attributes:
        height, width: pixels.
        needs_pillow: simplejpeg is known not to decode this file.
    """

    def __init__(self, data: bytes, decoder: str = "simplejpeg", formats: tuple[str, ...] = _DEFAULT_FORMATS) -> None:
        """Raises BadImage if the header cannot be read or the image is too large.

        Args:
            decoder: simplejpeg, or pillow for all files.
            formats: Pillow's names of the formats that are accepted.
        """
        self._data, self._formats = data, formats
        self._image: Image.Image | None = None
        is_jpeg = data.startswith(JPEG_MAGIC)
        if not (is_jpeg and decoder == "simplejpeg" and self._read_jpeg_header()):
            self._open_with_pillow()
        pixels = self.height * self.width
        if not 0 < pixels <= MAX_PIXELS:
            raise BadImage(f"{self.width} x {self.height} pixels, more than the limit of {MAX_PIXELS}")
        scans = _scans(data) if is_jpeg else 1
        if scans > MAX_SCANS or scans * pixels > MAX_SCANNED_PIXELS:
            raise BadImage(f"a JPEG of {scans} scans would take too long to decode")

    @property
    def needs_pillow(self) -> bool:
        return self._image is not None

    def _read_jpeg_header(self) -> bool:
        try:
            self.height, self.width, colours, _ = simplejpeg.decode_jpeg_header(self._data, strict=True)
        except Exception:  # not only ValueError: a wrong sampling factor is a KeyError; then Pillow decodes
            return False
        return colours not in ("CMYK", "YCCK")

    def _open_with_pillow(self) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._image = Image.open(io.BytesIO(self._data), formats=self._formats)
        except Exception as error:  # corrupt files raise many exception types
            raise BadImage(self._reason(error)) from None
        self.width, self.height = self._image.size

    def decode(self, scratch: Pixels | None = None) -> Pixels:
        """The pixels, uint8 [height, width, 3]. Raises BadImage.

        `scratch`: a flat buffer that may hold the result, which is then valid until the next call with it.
        """
        if self._image is None:
            size = self.height * self.width * 3
            buffer = scratch[:size] if scratch is not None and scratch.size >= size else None
            try:
                pixels: Pixels = simplejpeg.decode_jpeg(self._data, "RGB", buffer=buffer, strict=True)
                return pixels
            except Exception:  # strict: libjpeg's warnings are errors too; then Pillow decodes
                self._open_with_pillow()
        assert self._image is not None
        try:
            return _decode_with_pillow(self._image)
        except Exception as error:
            raise BadImage(self._reason(error)) from None

    def _reason(self, error: Exception) -> str:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"not a {' or '.join(self._formats)} file" if "cannot identify image file" in text else text


def _scans(data: bytes) -> int:
    """Number of scans of a JPEG; counted only if there may be several, because counting takes 10 % of decoding."""
    position, frame, components = 2, 0, 0
    while position + 9 < len(data) and data[position] == 0xFF:
        marker = data[position + 1]
        if marker == 0xFF:  # a fill byte
            position += 1
            continue
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            frame, components = marker, data[position + 9]
        elif marker == 0xDA:
            if frame in (0xC0, 0xC1) and data[position + 4] == components:
                return 1  # baseline with all components in its first scan: libjpeg refuses a second one
            break
        position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    return data.count(_START_OF_SCAN)


def _decode_with_pillow(image: Image.Image) -> Pixels:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "(Possibly) corrupt EXIF data" and the like: the pixels are fine
        if image.mode.startswith("I"):  # 16-bit grey: convert("RGB") would clip at 255, not scale
            grey = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
            return np.repeat(grey[:, :, None], 3, axis=2)
        return np.array(image.convert("RGB"))
