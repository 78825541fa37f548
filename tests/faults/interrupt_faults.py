"""Kills and signals outside of training steps: in preparation, in evaluation, of a sweep's launcher."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import tiny
from archive_faults import contents
from bench import Bench, has_completed, wait_for
from forkserver import HERE, Run
from outcome import Outcome
from rank_faults import finish, start_ranks

from cl_train.data.sample import SampleSpec, ensure_sample
from cl_train.imagenet.resize import resize_folder
from tests.processes import LIMIT_S, wait_until

ORPHAN_S = 5.0  # how long a killed program's children may live
STOP_S = 2.0  # from a signal to the end, beside one validation batch
EVAL_MS = 200  # per validation batch


def running(session: int) -> list[int]:
    """Processes of a session that have not ended."""
    return [pid for pid in processes() if fields_of(pid)[3:4] == [str(session)]]


def running_in(folder: Path) -> list[int]:
    """Processes whose command line names the folder, in any session."""
    found = []
    for pid in processes():
        with contextlib.suppress(OSError):
            if os.fsencode(folder) in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def processes() -> list[int]:
    """All that have not ended."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if fields_of(pid)[:1] not in ([], ["Z"])]


def fields_of(pid: int) -> list[str]:
    """State, parent, group, session, ... of /proc/PID/stat; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def orphans(running: Callable[[], list[int]], outcome: Outcome, limit_s: float) -> list[str]:
    """Wait for the children of a killed program to end; kill and name those that do not."""
    started = time.monotonic()
    while (left := running()) and time.monotonic() - started < limit_s:
        time.sleep(0.01)
    outcome.slowest("end of children", time.monotonic() - started)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [f"{len(left)} processes still ran after {limit_s} s"] if left else []


# --- preparation ------------------------------------------------------------------------------------------------------


def generate_sample(folder: str) -> None:
    """In a child."""
    ensure_sample(Path(folder), SampleSpec(train_per_class=20, val_per_class=4, scale=0.5))


def resize_images(source: str, folder: str) -> None:
    """In a child."""
    resize_folder(Path(source), Path(folder), max_side=24, workers=2)


def kill_while_generating_sample(bench: Bench, kills: int) -> Outcome:
    """The first thing that a newcomer interrupts: the next command generates the same sample and never hangs."""
    folder = bench.new_folder()

    def prepare(number: int) -> Run:
        return bench.server.call("interrupt_faults:generate_sample", [str(folder / f"sample-{number}")], bench.log())

    return kill_preparation(bench, "generation of the sample killed", prepare, folder, "sample", kills)


def kill_while_resizing_images(bench: Bench, kills: int) -> Outcome:
    """`prepare_imagenet resize` is killed: no worker stays, the next command finishes the same folder."""
    folder = bench.new_folder()
    source = tiny.write_images(folder / "images", per_class=300)

    def prepare(number: int) -> Run:
        arguments = [str(source), str(folder / f"small-{number}")]
        return bench.server.call("interrupt_faults:resize_images", arguments, bench.log())

    return kill_preparation(bench, "resizing of a data set killed", prepare, folder, "small", kills)


def kill_preparation(
    bench: Bench, what: str, prepare: Callable[[int], Run], folder: Path, name: str, kills: int
) -> Outcome:
    rng = random.Random(bench.seed)
    with Outcome(what, bench.seed) as outcome:
        assert prepare(0).wait() == 0
        started = time.monotonic()
        assert prepare(-1).wait() == 0
        duration = time.monotonic() - started
        for number in range(1, kills + 1):
            run = prepare(number)
            time.sleep(rng.uniform(0.0, duration))
            run.send((signal.SIGKILL, signal.SIGTERM, signal.SIGINT)[number % 3])
            outcome.counts["finished before the kill"] += run.wait(bench.limit_s(ORPHAN_S)) == 0
            problems = orphans(partial(running, run.pid), outcome, bench.limit_s(ORPHAN_S))
            again = prepare(number)
            code = again.wait(bench.limit_s(10 * duration + 20))
            again.kill_group()
            problems += [] if code == 0 else [f"the next command: {code}: {again.output()[-400:]}"]
            same = contents(folder / f"{name}-{number}") == contents(folder / f"{name}-0")
            outcome.check(*problems, "" if same else "another folder than without kills")
    return outcome


# --- evaluation -------------------------------------------------------------------------------------------------------


def start_evaluation(bench: Bench, run: Path, ranks: int, of_ema: bool) -> list[Run]:
    """A run that has just begun the evaluation of the model, or of the moving average of its weights."""
    marker = bench.folder / f"{run.name}.marker"
    plant = {"PLANT_EVAL_MS": str(EVAL_MS), "PLANT_MARKER": str(marker)}
    runs = start(bench, run, ranks, plant)
    assert wait_for(Path(f"{marker}.ema") if of_ema else marker), runs[0].output()
    return runs


def start(bench: Bench, run: Path, ranks: int, plant: dict[str, str] | None = None) -> list[Run]:
    if ranks == 1:
        return [bench.start(run, "", plant, **evaluation_settings(1))]
    return start_ranks(bench, run, ranks, plant=plant, **evaluation_settings(ranks))


def evaluation_settings(ranks: int) -> dict[str, Any]:
    return {"model": "tiny:slow_model", "batch_size": 8 // ranks, "checkpoint__every_steps": 0}


def kill_in_evaluation(bench: Bench, kills: int) -> Outcome:
    """SIGKILL in the evaluation of the model and of its moving average: the epoch is saved, the run resumes exactly."""
    rng = random.Random(bench.seed)
    with Outcome("SIGKILL in an evaluation", bench.seed) as outcome:
        reference = bench.reference(**evaluation_settings(1))
        for number in range(kills):
            run, of_ema = bench.folder / f"evaluation-kill-{number}", number % 2 == 0
            (running,) = start_evaluation(bench, run, 1, of_ema)
            time.sleep(rng.uniform(0.0, 0.0015 * EVAL_MS))
            running.send(signal.SIGKILL)
            running.wait()
            outcome.counts[f"in the evaluation of the {'EMA' if of_ema else 'model'}"] += 1
            outcome.check(*resumed(bench, run, reference, 1, f"kill {number}"))
    return outcome


def stop_signal_in_evaluation(bench: Bench, rounds: int) -> Outcome:
    """SIGTERM or SIGINT in an evaluation, with 1 and 2 ranks: ends within 2 s and one batch, with the epoch saved."""
    rng = random.Random(bench.seed)
    with Outcome("SIGTERM or SIGINT in an evaluation, 1 and 2 ranks", bench.seed) as outcome:
        for ranks in (1, 2):
            reference = bench.folder / f"evaluation-reference-{ranks}"
            runs = start(bench, reference, ranks)
            assert finish(runs) == [0] * ranks, runs[0].output()
            number, stopped = -1, 0
            while stopped < rounds and number < 10 * rounds:
                number += 1
                run, signum = bench.folder / f"evaluation-{ranks}-{number}", (signal.SIGTERM, signal.SIGINT)[number % 2]
                runs = start_evaluation(bench, run, ranks, of_ema=number % 4 > 1)
                time.sleep(rng.uniform(0.0, 0.001 * EVAL_MS))
                sent = time.monotonic()
                for one in runs:  # torchrun passes a signal on to all ranks
                    one.send(signum)
                codes = finish(runs)
                seconds = time.monotonic() - sent
                if has_completed(run):
                    outcome.counts["ended before the signal"] += 1
                    continue
                stopped += 1
                outcome.slowest(f"exit with {ranks} ranks", seconds)
                problems = [] if codes == [128 + signum] * ranks else [f"{run.name}: {codes} {runs[0].output()[-400:]}"]
                problems += [f"{run.name}: {seconds:.1f} s"] if seconds > bench.limit_s(STOP_S + EVAL_MS / 1000) else []
                outcome.check(*problems, *resumed(bench, run, reference, ranks, run.name))
    return outcome


def resumed(bench: Bench, run: Path, reference: Path, ranks: int, name: str) -> list[str]:
    """The first epoch's checkpoint is there, and the run completes as if nothing had happened."""
    epoch_end = run / f"checkpoints/step-{tiny.STEPS_PER_EPOCH:08d}.pt"
    problems = [] if epoch_end.is_file() else [f"{name}: the epoch was not saved before its evaluation"]
    runs = start(bench, run, ranks)
    if finish(runs) != [0] * ranks:
        return [*problems, f"{name} did not resume: {runs[0].output()[-500:]}"]
    return problems + tiny.unloadable(run) + bench.compare(run, reference)


# --- sweeps -----------------------------------------------------------------------------------------------------------


def kill_sweep_launcher(bench: Bench, kills: int) -> Outcome:
    """SIGKILL of `train.py -m`: its job ends, and `resume_sweep` completes the sweep with every step once."""
    rng = random.Random(bench.seed)
    with Outcome("the launcher of a sweep killed", bench.seed) as outcome:
        for number in range(kills):
            folder = bench.folder / f"launcher-{number}"
            words = tiny.words(bench.images, folder, model="tiny:slow_model", resume=None, checkpoint__every_steps=0)
            words = [word for word in words if not word.startswith("hydra.run.dir")]
            if number % 5 == 4:  # the job is torchrun
                words += ["nproc=2", "batch_size=4"]
            sweep = ["-m", "channels_last=false,true", f"hydra.sweep.dir={folder}", *words]
            launcher = start_program(sweep, bench.folder / f"launcher-{number}.log", slow_ms=60)
            wait_until(lambda: any(folder.glob("*/job.log")))  # noqa: B023
            if number % 3:  # else at the job's start
                wait_until(lambda: any("train" in path.read_text() for path in folder.glob("*/metrics.jsonl")))  # noqa: B023
                time.sleep(rng.uniform(0, 0.4))
            launcher.kill()
            launcher.wait()
            problems = orphans(partial(running_in, folder), outcome, bench.limit_s(ORPHAN_S))
            log = bench.folder / f"launcher-{number}-resumed.log"
            code = start_program(["-m", f"resume_sweep={folder}"], log).wait(LIMIT_S)
            problems += [] if code == 0 else [f"resume_sweep: {code}: {log.read_text()[-500:]}"]
            outcome.check(*problems, *(steps_recorded_twice(folder) if code == 0 else []))
    return outcome


def start_program(words: list[str], log: Path, slow_ms: int = 0) -> "subprocess.Popen[bytes]":
    environment = os.environ | {"PYTHONPATH": f"{HERE}:{tiny.REPOSITORY}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tiny.REPOSITORY / "train.py"), *words]
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            cwd=tiny.REPOSITORY,
            env=environment | {"PLANT_MS": str(slow_ms)},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def steps_recorded_twice(folder: Path) -> list[str]:
    """Every job has a record of each window once."""
    problems = []
    for path in folder.glob("*/metrics.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        steps = [line["step"] for line in lines if line["kind"] == "train"]
        if steps != list(range(2, tiny.STEPS + 1, 2)):
            problems.append(f"{path.parent.name}: records of steps {steps}")
    return problems if len(list(folder.glob("*/metrics.jsonl"))) == 2 else [*problems, "not two jobs"]
