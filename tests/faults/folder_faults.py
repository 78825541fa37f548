"""Odd folders and environments, two runs in one folder, a folder that moves, and a long run."""

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
import warnings
from pathlib import Path
from typing import Any

import tiny
from bench import Bench, wait_for
from outcome import Outcome
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

GOOD = (0,)
REFUSED = (2,)


def odd_folders_and_environments(bench: Bench) -> Outcome:
    """success, or one message and exit code 2; never a traceback."""
    here = bench.folder / "odd"
    here.mkdir()
    (here / "file").write_text("")
    with Outcome("odd surroundings", bench.seed) as outcome:
        outcome.check(expect(bench, here / "with space and = sign", GOOD))
        outcome.check(expect(bench, here / "ünï ☃", GOOD))
        outcome.check(expect(bench, here / "file/run", REFUSED, "cannot write|Not a directory"))
        outcome.check(expect(bench, Path("/proc/nowhere"), REFUSED, "cannot write|No such file"))
        outcome.check(expect(bench, here / "clock", GOOD, hook="plants:clock_jumps_back"))
        outcome.check(
            expect(bench, here / "home", GOOD, environment={"HOME": "", "TERM": "", "LANG": "C", "LC_ALL": "C"})
        )
        outcome.check(expect(bench, here / "home2", GOOD, environment={"HOME": "/nonexistent", "COLUMNS": "0"}))
        outcome.check(expect(bench, here / "secret", GOOD, environment={"API_TOKEN": "s3cr3t-value"}))
        outcome.check(*leaked(here / "secret", b"s3cr3t-value"))
        small_disks(bench, here, outcome)
    return outcome


def expect(
    bench: Bench,
    run: Path,
    codes: tuple[int, ...],
    said: str = "",
    hook: str = "",
    environment: dict[str, str] | None = None,
) -> str:
    import re

    log = bench.folder / f"odd-{len(list(bench.folder.glob('odd-*.log')))}.log"
    running = bench.server.start(tiny.words(bench.images, run), log, environment, hook)
    code, output = running.wait(), running.output()
    if code not in codes or "Traceback" in output:
        return f"{run}: exit code {code}: {output[-600:]}"
    return "" if re.search(said, output) else f"{run}: says {output[-300:]}"


def leaked(run: Path, secret: bytes) -> list[str]:
    """Files of a run that hold an environment variable's value: configurations and summaries must not."""
    return [f"{path.name} holds a secret" for path in run.rglob("*") if path.is_file() and secret in path.read_bytes()]


def small_disks(bench: Bench, here: Path, outcome: Outcome) -> None:
    """Real file systems: full, without inodes, read-only. Needs root; elsewhere the rows are left out, and counted."""
    for name, options, codes in (
        ("full", "size=64k", (1, 2)),
        ("no inodes", "size=8m,nr_inodes=2", REFUSED),
        ("read-only", "size=8m,ro", REFUSED),
    ):
        mount = here / f"mount-{name.replace(' ', '-')}"
        mount.mkdir()
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(mount)], capture_output=True)
        if mounted.returncode != 0:
            outcome.counts["left out: cannot mount"] += 1
            continue
        try:
            outcome.check(expect(bench, mount / "run", codes, hook="plants:short_retries"))
        finally:
            subprocess.run(["umount", "-l", str(mount)], check=False)


def disk_full_for_a_while(bench: Bench, rounds: int, full_s: float) -> Outcome:
    """A file system fills up in the middle of a run and has room again later: the run completes with all records."""
    rng = random.Random(bench.seed)
    step_ms, epoch_s = 100, 0.1 * tiny.STEPS_PER_EPOCH
    epochs = int((full_s + 3) / epoch_s) + 2
    settings = {"epochs": epochs}
    with Outcome(f"the run's file system full for {full_s:g} s", bench.seed) as outcome:
        mount = bench.new_folder()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mount)], check=False).returncode:
            outcome.counts["left out: cannot mount"] += 1
            outcome.check()
            return outcome
        try:
            reference = bench.reference(**settings)
            for number in range(rounds):
                run = mount / f"full-for-a-while-{number}"
                running = bench.start(run, "plants:slow_steps", {"PLANT_MS": str(step_ms)}, **settings)
                wait_for(run / "metrics.jsonl", content="train")
                time.sleep(rng.uniform(0, 1.5))
                fill(mount / "ballast")
                time.sleep(full_s)
                (mount / "ballast").unlink()
                code = running.wait()
                problems = [] if code == 0 else [f"{run.name}: exit code {code}: {running.output()[-500:]}"]
                problems += bench.compare(run, reference) if code == 0 else []
                outcome.check(*problems)
                shutil.rmtree(run)
        finally:
            subprocess.run(["umount", "-l", str(mount)], check=False)
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
        outcome.check(*second_run(bench))
        outcome.check(*read_along(bench))
        outcome.check(*moved(bench))
    return outcome


def second_run(bench: Bench) -> list[str]:
    run, hold = bench.folder / "shared-shared", bench.folder / "shared-shared.hold"
    first = bench.start(run, "plants:hold_step", {"PLANT_HOLD": str(hold)})
    wait_for(hold)
    second = bench.server.start(tiny.words(bench.images, run), bench.folder / "shared-second.log")
    code, output = second.wait(), second.output()
    hold.unlink()
    problems = [] if code == 2 and f"process {first.pid}" in output else [f"the second run: {code}: {output[-400:]}"]
    problems += [] if first.wait() == 0 else ["the first run did not end well"]
    return problems + bench.compare(run, bench.reference())


def read_along(bench: Bench) -> list[str]:
    """Killed and resumed, with a reader of its events throughout: no error, and no step twice."""
    run, problems = bench.folder / "shared-read", []
    for kill in (True, False):
        running = bench.start(run, "plants:slow_steps", {"PLANT_MS": "30"}, checkpoint__every_steps=3)
        wait_for(run / "checkpoints", content=".pt")
        deadline = time.monotonic() + (0.15 if kill else 20)
        while time.monotonic() < deadline and running.wait(0) is None:
            problems += steps_twice(run, final=False)
        if kill:
            running.send(signal.SIGKILL)
        running.wait()
    return problems + steps_twice(run, final=True)


def steps_twice(run: Path, final: bool) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        events = EventAccumulator(str(run), purge_orphaned_data=True).Reload()
    problems = []
    for tag in events.Tags()["scalars"]:
        steps = [event.step for event in events.Scalars(tag)]
        if steps != sorted(set(steps)):
            problems.append(f"{tag}: steps {steps}")
    if final and "train/loss" not in events.Tags()["scalars"]:
        problems.append("no train/loss in the events")
    return problems[:1]


def moved(bench: Bench) -> list[str]:
    run, elsewhere = bench.folder / "shared-here", bench.folder / "shared-moved"
    environment = {"PLANT_STEP": "5", "PLANT_SIGNAL": str(int(signal.SIGKILL))}
    bench.start(run, "plants:signal_after_save", environment).wait()
    shutil.move(run, elsewhere)
    if bench.start(elsewhere).wait() != 0:
        return ["the moved folder did not resume"]
    return bench.compare(elsewhere, bench.reference())


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
        outcome.check(
            "" if running.wait() == 0 else f"exit code {running.wait()}: {running.output()[-400:]}",
            "" if growth < 50 else f"memory grew by {growth} MiB",
            "" if more_files <= 12 else f"{more_files} more open files than in the first third",
            "" if events < 200 * steps + 500_000 else f"{events} bytes of events",
            "" if checkpoints <= 4 else f"{checkpoints} checkpoints",
            ""
            if json.loads((run / "summary.json").read_text())["steps"] == epochs * tiny.STEPS_PER_EPOCH
            else "steps are missing",
        )
    return outcome


def sample_of(pid: int) -> list[tuple[int, int]]:
    """Resident MiB and number of open files; empty where the process just ended."""
    try:
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() >> 20
        return [(resident, len(os.listdir(f"/proc/{pid}/fd")))] if resident else []
    except OSError:
        return []
