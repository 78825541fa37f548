"""From an encoded image to its pixels. Imports no torch.

simplejpeg (libjpeg-turbo) decodes ordinary JPEGs. Files that it refuses or warns about (CMYK and
YCCK, PNGs named .JPEG, stray bytes between markers) are decoded by Pillow, which therefore
determines which images are bad.
"""

import contextlib
import io
import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image

Pixels = npt.NDArray[np.uint8]
Result = TypeVar("Result")

_APP1, _SCAN = b"\xe1", b"\xda"  # markers of a JPEG
JPEG_MAGIC, PNG_MAGIC = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
MAX_PIXELS = 100_000_000  # ten times the largest image of ImageNet; 300 MB decoded
MAX_FILE_BYTES = 256 * 2**20
ORIENTATION = 0x0112  # EXIF: 1 is upright, 2 to 8 are turned or mirrored
_TRANSPOSED = 5  # from this orientation on height and width are exchanged
_LEAST_WHITE = 4096  # a 16-bit image with no value above it has 12 bits, and would be black
_DEFAULT_FORMATS = ("JPEG", "PNG")  # for Pillow: fewer parsers, fewer vulnerabilities


class BadImage(Exception):
    """A sample cannot be used. The message is the reason, without the file's name."""


def read_file(path: str | bytes | Path, first: int = -1) -> bytes:
    """Returns a file, or its `first` bytes. Raises BadImage: it is empty, too large, unreadable."""
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_FILE_BYTES:
                raise BadImage(f"{size} bytes, more than the limit of {MAX_FILE_BYTES}")
            data = file.read(first)
    except OSError as error:
        raise BadImage(error.strerror or str(error)) from None
    if not data:
        raise BadImage("the file is empty")
    return data


class EncodedImage:
    """An image of `height` x `width`. `size` is that of what `decode` returns unless Pillow turns
    it. `needs_pillow`: simplejpeg is known not to decode it.
    """

    def __init__(
        self,
        data: bytes,
        decoder: str = "simplejpeg",
        formats: tuple[str, ...] = _DEFAULT_FORMATS,
        *,
        upright: bool = False,
    ) -> None:
        """`decoder` is simplejpeg, or pillow for all; `formats` are Pillow's names. With `upright`,
        `decode` turns the pixels as EXIF says. Raises BadImage.
        """
        self._data, self._formats, self._upright, self._turn = data, formats, upright, 1
        self.needs_pillow = not data.startswith(JPEG_MAGIC) or decoder != "simplejpeg"
        if not self.needs_pillow:
            try:
                header = simplejpeg.decode_jpeg_header(data, strict=True)
                self.height, self.width, colours, _ = header
                self.needs_pillow = colours in ("CMYK", "YCCK")
            except Exception:  # not only ValueError: a wrong sampling factor is a KeyError
                self.needs_pillow = True
        if self.needs_pillow:
            self.width, self.height = self._with_pillow(lambda image: image.size)
        elif upright:
            self._turn = self._exif_orientation()
        size = self.height, self.width
        self.size = size if self._turn < _TRANSPOSED else size[::-1]
        if not 0 < self.height * self.width <= MAX_PIXELS:
            raise BadImage(
                f"{self.width} x {self.height} pixels, more than the limit of {MAX_PIXELS}"
            )

    def decode(self, scratch: Pixels | None = None, reduction: int = 1) -> Pixels:
        """Returns the pixels, uint8 [height, width, 3], of any strides, perhaps in the buffer
        `scratch`. simplejpeg divides the sides by `reduction` (1, 2, 4 or 8), which takes less
        time. Raises BadImage.
        """
        if not self.needs_pillow:
            height, width = (-(-side // reduction) for side in (self.height, self.width))
            size = height * width * 3
            buffer = scratch[:size] if scratch is not None and scratch.size >= size else None
            # strict: libjpeg's warnings are errors too; then Pillow decodes
            least = {"min_height": height, "min_width": width}
            with contextlib.suppress(Exception):
                decode = simplejpeg.decode_jpeg
                pixels: Pixels = decode(self._data, "RGB", buffer=buffer, strict=True, **least)
                return turned(pixels, self._turn)
            self.needs_pillow = True
        return self._with_pillow(partial(rgb, upright=self._upright))

    def _exif_orientation(self) -> int:
        """Returns the orientation in EXIF, 1 to 8. A JPEG without its segment (APP1) costs 2 us."""
        if self._data.startswith(JPEG_MAGIC) and not _has_app1(self._data):
            return 1
        with contextlib.suppress(BadImage):
            return self._with_pillow(_orientation)
        return 1

    def _with_pillow(self, use: Callable[[Image.Image], Result]) -> Result:
        """Returns `use(image)`, without Pillow's warnings about corrupt EXIF. Raises BadImage."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return use(Image.open(io.BytesIO(self._data), formats=self._formats))
        except Exception as error:  # corrupt files raise many exception types
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            if "cannot identify image file" in reason:
                reason = f"not a {' or '.join(self._formats)} file"
            raise BadImage(reason) from None


def _has_app1(data: bytes) -> bool:
    start = 2
    while data[start : start + 1] == b"\xff" and data[start + 1 : start + 2] != _SCAN:
        if data[start + 1 : start + 2] == _APP1:
            return True
        start += 2 + int.from_bytes(data[start + 2 : start + 4])
    return False


def turned(pixels: Pixels, orientation: int) -> Pixels:
    """Returns a view of `pixels` that is upright."""
    rows = -1 if orientation in (3, 4, 6, 7) else 1
    columns = -1 if orientation in (2, 3, 7, 8) else 1
    view = pixels[::rows, ::columns]
    return view.swapaxes(0, 1) if orientation >= _TRANSPOSED else view


def rgb(image: Image.Image, *, upright: bool) -> Pixels:
    """Returns the first frame, uint8 [H, W, 3], on white where it is transparent. Raises BadImage:
    its white level is not known.
    """
    image.load()  # this turns a TIFF, and removes its orientation
    if image.mode in ("I", "F"):
        raise BadImage(f"32 bits per pixel (mode {image.mode}) without a white level: use 8 or 16")
    if image.mode.startswith("I"):  # 16-bit grey: convert("RGB") would clip at 255, not scale
        grey = np.asarray(image)
        if grey.max() < _LEAST_WHITE:
            raise BadImage(f"16 bits per pixel, and none above {grey.max()}: scale them to 65535")
        pixels = np.repeat((grey >> 8).astype(np.uint8)[:, :, None], 3, axis=2)
    elif image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        pixels = np.array(Image.alpha_composite(white, image.convert("RGBA")).convert("RGB"))
    else:
        pixels = np.array(image.convert("RGB"))
    return turned(pixels, _orientation(image)) if upright else pixels


def _orientation(image: Image.Image) -> int:
    with contextlib.suppress(Exception):  # EXIF may be unreadable
        orientation = int(image.getexif().get(ORIENTATION, 1))
        return orientation if orientation in range(2, 9) else 1
    return 1
