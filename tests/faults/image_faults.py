"""Fuzzed images through the loader, and ImageNet's odd files one by one."""

import io
import logging
import os
import random
import shutil
import struct
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from bench import Bench
from outcome import Outcome
from PIL import Image

from cl_train.config.schema import AugmentConfig, DataConfig
from cl_train.data.build import build_data
from cl_train.data.decode import BadImage, Encoded, read_file
from cl_train.data.device import DeviceFormat
from cl_train.system.distributed import Dist

CPU = torch.device("cpu")
ALONE = Dist(0, 1, CPU)
MAX_SECONDS_PER_IMAGE = 2.0
MAX_MEMORY_MIB = 1024


def pixels(width: int, height: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    smooth = np.add.outer(np.arange(height), np.arange(width))[:, :, None] * np.array([1, 2, 3, 1])[:channels]
    noise = np.random.default_rng(seed).integers(0, 40, (height, width, channels))
    return ((smooth + noise) % 256).astype(np.uint8)


def encoded(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def seed_files() -> list[bytes]:
    """JPEGs and PNGs of the kinds that ImageNet has: sampling, progressive, restart markers, EXIF, CMYK, palette."""
    rgb = Image.fromarray(pixels(120, 90))
    files = [encoded(rgb, quality=quality, subsampling=sampling) for quality in (8, 60, 95) for sampling in (0, 1, 2)]
    files += [encoded(rgb, progressive=True), encoded(rgb, optimize=True), encoded(rgb, restart_marker_blocks=2)]
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "rotated"
    files += [encoded(rgb, exif=exif), encoded(rgb, icc_profile=b"x" * 3000), encoded(rgb, comment=b"c" * 500)]
    files += [encoded(rgb.convert(mode)) for mode in ("L", "CMYK")]
    files += [encoded(rgb.convert(mode), "PNG") for mode in ("RGB", "L", "LA", "RGBA", "P", "1")]
    files += [encoded(Image.fromarray(pixels(w, h))) for w, h in ((1, 1), (500, 1), (1, 500), (33, 500))]
    return files


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Bit flips, cuts, splices, edits of the header and of the marker segments' lengths."""
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        place = rng.randrange(len(result)) if rng.random() < 0.5 else rng.randrange(min(len(result), 700))
        kind = rng.random()
        if kind < 0.45:
            result[place] ^= 1 << rng.randrange(8)
        elif kind < 0.6:
            result[place] = rng.choice((0x00, 0xFF, 0xD8, 0xD9, 0xC0, 0xC2, 0xDA, 0x80))
        elif kind < 0.75:
            result[place : place + 2] = struct.pack(">H", rng.choice((0, 1, 2, 0x7FFF, 0xFFFF)))
        elif kind < 0.85:
            del result[place : place + rng.randrange(1, 400)]
        elif kind < 0.93:
            other = rng.randrange(len(result))
            result[place:place] = result[other : other + rng.randrange(1, 400)]
        else:
            del result[place:]
        if not result:
            return b"\xff"
    return bytes(result)


def fuzzed_images(bench: Bench, count: int) -> Outcome:
    """Each image becomes pixels or a counted, named error; no crash, no hang, bounded memory.

    Once image by image in this process (time of each), once through the real loader with worker processes.
    """
    rng = random.Random(bench.seed)
    root = bench.new_folder()
    files = seed_files()
    for split, number in (("train", count), ("val", 8)):
        (root / split / "a").mkdir(parents=True)
        for i in range(number):
            data = mutate(files[i % len(files)], rng) if split == "train" else files[0]
            (root / split / "a" / f"{i:06d}.JPEG").write_bytes(data)
    with Outcome("fuzzed images", bench.seed) as outcome:
        bad = decode_each(root, outcome)
        through_loader(root, count, 2, bad, outcome)
    shutil.rmtree(root)
    return outcome


def decode_each(root: Path, outcome: Outcome) -> int:
    bad = 0
    for path in sorted((root / "train/a").iterdir()):
        started = time.thread_time()
        problem = ""
        try:
            result = Encoded(read_file(path)).decode()
            if result.dtype != np.uint8 or result.ndim != 3 or result.shape[2] != 3:
                problem = f"{path.name}: decoded to {result.dtype} {result.shape}"
        except BadImage as error:
            bad += 1
            if not str(error):
                problem = f"{path.name}: refused without a reason"
        seconds = time.thread_time() - started  # CPU time: other processes do not make an image slow
        outcome.slowest("image, CPU", seconds)
        if seconds > MAX_SECONDS_PER_IMAGE:
            problem = f"{path.name}: took {seconds:.1f} s of CPU time"
        outcome.check(problem)
    outcome.counts["refused with a reason"] = bad
    outcome.counts["decoded"] = outcome.tried - bad
    return bad


def through_loader(root: Path, count: int, workers: int, expected_bad: int, outcome: Outcome) -> None:
    """One epoch of the real loader: it must see and count exactly the images that cannot be decoded."""
    logging.disable(logging.WARNING)
    options = {"workers": workers, "on_bad_image": "skip", "max_bad_images": 10 * count}
    cfg = DataConfig(name="folder", root=str(root), image_size=32, **options)  # type: ignore[arg-type]
    data = build_data(cfg, AugmentConfig(), batch_size=8, seed=0, dist=ALONE)
    images, shared = 0, peak_mib(os.getpid(), "VmRSS")
    try:
        for batch in data.train(0, DeviceFormat(CPU, torch.float32, torch.channels_last)):
            images += len(batch.images)
            if not bool(batch.images.isfinite().all()):
                outcome.lost.append("the loader gave pixels that are not finite")
        skipped = data.bad_images.skipped
        # A fork shares its parent's pages, which count as its own: what matters is what it took on top of them.
        grown = max(peak_mib(process.pid) for process in data.train_loader._workers.processes) - shared
    finally:
        data.close()
        logging.disable(logging.NOTSET)
    outcome.counts["through the loader"] = images
    outcome.counts["counted by the loader"] = skipped
    if images != data.batch_count() * 8:
        outcome.lost.append(f"the loader gave {images} images, not {data.batch_count() * 8}")
    # A bad image is met a second time where it is tried in place of a bad neighbour; the last batch may be dropped.
    if skipped < expected_bad - 8:
        outcome.lost.append(f"the loader counted {skipped} bad images, {expected_bad} cannot be decoded")
    outcome.counts["peak MiB of a worker"] = int(grown)
    if grown > MAX_MEMORY_MIB:
        outcome.lost.append(f"a worker took {grown:.0f} MiB")


def peak_mib(pid: int, field: str = "VmHWM") -> float:
    """Most resident memory of a process so far (or with VmRSS, now)."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith(f"{field}:"))


# --- R17: each odd file with what must come of it ---------------------------------------------------------------------


def bomb_png(side: int) -> bytes:
    """A PNG of side x side white pixels in a few kilobytes."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    rows = zlib.compress((b"\0" + b"\xff" * (side // 8)) * side, 9)
    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def ycck() -> bytes:
    """A CMYK JPEG whose Adobe marker says YCCK, as some of ImageNet's 22 do."""
    data = encoded(Image.fromarray(pixels(64, 48)).convert("CMYK"))
    place = data.index(b"Adobe")
    return data[: place + 11] + b"\x02" + data[place + 12 :]


def quirks() -> dict[str, tuple[bytes | Callable[[Path], object], tuple[int, int] | str]]:
    """Name -> the file's bytes (or what makes it), and the size it decodes to or a part of the reason against it."""
    rgb, size = Image.fromarray(pixels(64, 48)), (48, 64)
    whole, exif = encoded(rgb), Image.Exif()
    exif[0x0112] = 6
    sixteen = Image.fromarray((pixels(64, 48, 1)[:, :, 0].astype(np.uint16) << 8) + 7)
    good = {
        "ordinary": whole,
        "progressive": encoded(rgb, progressive=True),
        "4:4:4": encoded(rgb, subsampling=0),
        "4:2:0, quality 5": encoded(rgb, quality=5, subsampling=2),
        "restart markers": encoded(rgb, restart_marker_blocks=1),
        "trailing bytes": whole + b"\0" * 100,
        "trailing text": whole + b"<html>" * 50,
        "bytes before the end marker": whole[:-2] + b"\xff\xd9",
        "EXIF orientation is ignored": encoded(rgb, exif=exif),
        "corrupt EXIF": encoded(rgb, exif=b"Exif\0\0II*\0\x08\0\0\0\x09\0" + b"\x31" * 30),
        "ICC profile of garbage": encoded(rgb, icc_profile=b"garbage" * 100),
        "YCCK": ycck(),
        "PNG 16 bit grey": encoded(sixteen, "PNG"),
        **{f"JPEG {mode}": encoded(rgb.convert(mode)) for mode in ("L", "CMYK")},
        **{f"PNG {mode}": encoded(rgb.convert(mode), "PNG") for mode in ("RGB", "RGBA", "LA", "P", "1")},
    }
    sizes = ((1, 1), (500, 1), (1, 500), (33, 500), (5000, 4000))
    refused = {
        **{f"{kind} named JPEG": (encoded(rgb, kind), "not a JPEG or PNG") for kind in ("BMP", "WEBP", "TIFF")},
        "GIF named JPEG": (encoded(rgb.convert("P"), "GIF"), "not a JPEG or PNG"),
        "text named JPEG": (b"<html>404</html>" * 20, "not a JPEG or PNG"),
        "truncated": (whole[: len(whole) // 2], "truncated"),
        "only a header": (whole[:20], ""),
        "empty": (b"", "the file is empty"),
        "decompression bomb": (bomb_png(20_000), "pixels"),
        "a JPEG header that claims 65,500 x 65,500": (claims(whole, 65_500), "pixels"),
        "a directory": (lambda path: path.mkdir(), "a directory"),
        "a dangling link": (lambda path: path.symlink_to("nowhere"), "No such file"),
        "a link loop": (lambda path: path.symlink_to(path.name), "symbolic links"),
        "a FIFO": (os.mkfifo, "a FIFO"),
        "a device": (lambda path: path.symlink_to("/dev/zero"), "a device"),
    }
    by_size = {f"{w} x {h}": (encoded(Image.fromarray(pixels(w, h))), (h, w)) for w, h in sizes}
    return {name: (data, size) for name, data in good.items()} | by_size | refused


def claims(data: bytes, side: int) -> bytes:
    place = data.index(b"\xff\xc0") + 5
    return data[:place] + struct.pack(">HH", side, side) + data[place + 4 :]


def odd_imagenet_files(bench: Bench) -> Outcome:
    """The expected outcome of each file, table-driven; nothing may hang."""
    here = bench.new_folder()
    with Outcome("ImageNet's odd files", bench.seed) as outcome, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, (name, (make, expected)) in enumerate(quirks().items()):
            path = here / f"{number:02d}.JPEG"
            path.write_bytes(make) if isinstance(make, bytes) else make(path)
            outcome.check(problem_of(name, path, expected))
    shutil.rmtree(here)
    return outcome


def problem_of(name: str, path: Path, expected: tuple[int, int] | str) -> str:
    started = time.thread_time()
    try:
        result: tuple[int, int] | str = Encoded(read_file(path)).decode().shape[:2]
    except BadImage as error:
        result = str(error)
    seconds = time.thread_time() - started
    if seconds > MAX_SECONDS_PER_IMAGE:
        return f"{name}: took {seconds:.1f} s of CPU time"
    fits = expected in result if isinstance(expected, str) and isinstance(result, str) else expected == result
    return "" if fits else f"{name}: {result!r} instead of {expected!r}"
