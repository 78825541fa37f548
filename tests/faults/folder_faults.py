"""Odd folders and environments, two runs in one folder, a folder that moves, and a long run."""

import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tiny
from bench import Bench, wait_for
from outcome import Outcome
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def odd_folders_and_environments(bench: Bench) -> Outcome:
    """success, or one message and exit code 2; never a traceback."""
    here, c_locale = bench.folder / "odd", {"TERM": "", "LANG": "C", "LC_ALL": "C"}
    here.mkdir()
    (here / "file").write_text("")
    rows: list[tuple[Path, int, str, dict[str, str]]] = [
        (here / "with space and = sign", 0, "", {}),
        (here / "ünï ☃", 0, "", {}),
        (here / "file/run", 2, "cannot write|Not a directory", {}),
        (Path("/proc/nowhere"), 2, "cannot write|No such file", {}),
        (here / "clock", 0, "", {}),
        (here / "home", 0, "", {"HOME": ""} | c_locale),
        (here / "home2", 0, "", {"HOME": "/nonexistent", "COLUMNS": "0"}),
        (here / "secret", 0, "", {"API_TOKEN": "s3cr3t-value"}),
    ]
    with Outcome("odd surroundings", bench.seed) as outcome:
        for run, code, said, environment in rows:
            with outcome.attempt():
                hook = "plants:clock_jumps_back" if run.name == "clock" else ""
                check_end(bench, run, (code,), said, hook, environment)
                for path in run.rglob("*"):  # configurations and summaries must not hold the environment
                    assert not (path.is_file() and b"s3cr3t-value" in path.read_bytes()), f"{path.name} holds a secret"
        for name, options, codes in (  # real file systems
            ("full", "size=64k", (1, 2)),
            ("no-inodes", "size=8m,nr_inodes=2", (2,)),
            ("read-only", "size=8m,ro", (2,)),
        ):
            (here / name).mkdir()
            with mounted(here / name, options, outcome) as is_mounted:
                if is_mounted:
                    with outcome.attempt():
                        check_end(bench, here / name / "run", codes, hook="plants:short_retries")
    return outcome


def check_end(
    bench: Bench,
    run: Path,
    codes: tuple[int, ...],
    said: str = "",
    hook: str = "",
    environment: dict[str, str] | None = None,
) -> None:
    running = bench.server.start(tiny.words(bench.images, run), bench.log(), environment, hook)
    code, output = running.wait(), running.output()
    assert code in codes and "Traceback" not in output, f"{run}: exit code {code}: {output[-600:]}"
    assert re.search(said, output), f"{run}: says {output[-300:]}"


@contextlib.contextmanager
def mounted(folder: Path, options: str, outcome: Outcome) -> Iterator[bool]:
    """A small file system. It needs root; elsewhere the rows are left out, and counted."""
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    is_mounted = subprocess.run(command, capture_output=True).returncode == 0
    outcome.counts["left out: cannot mount"] += not is_mounted
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def disk_full_for_a_while(bench: Bench, rounds: int, full_s: float) -> Outcome:
    """A file system fills up in the middle of a run and has room again later: the run completes with all records."""
    rng = random.Random(bench.seed)
    step_ms, epoch_s = 100, 0.1 * tiny.STEPS_PER_EPOCH
    epochs = int((full_s + 3) / epoch_s) + 2
    settings = {"epochs": epochs}
    mount = bench.new_folder()
    with (
        Outcome(f"the run's file system full for {full_s:g} s", bench.seed) as outcome,
        mounted(mount, "size=8m", outcome) as is_mounted,
    ):
        outcome.tried += not is_mounted
        for number in range(rounds if is_mounted else 0):
            run, reference = mount / f"full-for-a-while-{number}", bench.reference(**settings)
            running = bench.start(run, "plants:slow_steps", {"PLANT_MS": str(step_ms)}, **settings)
            wait_for(run / "metrics.jsonl", content="train")
            time.sleep(rng.uniform(0, 1.5))
            fill(mount / "ballast")
            time.sleep(full_s)
            (mount / "ballast").unlink()
            with outcome.attempt():
                assert running.wait() == 0, f"{run.name}: exit code {running.wait()}: {running.output()[-500:]}"
                bench.check_equal(run, reference)
            shutil.rmtree(run)
    return outcome


def fill(ballast: Path) -> None:
    """Take all the room of a file system; a record that is written meanwhile leaves no gap."""
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        for size in (2**16, 2**12, 1):
            with contextlib.suppress(OSError):
                while file.write(b"x" * size):
                    pass


def shared_or_moved_run_folder(bench: Bench) -> Outcome:
    """a second run in the same folder, TensorBoard reading along, a folder that moves between kill and resume."""
    with Outcome("two runs in one folder; read while written; moved", bench.seed) as outcome:
        for row in (second_run, read_along, moved):
            with outcome.attempt():
                row(bench)
    return outcome


def second_run(bench: Bench) -> None:
    run, hold = bench.folder / "shared-shared", bench.folder / "shared-shared.hold"
    first = bench.start(run, "plants:hold_step", {"PLANT_HOLD": str(hold)})
    wait_for(hold)
    second = bench.server.start(tiny.words(bench.images, run), bench.folder / "shared-second.log")
    code, output = second.wait(), second.output()
    hold.unlink()
    assert code == 2 and f"process {first.pid}" in output, f"the second run: {code}: {output[-400:]}"
    assert first.wait() == 0, "the first run did not end well"
    bench.check_equal(run, bench.reference())


def read_along(bench: Bench) -> None:
    """Killed and resumed, with a reader of its events throughout: no error, and no step twice."""
    run = bench.folder / "shared-read"
    for kill in (True, False):
        running = bench.start(run, "plants:slow_steps", {"PLANT_MS": "30"}, checkpoint__every_steps=3)
        wait_for(run / "checkpoints", content=".pt")
        deadline = time.monotonic() + (0.15 if kill else 20)
        while time.monotonic() < deadline and running.wait(0) is None:
            check_events(run)
        if kill:
            running.send(signal.SIGKILL)
        running.wait()
    assert "train/loss" in check_events(run), "no train/loss in the events"


def check_events(run: Path) -> list[str]:
    """Every tag has each step once; returns the tags."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        events = EventAccumulator(str(run), purge_orphaned_data=True).Reload()
    tags: list[str] = events.Tags()["scalars"]
    for tag in tags:
        steps = [event.step for event in events.Scalars(tag)]
        assert steps == sorted(set(steps)), f"{tag}: steps {steps}"
    return tags


def moved(bench: Bench) -> None:
    run, elsewhere = bench.folder / "shared-here", bench.folder / "shared-moved"
    environment = {"PLANT_STEP": "5", "PLANT_SIGNAL": str(int(signal.SIGKILL))}
    bench.start(run, "plants:signal_after_save", environment).wait()
    shutil.move(run, elsewhere)
    bench.check_resumed(elsewhere, bench.reference())


def long_run_stays_bounded(bench: Bench, steps: int) -> Outcome:
    """checkpoints rotate; memory, open files and disk stay bounded."""
    epochs = -(-steps // tiny.STEPS_PER_EPOCH)
    run = bench.folder / "long"
    settings: dict[str, Any] = {"epochs": epochs, "data__workers": 1}
    settings |= {"checkpoint__every_steps": 50, "checkpoint__every_epochs": 0, "evaluate_every": 100, "log_every": 6}
    with Outcome(f"{steps} steps", bench.seed) as outcome:
        running = bench.start(run, **settings)
        samples: list[tuple[int, int]] = []
        while running.wait(0) is None:
            samples += sample_of(running.pid)
            time.sleep(0.05)
        rss, files = [sample[0] for sample in samples], [sample[1] for sample in samples]
        warm = len(samples) // 3  # start-up, the first epochs and the first checkpoints come before it
        growth = max(rss[warm:]) - rss[warm]
        more_files = max(files[warm:]) - max(files[:warm])  # not the minimum: a process that ends has closed its files
        events = sum(path.stat().st_size for path in run.glob("events.*"))
        checkpoints = len(list((run / "checkpoints").glob("*.pt")))
        outcome.counts.update({"MiB of growth": growth, "open files": max(files), "event KiB": events // 1024})
        outcome.counts.update({"checkpoints at the end": checkpoints, "MiB at the end": rss[-1]})
        with outcome.attempt():
            assert running.wait() == 0, f"exit code {running.wait()}: {running.output()[-400:]}"
            assert growth < 50, f"memory grew by {growth} MiB"
            assert more_files <= 12, f"{more_files} more open files than in the first third"
            assert events < 200 * steps + 500_000, f"{events} bytes of events"
            assert checkpoints <= 4, f"{checkpoints} checkpoints"
            taken = json.loads((run / "summary.json").read_text())["steps"]
            assert taken == epochs * tiny.STEPS_PER_EPOCH, "steps are missing"
    return outcome


def sample_of(pid: int) -> list[tuple[int, int]]:
    """Resident MiB and number of open files; empty where the process just ended."""
    try:
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() >> 20
        return [(resident, len(os.listdir(f"/proc/{pid}/fd")))] if resident else []
    except OSError:
        return []
