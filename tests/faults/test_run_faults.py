"""Whole runs killed, stopped and resumed, in training and in evaluation, and compared with
undisturbed ones.
"""

import signal
import time
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults import plants, tiny
from tests.faults.bench import Bench, wait_for
from tests.faults.forkserver import Forked
from tests.processes import send_and_wait

pytestmark = pytest.mark.slow
UNSAVED = {"checkpoint__every_steps": 0}


def test_kill_training_run(bench: Bench) -> None:
    """SIGKILL of a whole run at random instants, else in a step; `resume=auto` until done.

    A try is one kill of a live process.
    """
    choice = bench.random.choice
    for number in bench.numbers_until(bench.count(1, 100)):
        undisturbed = {
            "channels_last": choice(("true", "false")),
            "log_every": choice((1, 3)),
            "epochs": 3,
        }
        settings = undisturbed | {"data__workers": choice((0, 0, 1, 3))}
        settings |= {"checkpoint__background": choice(("true", "false"))}
        reference = bench.reference(**undisturbed)
        run, saved = bench.folder / f"killed-{number}", 0
        for _ in range(choice((1, 2, 3))):
            if bench.is_full:
                # Steps are slowed down so that most of a run's life is training, not start-up.
                running = bench.start(run, partial(plants.slow_steps, 40), **settings)
                slowed_s = 0.04 * settings["epochs"] * tiny.STEPS_PER_EPOCH
                time.sleep(bench.random.uniform(0.0, bench.seconds + slowed_s))
            else:
                running, _ = bench.hold(run, **settings)
            if bench.random.random() < 0.5:
                running.kill_group()
            running.send(signal.SIGKILL)
            code = running.wait()
            if code != -signal.SIGKILL:
                bench.lost += (
                    []
                    if code == 0
                    else [f"{run.name} ended with {code}: {running.output()[-500:]}"]
                )
                continue
            with bench.attempt():
                tiny.check_loadable(run)
                before, saved = saved, tiny.newest_step(run)
                assert saved >= before, (
                    f"{run.name}: step {before} was there before, now the newest is {saved}"
                )
        with bench.attempt():
            bench.check_resumed(run, reference, **settings)
        bench.tried -= 1  # the end of the run is no try of its own


def test_stop_signal_in_training(bench: Bench) -> None:
    """SIGTERM and SIGINT at a random instant of training, without --full in a step: 143 or 130,
    saved at that step, resumed exactly.
    """
    reference = bench.reference()
    for number in bench.numbers_until(bench.count(1, 50)):
        signum, workers = (
            bench.random.choice((signal.SIGTERM, signal.SIGINT)),
            bench.random.choice((0, 2)),
        )
        run = bench.folder / f"signal-{number}"
        settings = UNSAVED | {"data__workers": workers}
        if bench.is_full:
            running = bench.start(run, partial(plants.slow_steps, 15), **settings)
            wait_for(run / "metrics.jsonl", content="train")
            time.sleep(bench.random.uniform(0.0, 0.25))
            sent = time.monotonic()
            running.send(signum)
        else:
            running, hold = bench.hold(run, **settings)
            sent = time.monotonic()
            send_and_wait(running.pid, signum)
            hold.unlink()
        code, seconds = running.wait(), time.monotonic() - sent
        if tiny.summary(run).get("status") == "completed":  # before the signal
            continue
        with bench.attempt():
            assert code == 128 + signum, f"{run.name}: exit code {code}: {running.output()[-300:]}"
            assert seconds <= bench.patience * 5, f"{run.name}: {seconds:.1f} s to exit"
            summary, saved = tiny.summary(run), tiny.newest_step(run)
            assert (summary["status"], summary["steps"]) == ("interrupted", saved), (
                f"{run.name}: saved {saved}"
            )
            assert "Traceback" not in running.output(), f"{run.name}: {running.output()[-500:]}"
            bench.check_resumed(run, reference, **UNSAVED)
    with bench.attempt():  # the step does not end; the second Ctrl-C does not wait for it
        running, _ = bench.hold(bench.folder / "signal-second")
        send_and_wait(running.pid, signal.SIGINT)
        sent = time.monotonic()
        running.send(signal.SIGINT)
        code, seconds = running.wait(), time.monotonic() - sent
        assert code == 130 and seconds < bench.patience * 1, (
            f"second Ctrl-C: exit code {code} after {seconds:.1f} s"
        )
    with bench.attempt():  # Ctrl-C before the first step: one line, no traceback
        running = bench.start(bench.folder / "signal-early", plants.slow_data)
        wait_for(running.log, content="reading the data")
        running.send(signal.SIGINT)
        assert running.wait() == 130, "Ctrl-C before the first step"
        assert (
            "stopped before the first step" in running.output()
            and "Traceback" not in running.output()
        )
    with (
        bench.attempt()
    ):  # SIGUSR1: a checkpoint appears in mid-epoch, the run ends as if nothing had happened
        run = bench.folder / "signal-usr1"
        running, hold = bench.hold(run, checkpoint__every_epochs=0, **UNSAVED)
        send_and_wait(running.pid, signal.SIGUSR1)
        hold.unlink()
        assert running.wait() == 0, "SIGUSR1: the run did not go on"
        assert (run / "checkpoints/step-00000003.pt").is_file(), (
            "SIGUSR1: no checkpoint of the held step"
        )
        tiny.check_equal(run, reference)


def test_resume_at_every_step(bench: Bench) -> None:
    """A run ended at each step of its 2 epochs, by SIGKILL and by SIGTERM, for each number of
    workers, then resumed.
    """
    reference, numbers, steps = (
        bench.reference(),
        bench.count((0,), (0, 2)),
        bench.count((5,), range(1, tiny.STEPS + 1)),
    )
    for workers, step, signum in product(numbers, steps, (signal.SIGKILL, signal.SIGTERM)):
        with bench.attempt():
            run = bench.folder / f"resume-{workers}-{step}-{signum}"
            code = bench.start(
                run, partial(plants.signal_after_save, step, signum), data__workers=workers
            ).wait()
            expected = (
                (-signal.SIGKILL,)
                if signum == signal.SIGKILL
                else (143, 0 if step == tiny.STEPS else 143)
            )
            assert code in expected, f"{run.name}: exit code {code}"
            assert step <= tiny.newest_step(run) <= step + 1, (
                f"{run.name}: newest checkpoint is step {tiny.newest_step(run)}"
            )
            bench.check_resumed(run, reference, data__workers=workers)


def test_resume_with_other_layout_or_precision(bench: Bench) -> None:
    """Layout, precision and workers change at each resume after a kill; held against a run in the
    first form.
    """
    changes: list[tuple[str, float, tuple[Any, ...]]] = [
        ("channels_last", 1e-4, ("false", "true", "false")),
        ("precision", 0.1, ("fp32", "bf16", "fp32")),
        ("data__workers", 0.0, (0, 3, 1)),
        ("channels_last", 1e-4, ("true", "false", "true")),
        ("precision", 0.1, ("bf16", "fp32", "bf16")),
        ("precision", 0.1, ("fp32", "fp16_o2", "fp32")),
        ("precision", 0.1, ("fp16", "fp32", "fp16")),
    ]
    for key, tolerance, forms in changes if bench.is_full else changes[:3]:
        values = forms if bench.is_full else forms[:2]
        run, reference = (
            bench.folder / f"changed-{'-'.join(map(str, values))}",
            bench.reference(**{key: values[0]}),
        )
        with bench.attempt():
            for number, value in enumerate(values, start=1):
                is_channels_last = (key, value) == ("channels_last", "true")
                check = partial(
                    plants.check_layout,
                    torch.channels_last if is_channels_last else torch.contiguous_format,
                )
                kill = partial(plants.signal_after_save, 3 * number, signal.SIGKILL)
                hooks, code = (
                    ((check,), 0) if number == len(values) else ((kill, check), -signal.SIGKILL)
                )
                bench.run(run, *hooks, code=code, **{key: value})
            if tolerance == 0:
                changes_told = [f"workers: {old} -> {new}" for old, new in pairwise(values)]
                tiny.check_equal(run, reference, resumed_with=changes_told)
            else:
                assert tiny.losses(run) == pytest.approx(
                    tiny.losses(reference), rel=tolerance, abs=0
                ), run.name


# --- in evaluation --------------------------------------------------------------------------------

EVAL_MS = 200  # per validation batch
STOP_S = 2.0  # from a signal in an evaluation to the end, beside one validation batch
EVALUATED = {"model": "tests.faults.plants:Slow", **UNSAVED}


def start_evaluation(bench: Bench, run: Path, world: int, of_ema: bool) -> list[Forked]:
    """A run that has just begun the evaluation of the model, or of the moving average of its
    weights.
    """
    marker = bench.folder / f"{run.name}.marker"
    environment = {"PLANT_EVAL_MS": str(EVAL_MS), "PLANT_MARKER": str(marker)}
    runs = bench.start_ranks(run, world, environment=environment, **EVALUATED)
    wait_for(Path(f"{marker}.ema") if of_ema else marker)
    return runs


def test_kill_in_evaluation(bench: Bench) -> None:
    """SIGKILL in the evaluation of the model and of its moving average: the epoch is saved, the run
    resumes exactly.
    """
    for number in range(bench.count(1, 20)):
        run, of_ema = bench.folder / f"evaluation-kill-{number}", number % 2 == 0
        (running,) = start_evaluation(bench, run, 1, of_ema)
        time.sleep(bench.random.uniform(0.0, 0.0015 * EVAL_MS))
        running.send(signal.SIGKILL)
        running.wait()
        with bench.attempt():
            check_epoch_resumed(bench, run, 1)


def test_stop_signal_in_evaluation(bench: Bench) -> None:
    """SIGTERM or SIGINT in an evaluation, with 1 and 2 ranks: ends within 2 s and one batch, with
    the epoch saved.
    """
    for world in (1, 2):
        for number in bench.numbers_until(bench.count(1, 5)):
            run, signum = (
                bench.folder / f"evaluation-{world}-{number}",
                (signal.SIGTERM, signal.SIGINT)[number % 2],
            )
            runs = start_evaluation(bench, run, world, of_ema=number % 4 > 1)
            time.sleep(bench.random.uniform(0.0, 0.001 * EVAL_MS))
            sent = time.monotonic()
            for one in runs:  # torchrun passes a signal on to all ranks
                one.send(signum)
            codes, seconds = [one.wait() for one in runs], time.monotonic() - sent
            if tiny.summary(run).get("status") == "completed":
                continue
            with bench.attempt():
                assert codes == [128 + signum] * world, (
                    f"{run.name}: {codes} {runs[0].output()[-400:]}"
                )
                assert seconds <= bench.patience * (STOP_S + EVAL_MS / 1000), (
                    f"{run.name}: {seconds:.1f} s"
                )
                check_epoch_resumed(bench, run, world)


def check_epoch_resumed(bench: Bench, run: Path, world: int) -> None:
    """The first epoch's checkpoint is there, and the run completes as if nothing had happened."""
    epoch_end = run / f"checkpoints/step-{tiny.STEPS_PER_EPOCH:08d}.pt"
    assert epoch_end.is_file(), f"{run.name}: the epoch was not saved before its evaluation"
    bench.check_resumed(run, bench.reference(world, **EVALUATED), world=world, **EVALUATED)
    tiny.check_loadable(run)
