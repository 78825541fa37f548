"""Unusual and damaged files end in pixels or in a reason, quickly, without another exception."""

import faulthandler
import io
import struct
import time
import zlib

import numpy as np
import pytest
from PIL import Image

from cl_train.data.decode import MAX_PIXELS, BadImage, Encoded, formats_of, read_file
from tests.data.image_folders import encoded, jpeg, noise
from tests.processes import LIMIT_S

PICTURE = noise(40, 60)


def huge_png() -> bytes:
    """A PNG header that promises a billion pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 40_000, 30_000, 8, 2, 0, 0, 0)
    end = struct.pack(">I", 0) + b"IEND" + struct.pack(">I", zlib.crc32(b"IEND"))
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header)) + end


def huge_jpeg() -> bytes:
    """A small JPEG whose header promises 60,000 x 60,000 pixels."""
    data = bytearray(jpeg())
    start = data.index(b"\xff\xc0")
    data[start + 5 : start + 9] = struct.pack(">HH", 60_000, 60_000)
    return bytes(data)


def sixteen_bit_png() -> bytes:
    ramp = (np.arange(40 * 60, dtype=np.uint32) * 65535 // (40 * 60 - 1)).astype(np.uint16).reshape(40, 60)
    return encoded(Image.fromarray(ramp), "PNG")


GOOD = {
    "grey": encoded(PICTURE.convert("L")),
    "cmyk": encoded(PICTURE.convert("CMYK")),
    "progressive": encoded(PICTURE, progressive=True),
    "4:4:4": encoded(PICTURE, subsampling=0),
    "4:1:1": encoded(PICTURE, subsampling="4:1:1"),
    "quality 3": encoded(PICTURE, quality=3),
    "restart markers": encoded(PICTURE, restart_marker_blocks=2),
    "trailing bytes": jpeg(40, 60) + b"some camera's notes" * 100,
    "png": encoded(PICTURE, "PNG"),
    "png palette": encoded(PICTURE.convert("P"), "PNG"),
    "png palette, transparent": encoded(PICTURE.convert("P"), "PNG", transparency=b"\x80" * 256),
    "png alpha": encoded(PICTURE.convert("LA"), "PNG"),
    "png one bit": encoded(PICTURE.convert("1"), "PNG"),
    "png 16 bit": sixteen_bit_png(),
    "corrupt exif": encoded(PICTURE, exif=b"Exif\x00\x00II*\x00\x08\x00\x00\x00\xff\x00garbage"),
}
BAD = {
    "empty": (b"", "empty"),
    "text": (b"this is no image" * 10, "not a JPEG or PNG"),
    "html": (b"<html><body>404</body></html>", "not a JPEG or PNG"),
    "only the magic": (b"\xff\xd8\xff", None),
    "truncated": (jpeg(200, 300)[:4000], "truncated"),
    "truncated in the header": (jpeg()[:200], None),
    "png truncated": (encoded(PICTURE, "PNG")[:900], "truncated"),
    "gif": (encoded(PICTURE, "GIF"), "not a JPEG or PNG"),
    "huge png": (huge_png(), "pixels"),
    "huge jpeg": (huge_jpeg(), "pixels"),
}


@pytest.mark.parametrize("name", GOOD)
def test_unusual_images_decode(name, recwarn):
    pixels = Encoded(GOOD[name]).decode()
    assert pixels.dtype == np.uint8 and pixels.shape == (40, 60, 3)
    assert pixels.std() > 10, "the content is still there"
    assert not recwarn.list
    if name == "png 16 bit":  # scaled, not clipped
        assert pixels.min() == 0 and pixels.max() == 255 and abs(pixels.mean() - 127.5) < 1
    elif name == "cmyk":
        assert np.array_equal(pixels, np.asarray(Image.open(io.BytesIO(GOOD[name])).convert("RGB")))


@pytest.mark.parametrize("name", BAD)
def test_broken_images_are_refused_with_a_reason(tmp_path, name):
    content, reason = BAD[name]
    path = tmp_path / "broken.jpg"
    path.write_bytes(content)
    with pytest.raises(BadImage, match=reason):
        Encoded(read_file(path)).decode()


def test_the_limit_of_pixels_is_the_one_that_is_checked(monkeypatch):
    monkeypatch.setattr("cl_train.data.decode.MAX_PIXELS", 40 * 60)
    Encoded(encoded(PICTURE))
    monkeypatch.setattr("cl_train.data.decode.MAX_PIXELS", 40 * 60 - 1)
    with pytest.raises(BadImage, match="60 x 40 pixels"):
        Encoded(encoded(PICTURE))
    assert MAX_PIXELS < 2**31 / 3, "the sizes of decoded images fit in 31 bits"


def test_fuzzed_files_end_in_pixels_or_a_reason():
    """Bit flips, cuts and splices of small JPEGs and PNGs: 600 files, no other exception, at most 2 s of CPU time."""
    rng = np.random.default_rng(0)
    seeds = [GOOD[name] for name in ("grey", "cmyk", "progressive", "restart markers", "png", "png palette")] + [jpeg()]
    outcomes = {"pixels": 0, "refused": 0}
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    for number in range(600):
        data = bytearray(seeds[number % len(seeds)])
        for _ in range(int(rng.integers(1, 6))):
            data[int(rng.integers(2, len(data)))] = int(rng.integers(256))
        if number % 3 == 0:
            data = data[: int(rng.integers(3, len(data)))]
        started = time.thread_time()
        try:
            pixels = Encoded(bytes(data)).decode()
            assert pixels.ndim == 3 and pixels.shape[2] == 3
            outcomes["pixels"] += 1
        except BadImage as bad:
            assert str(bad)
            outcomes["refused"] += 1
        assert time.thread_time() - started < 2
    faulthandler.cancel_dump_traceback_later()
    assert min(outcomes.values()) > 50, outcomes


def test_exif_orientation_is_ignored():
    turned = Image.Exif()
    turned[0x0112] = 6
    plain, rotated = encoded(noise(30, 40)), encoded(noise(30, 40), exif=turned)
    assert Encoded(rotated).decode().shape == (30, 40, 3)
    assert np.array_equal(Encoded(plain).decode(), Encoded(rotated).decode())


def test_every_exception_of_a_decoder_is_a_bad_image(monkeypatch):
    """A wrong sampling factor is a KeyError in simplejpeg."""
    data = bytearray(jpeg())
    data[data.index(b"\xff\xc0") + 11] = 0x14
    assert Encoded(bytes(data)).needs_pillow
    monkeypatch.setattr("cl_train.data.decode._rgb", lambda image: {}["missing"])
    with pytest.raises(BadImage, match="missing"):
        Encoded(GOOD["png"]).decode()


def test_other_formats_are_read_only_if_they_are_asked_for():
    for kind in ("WEBP", "BMP", "TIFF"):
        data = encoded(PICTURE, kind)
        assert Encoded(data, formats=("JPEG", kind)).decode().shape == (40, 60, 3)
        with pytest.raises(BadImage, match="JPEG or PNG"):
            Encoded(data)
    assert formats_of([".jpg", ".JPEG", ".tif"]) == ("JPEG", "TIFF")
    for wrong in ([], [".gif"], ["jpg"]):
        with pytest.raises(ValueError, match=r"data\.extensions"):
            formats_of(wrong)
