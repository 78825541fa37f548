"""Kills and signals outside of training steps: in preparation, in evaluation, of a sweep's launcher."""

import contextlib
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
from cl_train.imagenet.folders import resize_folder
from tests.processes import LIMIT_S, running_processes, wait_until

ORPHAN_S = 5.0  # how long a killed program's children may live
STOP_S = 2.0  # from a signal to the end, beside one validation batch
EVAL_MS = 200  # per validation batch


def running_in_session(session: int) -> list[int]:
    return [pid for pid, fields in running_processes().items() if fields[3] == str(session)]


def running_in_folder(folder: Path) -> list[int]:
    """Processes whose command line names the folder, in any session."""
    found = []
    for pid in running_processes():
        with contextlib.suppress(OSError):
            if os.fsencode(folder) in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def check_orphans(running: Callable[[], list[int]], outcome: Outcome, limit_s: float) -> None:
    """Wait for the children of a killed program to end; kill those that do not."""
    started = time.monotonic()
    while (left := running()) and time.monotonic() - started < limit_s:
        time.sleep(0.01)
    outcome.slowest("end of children", time.monotonic() - started)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, f"{len(left)} processes still ran after {limit_s} s"


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
    return kill_preparation(bench, "generation of the sample killed", "generate_sample", [], folder, kills)


def kill_while_resizing_images(bench: Bench, kills: int) -> Outcome:
    """`prepare_imagenet resize` is killed: no worker stays, the next command finishes the same folder."""
    folder = bench.new_folder()
    source = tiny.write_images(folder / "images", per_class=300)
    return kill_preparation(bench, "resizing of a data set killed", "resize_images", [str(source)], folder, kills)


def kill_preparation(bench: Bench, what: str, function: str, arguments: list[str], folder: Path, kills: int) -> Outcome:
    rng, name = random.Random(bench.seed), "out"

    def prepare(number: int) -> Run:
        target = str(folder / f"{name}-{number}")
        return bench.server.call(f"interrupt_faults:{function}", [*arguments, target], bench.log())

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
            with outcome.attempt():
                check_orphans(partial(running_in_session, run.pid), outcome, bench.limit_s(ORPHAN_S))
                again = prepare(number)
                code = again.wait(bench.limit_s(10 * duration + 20))
                again.kill_group()
                assert code == 0, f"the next command: {code}: {again.output()[-400:]}"
                same = contents(folder / f"{name}-{number}") == contents(folder / f"{name}-0")
                assert same, "another folder than without kills"
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
            with outcome.attempt():
                check_resumed(bench, run, reference, 1)
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
                with outcome.attempt():
                    assert codes == [128 + signum] * ranks, f"{run.name}: {codes} {runs[0].output()[-400:]}"
                    assert seconds <= bench.limit_s(STOP_S + EVAL_MS / 1000), f"{run.name}: {seconds:.1f} s"
                    check_resumed(bench, run, reference, ranks)
    return outcome


def check_resumed(bench: Bench, run: Path, reference: Path, ranks: int) -> None:
    """The first epoch's checkpoint is there, and the run completes as if nothing had happened."""
    epoch_end = run / f"checkpoints/step-{tiny.STEPS_PER_EPOCH:08d}.pt"
    assert epoch_end.is_file(), f"{run.name}: the epoch was not saved before its evaluation"
    runs = start(bench, run, ranks)
    assert finish(runs) == [0] * ranks, f"{run.name} did not resume: {runs[0].output()[-500:]}"
    tiny.check_loadable(run)
    bench.check_equal(run, reference)


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
            with outcome.attempt():
                check_orphans(partial(running_in_folder, folder), outcome, bench.limit_s(ORPHAN_S))
                log = bench.folder / f"launcher-{number}-resumed.log"
                code = start_program(["-m", f"resume_sweep={folder}"], log).wait(LIMIT_S)
                assert code == 0, f"resume_sweep: {code}: {log.read_text()[-500:]}"
                check_steps(folder)
    return outcome


def start_program(words: list[str], log: Path, slow_ms: int = 0) -> "subprocess.Popen[bytes]":
    environment = os.environ | {"PYTHONPATH": f"{HERE}:{tiny.REPOSITORY}", "OMP_NUM_THREADS": "1"}
    environment |= {"PLANT_MS": str(slow_ms)}
    command = [sys.executable, str(tiny.REPOSITORY / "train.py"), *words]
    with log.open("ab") as file:
        options: dict[str, Any] = {"stdout": file, "stderr": file, "start_new_session": True}
        return subprocess.Popen(command, cwd=tiny.REPOSITORY, env=environment, **options)


def check_steps(folder: Path) -> None:
    """Both jobs have a record of each window once."""
    jobs = [path.parent for path in folder.glob("*/metrics.jsonl")]
    found = {job.name: list(tiny.losses(job)) for job in jobs}
    assert len(found) == 2 and set(map(tuple, found.values())) == {tuple(range(2, tiny.STEPS + 1, 2))}, found
