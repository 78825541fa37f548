"""From the bytes of a file to pixels, uint8 [height, width, 3], RGB.

simplejpeg (libjpeg-turbo) decodes ordinary JPEGs. What it refuses or warns about goes to Pillow, which therefore
decides what is a bad image: CMYK and YCCK, PNGs named .JPEG, stray bytes between markers. EXIF orientation is ignored,
as torchvision, TensorFlow and the published accuracies do.
"""

from __future__ import annotations

import io
import os
import stat
import warnings
from pathlib import Path

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image

Pixels = npt.NDArray[np.uint8]

MAX_PIXELS = 100_000_000  # ten times the largest image of ImageNet; 300 MB decoded
MAX_FILE_BYTES = 256 * 2**20
JPEG_MAGIC = b"\xff\xd8\xff"
_FORMATS = ("JPEG", "PNG")  # the only parsers that Pillow may try: fewer parsers, fewer vulnerabilities
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFDIR: "a directory", stat.S_IFCHR: "a device", stat.S_IFSOCK: "a socket"}


class BadImage(Exception):
    """A file that holds no image we can decode. The message is the reason, without the file's name."""


def read_file(path: str | bytes | Path) -> bytes:
    """The whole file. Raises BadImage for what is no regular file, is empty, too large, or cannot be read.

    Non-blocking, because opening a FIFO that nobody writes to would wait for ever.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise BadImage(error.strerror or str(error)) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise BadImage(f"not a regular file but {_KINDS.get(stat.S_IFMT(status.st_mode), 'something else')}")
        if status.st_size == 0:
            raise BadImage("the file is empty")
        if status.st_size > MAX_FILE_BYTES:
            raise BadImage(f"{status.st_size} bytes, more than the limit of {MAX_FILE_BYTES}")
        data = os.read(descriptor, status.st_size)
        while len(data) < status.st_size:
            more = os.read(descriptor, status.st_size - len(data))
            if not more:
                raise BadImage(f"only {len(data)} of {status.st_size} bytes could be read")
            data += more
        return data
    except OSError as error:
        raise BadImage(error.strerror or str(error)) from None
    finally:
        os.close(descriptor)


class Encoded:
    """An image whose size is known and whose pixels are not decoded yet, so that the crop is known before decoding."""

    def __init__(self, data: bytes, *, simple: bool = True) -> None:
        """`simple`: try simplejpeg first. Raises BadImage where not even the header can be read."""
        self._data = data
        self._image: Image.Image | None = None
        if simple and data.startswith(JPEG_MAGIC):
            try:
                self.height, self.width, colours, _ = simplejpeg.decode_jpeg_header(data, strict=True)
                simple = colours not in ("CMYK", "YCCK")
            except ValueError:
                simple = False
        else:
            simple = False
        if not simple:
            self._open_with_pillow()
        if not 0 < self.height * self.width <= MAX_PIXELS:
            raise BadImage(f"{self.width} x {self.height} pixels, more than the limit of {MAX_PIXELS}")

    @property
    def simple(self) -> bool:
        """Whether simplejpeg reads this file, as far as is known yet."""
        return self._image is None

    def _open_with_pillow(self) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._image = Image.open(io.BytesIO(self._data), formats=_FORMATS)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise BadImage(_reason(error)) from None
        self.width, self.height = self._image.size

    def decode(self, factor: int = 1, scratch: Pixels | None = None) -> Pixels:
        """The pixels, uint8 [h, w, 3], h and w at least the size / `factor` (1, 2, 4 or 8; only JPEGs shrink).

        `scratch`: a flat buffer that may hold the result, valid until the next call with it. Raises BadImage.
        """
        if self._image is None:
            try:
                return self._decode_jpeg(factor, scratch)
            except ValueError:  # strict: also what libjpeg only warns about; Pillow then decides
                self._open_with_pillow()
        assert self._image is not None
        return _decode_with_pillow(self._image, factor)

    def _decode_jpeg(self, factor: int, scratch: Pixels | None) -> Pixels:
        least = (-(-self.height // factor), -(-self.width // factor)) if factor > 1 else (0, 0)
        need = self.height * self.width * 3
        buffer = scratch[:need] if scratch is not None and scratch.size >= need else None
        pixels: Pixels = simplejpeg.decode_jpeg(
            self._data, "RGB", min_height=least[0], min_width=least[1], min_factor=factor, buffer=buffer, strict=True
        )
        return pixels


def _decode_with_pillow(image: Image.Image, factor: int) -> Pixels:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "(Possibly) corrupt EXIF data" and the like: the pixels are fine
            if factor > 1:
                image.draft(None, (image.width // factor, image.height // factor))
            if image.mode.startswith("I"):  # 16-bit grey: convert("RGB") would clip at 255, not scale
                grey = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
                return np.repeat(grey[:, :, None], 3, axis=2)
            return np.array(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError, MemoryError, Image.DecompressionBombError) as error:
        raise BadImage(_reason(error)) from None


def _reason(error: BaseException) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return "neither a JPEG nor a PNG" if "cannot identify image file" in text else text
