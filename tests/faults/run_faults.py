"""Whole training runs killed, stopped and resumed, and compared with an undisturbed run."""

import json
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plants
import tiny
from bench import Bench, has_completed, newest_step, wait_for
from forkserver import Run
from outcome import Outcome

from tests.processes import send_and_wait

SLOW = {"PLANT_MS": "15"}


def kill_training_run(bench: Bench, kills: int) -> Outcome:
    """SIGKILL at random instants, `resume=auto` until done. A try is one kill of a live process."""
    rng = random.Random(bench.seed)
    with Outcome("SIGKILL of a whole training run at a random instant", bench.seed) as outcome:
        number = 0
        while outcome.tried < kills and number < 10 * kills + 10:
            number += 1
            layout = rng.choice(("true", "false"))
            undisturbed = {"channels_last": layout, "log_every": rng.choice((1, 3)), "epochs": 3}
            settings = undisturbed | {"data__workers": rng.choice((0, 0, 1, 3))}
            settings |= {"checkpoint__background": rng.choice(("true", "false"))}
            reference = bench.reference(**undisturbed)
            run = bench.folder / f"killed-{number}"
            kill_on_the_way(bench, run, rng, outcome, settings)
            outcome.tried -= 1  # the end of the run is no try of its own
            with outcome.attempt():
                bench.check_resumed(run, reference, **settings)
            outcome.counts["runs completed"] += 1
            bench.forget(run)
    return outcome


def kill_on_the_way(bench: Bench, run: Path, rng: random.Random, outcome: Outcome, settings: dict[str, Any]) -> None:
    """One to three kills. Steps are slowed down so that most of a run's life is training, not start-up."""
    saved = 0
    for _ in range(rng.choice((1, 2, 3))):
        running = bench.start(run, "plants:slow_steps", {"PLANT_MS": "40"}, **settings)
        time.sleep(rng.uniform(0.0, bench.seconds + 0.04 * settings["epochs"] * tiny.STEPS_PER_EPOCH))
        if rng.random() < 0.5:
            running.kill_group()
        running.send(signal.SIGKILL)
        code = running.wait()
        if code != -signal.SIGKILL:
            outcome.counts["ended before the kill"] += 1
            outcome.lost += [] if code == 0 else [f"{run.name} ended with {code}: {running.output()[-500:]}"]
            continue
        with outcome.attempt():
            tiny.check_loadable(run)
            before, saved = saved, newest_step(run)
            assert saved >= before, f"{run.name}: step {before} was there before, now the newest is {saved}"
        outcome.counts["killed before the first checkpoint"] += saved == 0


def stop_signal_in_training(bench: Bench, count: int) -> Outcome:
    """SIGTERM and SIGINT at a random instant of training: 143 or 130, saved at that step, resumed exactly."""
    rng = random.Random(bench.seed)
    reference = bench.reference()
    with Outcome("SIGTERM or SIGINT at a random step", bench.seed) as outcome:
        number = 0
        while outcome.tried < count and number < 10 * count + 10:
            number += 1
            signum, workers = rng.choice((signal.SIGTERM, signal.SIGINT)), rng.choice((0, 2))
            run = bench.folder / f"signal-{number}"
            settings = {"checkpoint__every_steps": 0, "data__workers": workers}
            running = bench.start(run, "plants:slow_steps", SLOW, **settings)
            wait_for(run / "metrics.jsonl", content="train")
            time.sleep(rng.uniform(0.0, 0.25))
            sent = time.monotonic()
            running.send(signum)
            code, seconds = running.wait(), time.monotonic() - sent
            if has_completed(run):
                outcome.counts["ended before the signal"] += 1
                bench.forget(run)
                continue
            outcome.slowest("exit", seconds)
            outcome.counts[f"stopped at step {newest_step(run):02d}"] += 1
            with outcome.attempt():
                assert code == 128 + signum, f"{run.name}: exit code {code}: {running.output()[-300:]}"
                assert seconds <= bench.limit_s(5), f"{run.name}: {seconds:.1f} s to exit"
                check_stop(run, running)
                bench.check_resumed(run, reference, checkpoint__every_steps=0)
            bench.forget(run)
        for one_more in (second_signal, early_signal, save_and_go_on):
            with outcome.attempt():
                one_more(bench)
    return outcome


def check_stop(run: Path, running: Run) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "interrupted", f"{run.name}: status {summary['status']}"
    assert summary["steps"] == newest_step(run), f"{run.name}: stopped at {summary['steps']}, saved {newest_step(run)}"
    assert "Traceback" not in running.output(), f"{run.name}: {running.output()[-500:]}"


def second_signal(bench: Bench) -> None:
    """The step does not end; the second Ctrl-C does not wait for it."""
    run, hold = bench.folder / "signal-second", bench.folder / "signal-second.hold"
    running = bench.start(run, "plants:hold_step", {"PLANT_HOLD": str(hold)})
    wait_for(hold)
    send_and_wait(running.pid, signal.SIGINT)
    sent = time.monotonic()
    running.send(signal.SIGINT)
    code, seconds = running.wait(), time.monotonic() - sent
    assert code == 130 and seconds < bench.limit_s(1), f"second Ctrl-C: exit code {code} after {seconds:.1f} s"


def early_signal(bench: Bench) -> None:
    """Ctrl-C before the first step: one line, no traceback."""
    running = bench.start(bench.folder / "signal-early", "plants:slow_data")
    wait_for(running.log, content="reading the data")
    running.send(signal.SIGINT)
    code, output = running.wait(), running.output()
    is_well = code == 130 and "stopped before the first step" in output and "Traceback" not in output
    assert is_well, f"Ctrl-C before the first step: exit code {code}: {output[-400:]}"


def save_and_go_on(bench: Bench) -> None:
    """SIGUSR1: a checkpoint appears in mid-epoch, the run ends as if nothing had happened."""
    run, hold = bench.folder / "signal-usr1", bench.folder / "signal-usr1.hold"
    settings = {"checkpoint__every_steps": 0, "checkpoint__every_epochs": 0}
    running = bench.start(run, "plants:hold_step", {"PLANT_HOLD": str(hold)}, **settings)
    wait_for(hold)
    send_and_wait(running.pid, signal.SIGUSR1)
    hold.unlink()
    assert running.wait() == 0, "SIGUSR1: the run did not go on"
    saved = sorted(path.name for path in run.glob("checkpoints/step-*.pt"))
    assert "step-00000003.pt" in saved, f"SIGUSR1: no checkpoint of the held step, but {saved}"
    bench.check_equal(run, bench.reference())


def resume_at_every_step(bench: Bench, steps: Sequence[int], workers: Sequence[int]) -> Outcome:
    """ended at every step of a 2-epoch run, by SIGKILL and by SIGTERM, for each number of workers, then resumed."""
    reference = bench.reference()
    with Outcome("resume at every step of a 2-epoch run x workers", bench.seed) as outcome:
        for count in workers:
            for step in steps:
                for signum in (signal.SIGKILL, signal.SIGTERM):
                    outcome.counts[f"workers {count}"] += 1
                    with outcome.attempt():
                        resume_once(bench, reference, step, count, signum)
    return outcome


def resume_once(bench: Bench, reference: Path, step: int, workers: int, signum: int) -> None:
    run = bench.folder / f"resume-{workers}-{step}-{signum}"
    plant = {"PLANT_STEP": str(step), "PLANT_SIGNAL": str(int(signum))}
    code = bench.start(run, "plants:signal_after_save", plant, data__workers=workers).wait()
    expected = (-signal.SIGKILL,) if signum == signal.SIGKILL else (143, 0 if step == tiny.STEPS else 143)
    assert code in expected, f"{run.name}: exit code {code}"
    assert step <= newest_step(run) <= step + 1, f"{run.name}: newest checkpoint is step {newest_step(run)}"
    bench.check_resumed(run, reference, data__workers=workers)
    bench.forget(run)


def resume_with_other_layout_or_precision(bench: Bench, full: bool) -> Outcome:
    """layout, precision and workers change at each resume; the checkpoint fits itself to the new run."""
    changes: list[tuple[str, float, tuple[Any, ...]]] = [
        ("channels_last", 1e-4, ("false", "true", "false")),
        ("precision", 0.1, ("fp32", "bf16", "fp32")),
        ("data__workers", 0.0, (0, 3, 1)),
        ("channels_last", 1e-4, ("true", "false", "true")),
        ("precision", 0.1, ("bf16", "fp32", "bf16")),
        ("precision", 0.1, ("fp32", "fp16_o2", "fp32")),
        ("precision", 0.1, ("fp16", "fp32", "fp16")),
    ]
    with Outcome("resume in another layout, precision or number of workers", bench.seed) as outcome:
        for key, tolerance, values in changes if full else changes[:3]:
            with outcome.attempt():
                change_form(bench, key, values if full else values[:2], tolerance)
    return outcome


def change_form(bench: Bench, key: str, values: Sequence[Any], tolerance: float) -> None:
    """Each form runs a few steps and is killed, the last one runs to the end; held against a run in the first form."""
    name = "-".join(map(str, values))
    run, reference = bench.folder / f"changed-{name}", bench.reference(**{key: values[0]})
    for number, value in enumerate(values):
        is_last = number == len(values) - 1
        layout = "channels_last" if key == "channels_last" and value == "true" else "contiguous_format"
        plant = {"PLANT_STEP": str(3 * number + 3), "PLANT_SIGNAL": str(int(signal.SIGKILL)), "PLANT_FORMAT": layout}
        hook = "plants:check_layout" if is_last else "run_faults:plant_kill_and_layout"
        running = bench.start(run, hook, plant, **{key: value})
        expected = 0 if is_last else -signal.SIGKILL
        assert running.wait() == expected, f"{name}, part {number}: {running.output()[-700:]}"
    if tolerance == 0:
        bench.check_equal(run, reference)
    else:
        tiny.check_losses(run, reference, tolerance)


def plant_kill_and_layout() -> None:
    plants.signal_after_save()
    plants.check_layout()
