"""Hostile archives, and prepare_imagenet killed while it unpacks."""

import hashlib
import random
import shutil
import signal
import time
from pathlib import Path

from bench import Bench
from outcome import Outcome

from cl_train.config.schema import ConfigError
from cl_train.imagenet.archives import unpack
from cl_train.imagenet.folders import verify
from tests.data.tar_shards import DAMAGE, damage_one, silent_losses
from tests.imagenet_archives import HOSTILE, make_archives

WNIDS = tuple(f"n{90_000_000 + number}" for number in range(12))


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


def hostile_archives(bench: Bench) -> Outcome:
    """Each is refused by name, and nothing is left behind."""
    folder = bench.new_folder()
    with Outcome("hostile archive", bench.seed) as outcome:
        for number, (name, content) in enumerate(HOSTILE.items()):
            sandbox = folder / f"{number}/a/b"
            sandbox.mkdir(parents=True)
            (sandbox / "train.tar").write_bytes(content)
            before = contents(folder)
            with outcome.attempt():
                try:
                    unpack(sandbox / "out", sandbox / "train.tar", None, None)
                    raise AssertionError(f"{name}: accepted")
                except ConfigError as error:
                    assert "train.tar" in str(error), f"{name}: the message does not name the archive"
                assert contents(folder) == before, f"{name}: left or touched something"
    return outcome


def damaged_shards(bench: Bench, count: int) -> Outcome:
    """One tar shard is damaged: an error, or bad images by name; no other sample is lost or has another label."""
    rng = random.Random(bench.seed)
    with Outcome("a damaged tar shard", bench.seed) as outcome:
        for number in range(count):
            root, kind = bench.new_folder(), list(DAMAGE)[number % len(DAMAGE)]
            damage_one(root, kind, rng)
            outcome.check(*(f"{kind}: {loss}" for loss in silent_losses(root)))
            shutil.rmtree(root)
    return outcome


def run_prepare(root: str, train: str, val: str, devkit: str) -> None:
    """In a child."""
    unpack(Path(root), Path(train), Path(val), Path(devkit))


def kill_while_unpacking_imagenet(bench: Bench, kills: int) -> Outcome:
    """SIGKILL at random instants, `kills` times, then to the end: the folder is as without kills, `verify` agrees."""
    folder = bench.new_folder()
    rng = random.Random(bench.seed)
    archives = make_archives(folder / "archives", per_class=60, val_images=600, wnids=WNIDS)
    started = time.monotonic()
    unpack(folder / "reference", **archives)
    duration = time.monotonic() - started
    out, log = folder / "out", folder / "prepare.log"
    arguments = [str(out), *(str(archives[name]) for name in ("train", "val", "devkit"))]
    with Outcome("prepare_imagenet killed on its way", bench.seed) as outcome:
        for _ in range(kills):
            run = bench.server.call("archive_faults:run_prepare", arguments, log)
            time.sleep(rng.uniform(0.0, duration / 3))
            run.send(signal.SIGKILL)
            outcome.counts["finished before the kill"] += run.wait() == 0
            outcome.counts["kills that left images"] += any(out.rglob("*.JPEG"))
            cut = [
                path.name
                for path in out.glob("train/n*")
                if sum(1 for file in path.glob("*.JPEG") if file.stat().st_size) != 60
            ]
            outcome.check(f"what has its final name is not whole: {cut}" if cut else "")
            if len(list(out.glob("val/*/*.JPEG"))) == 600:
                shutil.rmtree(out)  # start again, so that all kills hit work
        code = bench.server.call("archive_faults:run_prepare", arguments, log).wait()
        _, problems = verify(out, deep=True, expect="any", workers=1)
        with outcome.attempt():
            assert code == 0, f"the last run ended with {code}"
            assert contents(out) == contents(folder / "reference"), "another folder than without kills"
            assert not problems, problems
    return outcome
