"""Unusual and broken files: the expected outcome of each, without a hang or a crash."""

import contextlib
import io
import os
import struct
import threading
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from cl_train.data.decode import MAX_PIXELS, BadImage, Encoded, read_file
from cl_train.data.loader import BadImageError
from tests.data.image_folders import (
    FLOAT_CHANNELS_LAST,
    encoded,
    folder_data,
    jpeg,
    noise,
    train_batches,
    write_folder,
)

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
ODD_SIZES = [(1, 1), (1, 500), (500, 1), (33, 500), (2, 3), (3000, 2000)]
BAD = {
    "empty": (b"", "empty"),
    "text": (b"this is no image" * 10, "neither a JPEG nor a PNG"),
    "html": (b"<html><body>404</body></html>", "neither a JPEG nor a PNG"),
    "only the magic": (b"\xff\xd8\xff", None),
    "truncated": (jpeg(200, 300)[:4000], "truncated"),
    "truncated in the header": (jpeg()[:200], None),
    "png truncated": (encoded(PICTURE, "PNG")[:900], "truncated"),
    "gif": (encoded(PICTURE, "GIF"), "neither a JPEG nor a PNG"),
    "huge png": (huge_png(), "pixels"),
    "huge jpeg": (huge_jpeg(), "pixels"),
}


@pytest.mark.parametrize("name", GOOD)
def test_unusual_images_decode(name, recwarn):
    pixels = Encoded(GOOD[name]).decode()
    assert pixels.dtype == np.uint8 and pixels.shape == (40, 60, 3)
    assert pixels.std() > 10, "the content is still there"
    assert not recwarn.list


@pytest.mark.parametrize(("height", "width"), ODD_SIZES)
def test_odd_sizes_decode_and_load(tmp_path, height, width):
    root = write_folder(tmp_path, train=2, val=2)
    for split in ("train", "val"):
        (root / split / "class_0" / "odd.jpg").write_bytes(encoded(noise(height, width)))
    data = folder_data(root, batch_size=3)
    batches = train_batches(data)
    assert batches[0][0].shape == (3, 3, 32, 32)
    assert sum(len(batch.targets) for batch in data.validation(FLOAT_CHANNELS_LAST)) == 3


def test_sixteen_bits_are_scaled_not_clipped():
    pixels = Encoded(sixteen_bit_png()).decode()
    assert pixels.min() == 0 and pixels.max() == 255
    assert abs(pixels.mean() - 127.5) < 1


def test_cmyk_has_pillows_colours():
    data = GOOD["cmyk"]
    with Image.open(io.BytesIO(data)) as image:
        assert np.array_equal(Encoded(data).decode(), np.asarray(image.convert("RGB")))


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


def make_fifo(path):
    os.mkfifo(path)


def make_dangling_link(path):
    path.symlink_to(path.parent / "nothing")


def make_unreadable_device(path):
    path.symlink_to("/dev/null")


@pytest.mark.parametrize(
    ("make", "reason"),
    [(make_fifo, "FIFO"), (make_dangling_link, "No such file"), (make_unreadable_device, "device")],
)
def test_what_is_no_file_is_refused_at_once(tmp_path, make, reason):
    root = write_folder(tmp_path, train=4, val=2)
    make(root / "train" / "class_0" / "odd.jpg")
    data = folder_data(root, batch_size=5)
    with pytest.raises(BadImageError, match=f"odd.jpg' cannot be decoded: .*{reason}"):
        train_batches(data)


def test_a_folder_with_an_images_name_is_a_folder(tmp_path):
    root = write_folder(tmp_path, train=4, val=2)
    (root / "train" / "class_0" / "folder.jpg").mkdir()
    (root / "train" / "class_0" / "folder.jpg" / "inner.jpg").write_bytes(jpeg())
    assert folder_data(root).train_images == 5


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_names_the_file_and_what_to_do(tmp_path, workers):
    root = write_folder(tmp_path, train=8, val=2)
    broken = root / "train" / "class_1" / "broken.jpg"
    broken.write_bytes(jpeg()[:300])
    data = folder_data(root, batch_size=9, workers=workers)
    with pytest.raises(BadImageError, match=r"broken\.jpg' cannot be decoded: .*on_bad_image=skip"):
        train_batches(data)
    data.close()


def test_skip_counts_and_substitutes_the_same_image_for_any_workers(tmp_path):
    root = write_folder(tmp_path, train=12, val=2)
    (root / "train" / "class_0" / "0006.jpg").write_bytes(b"broken")
    results = []
    for workers in (0, 1, 3):
        data = folder_data(root, workers=workers, on_bad_image="skip")
        results.append(train_batches(data))
        assert data.skipped_images == 1
        data.close()
    for other in results[1:]:
        for (images, targets), (other_images, other_targets) in zip(results[0], other, strict=True):
            assert torch.equal(images, other_images) and torch.equal(targets, other_targets)
    assert sorted(torch.cat([targets for _, targets in results[0]]).tolist()) == [0] * 6 + [1] * 6


def test_the_substitute_brings_its_own_label(tmp_path):
    root = write_folder(tmp_path, train=4, val=2)
    for name in ("0000.jpg", "0002.jpg"):
        (root / "train" / "class_0" / name).write_bytes(b"broken")
    data = folder_data(root, on_bad_image="skip")
    ((_, targets),) = train_batches(data)
    assert targets.tolist() == [1, 1, 1, 1]


def test_skip_stops_at_the_limit(tmp_path):
    root = write_folder(tmp_path, train=8, val=2)
    for name in ("0000.jpg", "0002.jpg", "0004.jpg"):
        (root / "train" / "class_0" / name).write_bytes(b"broken")
    data = folder_data(root, batch_size=8, on_bad_image="skip", max_bad_images=2)
    with pytest.raises(BadImageError, match=r"more than data\.max_bad_images=2"):
        train_batches(data)


@pytest.mark.parametrize("workers", [0, 2])
def test_validation_leaves_bad_images_out(tmp_path, workers):
    """A substitute would count another image twice."""
    root = write_folder(tmp_path, train=4, val=11)
    (root / "val" / "class_0" / "0004.jpg").write_bytes(b"broken")
    data = folder_data(root, workers=workers, on_bad_image="skip")
    batches = list(data.validation(FLOAT_CHANNELS_LAST))
    assert sum(len(batch.targets) for batch in batches) == 10 and data.skipped_images == 1
    assert all(len(batch.images) == len(batch.targets) for batch in batches)
    data.close()


def test_fuzzed_files_end_in_pixels_or_a_reason():
    """Bit flips, cuts and splices of small JPEGs and PNGs: 600 files, no other exception, none slower than 2 s."""
    rng = np.random.default_rng(0)
    seeds = [GOOD[name] for name in ("grey", "cmyk", "progressive", "restart markers", "png", "png palette")] + [jpeg()]
    outcomes = {"pixels": 0, "refused": 0}
    watchdog = threading.Timer(60, os._exit, (70,))
    watchdog.start()
    for number in range(600):
        data = bytearray(seeds[number % len(seeds)])
        for _ in range(int(rng.integers(1, 6))):
            data[int(rng.integers(2, len(data)))] = int(rng.integers(256))
        if number % 3 == 0:
            data = data[: int(rng.integers(3, len(data)))]
        try:
            pixels = Encoded(bytes(data)).decode()
            assert pixels.ndim == 3 and pixels.shape[2] == 3
            outcomes["pixels"] += 1
        except BadImage as bad:
            assert str(bad)
            outcomes["refused"] += 1
    watchdog.cancel()
    assert min(outcomes.values()) > 50, outcomes


def test_a_bad_image_counts_once_however_many_epochs(tmp_path):
    root = write_folder(tmp_path, train=12, val=4)
    (root / "train" / "class_0" / "0000.jpg").write_bytes(b"")
    with contextlib.closing(folder_data(root, on_bad_image="skip", max_bad_images=1)) as data:
        for epoch in range(5):
            train_batches(data, epoch)
        assert data.skipped_images >= 4
    (root / "train" / "class_0" / "0002.jpg").write_bytes(b"")
    said = r"2 images could not be decoded, more than data\.max_bad_images=1"
    data = folder_data(root, on_bad_image="skip", max_bad_images=1)
    with contextlib.closing(data), pytest.raises(BadImageError, match=said):
        for epoch in range(3):
            train_batches(data, epoch)
