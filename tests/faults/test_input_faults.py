"""What a run reads: fuzzed and odd images, hostile archives, damaged shards, preparation that is
killed, the order.
"""

import os
import random
import shutil
import signal
import struct
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cl_train.config.schema import ConfigError
from cl_train.data.decode import BadImage, Encoded, read_file
from cl_train.data.order import order_of_rank, permutation
from cl_train.data.sample import SampleSpec, ensure_sample
from cl_train.imagenet.archives import unpack
from cl_train.imagenet.folders import resize_folder, verify
from tests.conftest import write_images
from tests.data.image_folders import FLOAT_CHANNELS_LAST, data_of, encoded, folder_data, noise
from tests.data.tar_shards import DAMAGE, damage_one, silent_losses
from tests.faults.bench import MAX_ORPHAN_S, Bench, check_ended, peak_mib
from tests.imagenet_archives import HOSTILE, make_archives

WNIDS = tuple(f"n{90_000_000 + number}" for number in range(12))
MAX_SECONDS_PER_IMAGE = 2.0
MAX_MEMORY_MIB = 1024
PNG_MODES, SIZES = ("RGB", "L", "LA", "RGBA", "P", "1"), ((1, 1), (500, 1), (1, 500), (33, 500))


def sound_files() -> dict[str, bytes]:
    """JPEGs and PNGs of the kinds that ImageNet has, of 48 x 64 pixels."""
    rgb, exif = noise(48, 64), Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "rotated"
    jpegs = {
        **{
            f"quality {q}, sampling {s}": {"quality": q, "subsampling": s}
            for q in (5, 60, 95)
            for s in (0, 1, 2)
        },
        "progressive": {"progressive": True},
        "optimised": {"optimize": True},
        "restart markers": {"restart_marker_blocks": 1},
        "EXIF orientation is ignored": {"exif": exif},
        "corrupt EXIF": {"exif": b"Exif\0\0II*\0\x08\0\0\0\x09\0" + b"\x31" * 30},
        "ICC profile of garbage": {"icc_profile": b"garbage" * 400},
        "comment": {"comment": b"c" * 500},
    }
    whole, cmyk = encoded(rgb), encoded(rgb.convert("CMYK"))
    adobe = cmyk.index(b"Adobe") + 11
    sixteen = Image.fromarray((np.asarray(rgb)[:, :, 0].astype(np.uint16) << 8) + 7)
    return {
        **{name: encoded(rgb, **options) for name, options in jpegs.items()},
        **{f"PNG {mode}": encoded(rgb.convert(mode), "PNG") for mode in PNG_MODES},
        "PNG 16 bit grey": encoded(sixteen, "PNG"),
        "grey": encoded(rgb.convert("L")),
        "CMYK": cmyk,
        "YCCK": cmyk[:adobe]
        + b"\x02"
        + cmyk[adobe + 1 :],  # as some of ImageNet's 22 are, by the Adobe marker
        "trailing bytes": whole + b"\0" * 100,
        "trailing text": whole + b"<html>" * 50,
        "bytes before the end marker": whole[:-2] + b"\xff\xd9",
    }


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Bit flips, cuts, splices, edits of the header and of the marker segments' lengths."""
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        place = (
            rng.randrange(len(result))
            if rng.random() < 0.5
            else rng.randrange(min(len(result), 700))
        )
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


@pytest.mark.slow
def test_fuzzed_images(bench: Bench) -> None:
    """Each becomes pixels or a counted, named error, alone and through the real loader; no hang,
    bounded memory.
    """
    root, count = bench.new_folder(), bench.count(300, 50_000)
    files = [*sound_files().values(), *(encoded(noise(*size)) for size in SIZES)]
    for split, number in (("train", count), ("val", 8)):
        (root / split / "a").mkdir(parents=True)
        for i in range(number):
            data = mutate(files[i % len(files)], bench.random) if split == "train" else files[0]
            (root / split / "a" / f"{i:06d}.JPEG").write_bytes(data)
    bad = 0
    for path in sorted((root / "train/a").iterdir()):
        with bench.attempt():
            found = decoded(path)
            assert found, f"{path.name}: refused without a reason"
            bad += isinstance(found, str)
    with bench.attempt():
        check_loader(root, count, bad)
    shutil.rmtree(root)


def decoded(path: Path) -> tuple[int, int] | str:
    """Height and width of a file, or why it is refused."""
    started = time.thread_time()  # CPU time: other processes do not make an image slow
    try:
        pixels = Encoded(read_file(path)).decode()
        assert pixels.dtype == np.uint8 and pixels.shape[2:] == (3,), (
            f"{path.name}: {pixels.dtype} {pixels.shape}"
        )
        found: tuple[int, int] | str = pixels.shape[:2]
    except BadImage as error:
        found = str(error)
    seconds = time.thread_time() - started
    assert seconds <= MAX_SECONDS_PER_IMAGE, f"{path.name}: took {seconds:.1f} s of CPU time"
    return found


def check_loader(root: Path, count: int, expected_bad: int) -> None:
    """One epoch of the real loader: it must see and count exactly the images that cannot be
    decoded.
    """
    data = folder_data(
        root, workers=2, on_bad_image="skip", max_bad_images=10 * count, batch_size=8
    )
    images, shared = 0, peak_mib(os.getpid(), "VmRSS")
    try:
        for batch in data.train(0, FLOAT_CHANNELS_LAST):
            images += len(batch.images)
            assert batch.images.isfinite().all(), "the loader gave pixels that are not finite"
        skipped = data.bad_images.skipped
        # A fork shares its parent's pages, which count as its own: what matters is what it took on
        # top of them.
        grown = max(peak_mib(process.pid) for process in data.train_loader._pool.processes) - shared
    finally:
        data.close()
    assert images == data.batch_count() * 8, (
        f"the loader gave {images} images, not {data.batch_count() * 8}"
    )
    # A bad image is met a second time where it is tried in place of a bad neighbour; the last batch
    # may be dropped.
    assert skipped >= expected_bad - 8, f"the loader counted {skipped} of {expected_bad} bad images"
    assert grown <= MAX_MEMORY_MIB, f"a worker took {grown:.0f} MiB"


def bomb_png(side: int) -> bytes:
    """A PNG of side x side white pixels in a few kilobytes."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + name
            + content
            + struct.pack(">I", zlib.crc32(name + content))
        )

    rows = zlib.compress((b"\0" + b"\xff" * (side // 8)) * side, 9)
    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def claims(data: bytes, side: int) -> bytes:
    """A JPEG whose header says that it is of side x side pixels."""
    place = data.index(b"\xff\xc0") + 5
    return data[:place] + struct.pack(">HH", side, side) + data[place + 4 :]


def odd_files() -> dict[str, tuple[bytes | Callable[[Path], object], tuple[int, int] | str]]:
    """Name -> the file's bytes (or what makes it), and the size it decodes to or a part of the
    reason against it.
    """
    rgb = noise(48, 64)
    whole = encoded(rgb)
    refused = {
        **{
            f"{kind} named JPEG": (encoded(rgb, kind), "not a JPEG or PNG")
            for kind in ("BMP", "WEBP", "TIFF")
        },
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
    sizes = {
        str(size): (encoded(Image.new("RGB", size[::-1])), size) for size in (*SIZES, (4000, 5000))
    }
    return {name: (data, (48, 64)) for name, data in sound_files().items()} | sizes | refused


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_odd_imagenet_files(bench: Bench) -> None:
    """ImageNet's odd files: the expected outcome of each, table-driven; nothing may hang."""
    folder = bench.new_folder()
    for number, (name, (make, expected)) in enumerate(odd_files().items()):
        path = folder / f"{number:02d}.JPEG"
        path.write_bytes(make) if isinstance(make, bytes) else make(path)
        with bench.attempt():
            found = decoded(path)
            fits = (
                expected in found
                if isinstance(expected, str) and isinstance(found, str)
                else expected == found
            )
            assert fits, f"{name}: {found!r} instead of {expected!r}"
    shutil.rmtree(folder)


def contents(folder: Path) -> dict[Path, bytes | None]:
    """None is a folder."""
    return {
        path.relative_to(folder): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def test_hostile_archives(bench: Bench) -> None:
    """A hostile archive is refused by name, and nothing is left behind."""
    folder = bench.new_folder()
    for number, (name, content) in enumerate(HOSTILE.items()):
        sandbox = folder / f"{number}/a/b"
        sandbox.mkdir(parents=True)
        (sandbox / "train.tar").write_bytes(content)
        before = contents(folder)
        with bench.attempt():
            with pytest.raises(ConfigError, match=r"train\.tar"):
                unpack(sandbox / "out", train=sandbox / "train.tar")
                pytest.fail(f"{name}: accepted")
            assert contents(folder) == before, f"{name}: left or touched something"


def test_damaged_shards(bench: Bench) -> None:
    """One tar shard is damaged: an error, or bad images by name; no other sample is lost or has
    another label.
    """
    for number in range(bench.count(40, 1000)):
        root, kind = bench.new_folder(), list(DAMAGE)[number % len(DAMAGE)]
        damage_one(root, kind, bench.random)
        with bench.attempt():
            losses = list(silent_losses(root))
            assert not losses, f"{kind}: {losses}"
        shutil.rmtree(root)


@pytest.mark.slow
def test_kill_while_unpacking_imagenet(bench: Bench) -> None:
    """prepare_imagenet killed on its way: what has its final name is whole; the next command makes
    the same folder.
    """
    folder = bench.new_folder()
    archives = make_archives(folder / "archives", per_class=60, val_images=600, wnids=WNIDS)
    kill_preparation(bench, bench.count(3, 20), folder, partial(unpack, **archives))
    with bench.attempt():
        _, problems = verify(folder / "out-1", deep=True, expect="any", workers=1)
        assert not problems, problems


@pytest.mark.slow
def test_kill_while_generating_sample(bench: Bench) -> None:
    """The first thing that a newcomer interrupts: the next command generates the same sample and
    never hangs.
    """
    spec = SampleSpec(train_per_class=20, val_per_class=4, scale=0.5)
    kill_preparation(
        bench, bench.count(1, 30), bench.new_folder(), partial(ensure_sample, spec=spec)
    )


@pytest.mark.slow
def test_kill_while_resizing_images(bench: Bench) -> None:
    """`prepare_imagenet resize` is killed: no worker stays, the next command finishes the same
    folder.
    """
    folder = bench.new_folder()
    write_images(folder / "images", {"train": 300, "val": 5})
    resize = partial(resize_folder, folder / "images", max_side=24, workers=2)
    kill_preparation(bench, bench.count(1, 30), folder, resize)


def kill_preparation(
    bench: Bench, kills: int, folder: Path, prepare: Callable[[Path], object]
) -> None:
    """Each folder is killed twice on its way, and then finished."""
    started = time.monotonic()
    assert bench.fork(partial(prepare, folder / "out-0")).wait() == 0
    duration = time.monotonic() - started
    for number in range(1, kills + 1):
        out = folder / f"out-{number}"
        with bench.attempt():
            for signum in (
                (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)[number % 3],
                signal.SIGKILL,
            ):
                run = bench.fork(partial(prepare, out))
                time.sleep(bench.random.uniform(0.0, 0.6 * duration))
                run.send(signum)
                run.wait(bench.patience * MAX_ORPHAN_S)
                check_ended(run.session, bench.patience * MAX_ORPHAN_S)
                for path in filter(Path.is_dir, (out / "train" / wnid for wnid in WNIDS)):
                    count = sum(1 for file in path.glob("*.JPEG") if file.stat().st_size)
                    assert count == 60, f"what has its final name is not whole: {path.name}"
            again = bench.fork(partial(prepare, out))
            code = again.wait(bench.patience * (10 * duration + 20))
            again.kill_group()
            assert code == 0, f"the next command: {code}: {again.output()[-400:]}"
            assert contents(out) == contents(folder / "out-0"), "another folder than without kills"


def test_images_seen_per_epoch(bench: Bench) -> None:
    """An epoch is floor(N / global batch) full batches of distinct images in its order; evaluation
    counts N images.
    """
    for _ in range(bench.count(20, 500)):
        with bench.attempt():
            check_epoch(bench.random)
    root = bench.images
    with bench.attempt():
        for world in (1, 2, 3, 4):
            labels = []
            for rank in range(world):
                data = data_of(
                    name="folder", root=str(root), image_size=8, rank=rank, world_size=world
                )
                labels += [
                    label
                    for batch in data.validation(FLOAT_CHANNELS_LAST)
                    for label in batch.targets.tolist()
                ]
                data.close()
            assert sorted(labels) == [0] * 5 + [1] * 5 + [2] * 5, (
                f"evaluation with {world} ranks: {len(labels)} of 15"
            )


def check_epoch(rng: random.Random) -> None:
    world, images, batch = (
        rng.choice((1, 2, 3, 4)),
        rng.choice((97, 100, 101)),
        rng.choice((1, 7, 16)),
    )
    seed, epoch = rng.randrange(2**32), rng.randrange(90)
    order, steps = permutation(seed, epoch, images), images // (batch * world)
    resumed_at, other_world = rng.randrange(steps + 1), world
    if batch * world % 2 == 0:
        other_world = world * 2 if batch % 2 == 0 else max(1, world // 2)
    seen: list[int] = []
    for step in range(steps):
        ranks = world if step < resumed_at else other_world
        rest, share = order[step * batch * world :], batch * world // ranks
        shares = [order_of_rank(rest, share, rank, ranks)[:share] for rank in range(ranks)]
        seen += np.concatenate(shares).tolist()
    said = f"{len(seen)} images, {len(set(seen))} distinct, {steps} steps of {batch} x {world}"
    assert len(set(seen)) == len(seen) == steps * batch * world, said
    assert seen == order[: len(seen)].tolist(), (
        "another order after resuming with another world size"
    )
    assert sorted(order.tolist()) == list(range(images)), "not a permutation"
    assert (order != permutation(seed, epoch + 1, images)).any(), "two epochs have the same order"
