"""What a run reads: fuzzed images, hostile archives, damaged shards."""

import shutil
import struct
import time

import numpy as np
import pytest

from cl_train.data.decode import BadImage, EncodedImage
from cl_train.data.prepare.archives import unpack
from cl_train.errors import ConfigError
from tests.conftest import contents
from tests.data.image_folders import encoded, noise
from tests.data.tar_shards import DAMAGE, damage_one, silent_losses
from tests.imagenet_archives import HOSTILE

MAX_SECONDS_PER_IMAGE = 2.0
PNG_MODES = ("RGB", "L", "LA", "RGBA", "P", "1")
SIZES = ((1, 1), (500, 1), (1, 500), (33, 500))
JPEGS = (
    *({"quality": q, "subsampling": s} for q in (5, 60, 95) for s in (0, 1, 2)),
    {"progressive": True},
    {"optimize": True},
    {"restart_marker_blocks": 1},
    {"exif": b"Exif\0\0II*\0\x08\0\0\0\x09\0" + b"\x31" * 30},
    {"icc_profile": b"garbage" * 400},
    {"comment": b"c" * 500},
)


def sound_files():
    """JPEGs and PNGs of the kinds that ImageNet has; the first is an ordinary one."""
    image = noise(48, 64)
    cmyk = encoded(image.convert("CMYK"))
    adobe = cmyk.index(b"Adobe") + 11
    return [
        *(encoded(image, **options) for options in JPEGS),
        *(encoded(image.convert(mode), "PNG") for mode in PNG_MODES),
        *(encoded(noise(*size)) for size in SIZES),
        encoded(image.convert("L")),
        cmyk,
        cmyk[:adobe] + b"\x02" + cmyk[adobe + 1 :],  # YCCK, as some of ImageNet's 22 are
        encoded(image) + b"<html>" * 50,
    ]


def mutate(data, rng):
    """Bit flips, markers, lengths of segments, cuts and insertions, half of them in the header."""
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        place = rng.randrange(len(result) if rng.random() < 0.5 else min(len(result), 700))
        size, other = rng.randrange(1, 400), rng.randrange(len(result))
        kind = rng.randrange(5)
        if kind == 0:
            result[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            result[place] = rng.choice((0x00, 0xFF, 0xD8, 0xD9, 0xC0, 0xC2, 0xDA, 0x80))
        elif kind == 2:
            result[place : place + 2] = struct.pack(">H", rng.choice((0, 1, 2, 0x7FFF, 0xFFFF)))
        elif kind == 3:
            result[place:place] = result[other : other + size]
        else:
            del result[place : place + rng.choice((size, len(result)))]
        if not result:
            return b"\xff"
    return bytes(result)


def test_fuzzed_images(bench):
    """Pixels, or an error with a reason, in bounded time; the loader: tests/data/test_loader.py."""
    files = sound_files()
    for data in files:
        assert EncodedImage(data).decode().shape[2:] == (3,)
    for number in range(bench.count(300, 50_000)):
        data, reason = mutate(files[number % len(files)], bench.random), "none"
        with bench.attempt():
            started = time.thread_time()  # CPU time: other processes do not make an image slow
            try:
                pixels = EncodedImage(data).decode()
                assert pixels.dtype == np.uint8 and pixels.shape[2:] == (3,), data
            except BadImage as error:
                reason = str(error)
            seconds = time.thread_time() - started
            assert reason and seconds <= MAX_SECONDS_PER_IMAGE, f"{data}: {seconds:.1f} s: {reason}"


def test_hostile_archives(bench):
    """A hostile archive is refused by name, and nothing is left behind but what a preparation
    marks its folder with.
    """
    folder = bench.new_folder()
    for number, (name, content) in enumerate(HOSTILE.items()):
        sandbox = folder / f"{number}/a/b"
        sandbox.mkdir(parents=True)
        (sandbox / "train.tar").write_bytes(content)
        before, own = contents(folder), f"{number}/a/b/out"
        marks = {own, f"{own}/.settings.json", f"{own}/.settings.lock"}
        with bench.attempt():
            with pytest.raises(ConfigError, match=r"train\.tar"):
                unpack(sandbox / "out", train=sandbox / "train.tar")
                pytest.fail(f"{name}: accepted")
            after = {path: data for path, data in contents(folder).items() if path not in marks}
            assert after == before, f"{name}: left or touched something"


def test_damaged_shards(bench):
    """One tar shard is damaged: an error, or bad images by name; no other sample changes."""
    for number in range(bench.count(40, 1000)):
        root, kind = bench.new_folder(), list(DAMAGE)[number % len(DAMAGE)]
        damage_one(root, kind, bench.random)
        with bench.attempt():
            losses = list(silent_losses(root))
            assert not losses, f"{kind}: {losses}"
        shutil.rmtree(root)
