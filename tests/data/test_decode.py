"""Pixels of unusual files, and reasons against damaged ones; tests/faults/input_faults.py has more, and fuzzed ones."""

import contextlib
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from cl_train.data.images import MAX_PIXELS, BadImage, Encoded, read_file
from tests.data.image_folders import encoded, jpeg, noise

PICTURE = noise(40, 60)
RAMP = (np.arange(40 * 60, dtype=np.uint32) * 65535 // (40 * 60 - 1)).astype(np.uint16).reshape(40, 60)


def huge_png() -> bytes:
    """A PNG header that promises a billion pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 40_000, 30_000, 8, 2, 0, 0, 0)
    end = struct.pack(">I", 0) + b"IEND" + struct.pack(">I", zlib.crc32(b"IEND"))
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header)) + end


TURNED = Image.Exif()
TURNED[0x0112] = 6  # which is ignored
GOOD = {
    **{f"JPEG {mode}": encoded(PICTURE.convert(mode)) for mode in ("L", "CMYK")},
    **{f"PNG {mode}": encoded(PICTURE.convert(mode), "PNG") for mode in ("P", "LA", "1")},
    "progressive": encoded(PICTURE, progressive=True),
    "4:1:1": encoded(PICTURE, subsampling="4:1:1"),
    "restart markers": encoded(PICTURE, restart_marker_blocks=2),
    "trailing bytes": jpeg(40, 60) + b"some camera's notes" * 100,
    "PNG palette, transparent": encoded(PICTURE.convert("P"), "PNG", transparency=b"\x80" * 256),
    "PNG 16 bit": encoded(Image.fromarray(RAMP), "PNG"),
    "turned by exif": encoded(PICTURE, exif=TURNED),
    "corrupt exif": encoded(PICTURE, exif=b"Exif\x00\x00II*\x00\x08\x00\x00\x00\xff\x00garbage"),
}
BAD = {
    "empty": (b"", "empty"),
    "only the magic": (b"\xff\xd8\xff", None),
    "truncated in the header": (jpeg()[:200], None),
    "png truncated": (encoded(PICTURE, "PNG")[:900], "truncated"),
    "gif": (encoded(PICTURE, "GIF"), "not a JPEG or PNG"),
    "huge png": (huge_png(), "pixels"),
}


@pytest.mark.parametrize("name", GOOD)
def test_unusual_images_decode(name, recwarn):
    pixels = Encoded(GOOD[name]).decode()
    assert pixels.dtype == np.uint8 and pixels.shape == Encoded(GOOD[name], "pillow").decode().shape == (40, 60, 3)
    assert pixels.std() > 10, "the content is still there"
    assert not recwarn.list
    if name == "PNG 16 bit":  # scaled, not clipped
        assert pixels.min() == 0 and pixels.max() == 255 and abs(pixels.mean() - 127.5) < 1
    elif name == "JPEG CMYK":
        assert np.array_equal(pixels, np.asarray(Image.open(io.BytesIO(GOOD[name])).convert("RGB")))


@pytest.mark.parametrize("name", BAD)
def test_broken_images_are_refused_with_a_reason(tmp_path, name):
    content, reason = BAD[name]
    (tmp_path / "broken.jpg").write_bytes(content)
    with pytest.raises(BadImage, match=reason):
        Encoded(read_file(tmp_path / "broken.jpg")).decode()


@pytest.mark.parametrize(("limit", "reason"), [(40 * 60, None), (40 * 60 - 1, "60 x 40 pixels")])
def test_the_limit_of_pixels_is_the_one_that_is_checked(monkeypatch, limit, reason):
    monkeypatch.setattr("cl_train.data.images.MAX_PIXELS", limit)
    with pytest.raises(BadImage, match=reason) if reason else contextlib.nullcontext():
        Encoded(encoded(PICTURE))
    assert MAX_PIXELS < 2**31 / 3, "the sizes of decoded images fit in 31 bits"


def test_every_exception_of_a_decoder_is_a_bad_image(monkeypatch):
    """A wrong sampling factor is a KeyError in simplejpeg."""
    data = bytearray(jpeg())
    data[data.index(b"\xff\xc0") + 11] = 0x14
    assert Encoded(bytes(data)).needs_pillow
    monkeypatch.setattr("cl_train.data.images._rgb", lambda image: {}["missing"])
    with pytest.raises(BadImage, match="missing"):
        Encoded(GOOD["PNG P"]).decode()


def test_other_formats_are_read_only_if_they_are_asked_for():
    for kind in ("WEBP", "BMP", "TIFF"):
        data = encoded(PICTURE, kind)
        assert Encoded(data, formats=("JPEG", kind)).decode().shape == (40, 60, 3)
        with pytest.raises(BadImage, match="JPEG or PNG"):
            Encoded(data)
