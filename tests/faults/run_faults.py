"""Whole runs killed, stopped and resumed, in training and in evaluation, and compared with undisturbed ones."""

import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.faults import tiny
from tests.faults.bench import Bench, Outcome, newest_step, wait_for
from tests.faults.forkserver import Run
from tests.processes import send_and_wait

STOP_S = 2.0  # from a signal in an evaluation to the end, beside one validation batch
EVAL_MS = 200  # per validation batch
UNSAVED = {"checkpoint__every_steps": 0}


def has_completed(run: Path) -> bool:
    """A signal that comes later finds no run to stop."""
    summary = run / "summary.json"
    return summary.is_file() and json.loads(summary.read_text())["status"] == "completed"


def kill_training_run(bench: Bench, outcome: Outcome, kills: int) -> None:
    """SIGKILL of a whole run at random instants, `resume=auto` until done. A try is one kill of a live process."""
    choice = outcome.random.choice
    for number in outcome.numbers_until(kills):
        undisturbed = {"channels_last": choice(("true", "false")), "log_every": choice((1, 3)), "epochs": 3}
        settings = undisturbed | {"data__workers": choice((0, 0, 1, 3))}
        settings |= {"checkpoint__background": choice(("true", "false"))}
        reference = bench.reference(**undisturbed)
        run = bench.folder / f"killed-{number}"
        kill_on_the_way(bench, run, outcome, settings)
        with outcome.attempt():
            bench.check_resumed(run, reference, **settings)
        outcome.tried -= 1  # the end of the run is no try of its own


def kill_on_the_way(bench: Bench, run: Path, outcome: Outcome, settings: dict[str, Any]) -> None:
    """One to three kills. Steps are slowed down so that most of a run's life is training, not start-up."""
    saved = 0
    for _ in range(outcome.random.choice((1, 2, 3))):
        running = bench.start(run, "slow_steps", {"MS": 40}, **settings)
        time.sleep(outcome.random.uniform(0.0, bench.seconds + 0.04 * settings["epochs"] * tiny.STEPS_PER_EPOCH))
        if outcome.random.random() < 0.5:
            running.kill_group()
        running.send(signal.SIGKILL)
        code = running.wait()
        if code != -signal.SIGKILL:
            outcome.lost += [] if code == 0 else [f"{run.name} ended with {code}: {running.output()[-500:]}"]
            continue
        with outcome.attempt():
            tiny.check_loadable(run)
            before, saved = saved, newest_step(run)
            assert saved >= before, f"{run.name}: step {before} was there before, now the newest is {saved}"


def stop_signal_in_training(bench: Bench, outcome: Outcome, count: int) -> None:
    """SIGTERM and SIGINT at a random instant of training: 143 or 130, saved at that step, resumed exactly."""
    reference = bench.reference()
    for number in outcome.numbers_until(count):
        signum, workers = outcome.random.choice((signal.SIGTERM, signal.SIGINT)), outcome.random.choice((0, 2))
        run = bench.folder / f"signal-{number}"
        running = bench.start(run, "slow_steps", {"MS": 15}, data__workers=workers, **UNSAVED)
        wait_for(run / "metrics.jsonl", content="train")
        time.sleep(outcome.random.uniform(0.0, 0.25))
        sent = time.monotonic()
        running.send(signum)
        code, seconds = running.wait(), time.monotonic() - sent
        if not has_completed(run):
            with outcome.attempt():
                assert code == 128 + signum, f"{run.name}: exit code {code}: {running.output()[-300:]}"
                assert seconds <= bench.patience * 5, f"{run.name}: {seconds:.1f} s to exit"
                check_stop(run, running)
                bench.check_resumed(run, reference, **UNSAVED)
    for one_more in (second_signal, early_signal, save_and_go_on):
        with outcome.attempt():
            one_more(bench)


def check_stop(run: Path, running: Run) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "interrupted", f"{run.name}: status {summary['status']}"
    assert summary["steps"] == newest_step(run), f"{run.name}: stopped at {summary['steps']}, saved {newest_step(run)}"
    assert "Traceback" not in running.output(), f"{run.name}: {running.output()[-500:]}"


def held(bench: Bench, run: Path, **settings: Any) -> tuple[Run, Path]:
    """A run in its third step, which waits until the file is deleted."""
    hold = run.with_suffix(".hold")
    running = bench.start(run, "hold_step", {"HOLD": hold}, **settings)
    wait_for(hold)
    return running, hold


def second_signal(bench: Bench) -> None:
    """The step does not end; the second Ctrl-C does not wait for it."""
    running, _ = held(bench, bench.folder / "signal-second")
    send_and_wait(running.pid, signal.SIGINT)
    sent = time.monotonic()
    running.send(signal.SIGINT)
    code, seconds = running.wait(), time.monotonic() - sent
    assert code == 130 and seconds < bench.patience * 1, f"second Ctrl-C: exit code {code} after {seconds:.1f} s"


def early_signal(bench: Bench) -> None:
    """Ctrl-C before the first step: one line, no traceback."""
    running = bench.start(bench.folder / "signal-early", "slow_data")
    wait_for(running.log, content="reading the data")
    running.send(signal.SIGINT)
    assert running.wait() == 130, "Ctrl-C before the first step"
    assert "stopped before the first step" in running.output() and "Traceback" not in running.output()


def save_and_go_on(bench: Bench) -> None:
    """SIGUSR1: a checkpoint appears in mid-epoch, the run ends as if nothing had happened."""
    run = bench.folder / "signal-usr1"
    running, hold = held(bench, run, checkpoint__every_epochs=0, **UNSAVED)
    send_and_wait(running.pid, signal.SIGUSR1)
    hold.unlink()
    assert running.wait() == 0, "SIGUSR1: the run did not go on"
    assert (run / "checkpoints/step-00000003.pt").is_file(), "SIGUSR1: no checkpoint of the held step"
    bench.check_equal(run, bench.reference())


def resume_at_every_step(bench: Bench, outcome: Outcome, steps: Sequence[int], workers: Sequence[int]) -> None:
    """A run ended at each step of its 2 epochs, by SIGKILL and by SIGTERM, for each number of workers, then resumed."""
    reference = bench.reference()
    for count in workers:
        for step in steps:
            for signum in (signal.SIGKILL, signal.SIGTERM):
                with outcome.attempt():
                    resume_once(bench, reference, step, count, signum)


def resume_once(bench: Bench, reference: Path, step: int, workers: int, signum: int) -> None:
    run = bench.folder / f"resume-{workers}-{step}-{signum}"
    plant = {"STEP": step, "SIGNAL": int(signum)}
    code = bench.start(run, "signal_after_save", plant, data__workers=workers).wait()
    expected = (-signal.SIGKILL,) if signum == signal.SIGKILL else (143, 0 if step == tiny.STEPS else 143)
    assert code in expected, f"{run.name}: exit code {code}"
    assert step <= newest_step(run) <= step + 1, f"{run.name}: newest checkpoint is step {newest_step(run)}"
    bench.check_resumed(run, reference, data__workers=workers)


def resume_with_other_layout_or_precision(bench: Bench, outcome: Outcome, full: bool) -> None:
    """Layout, precision and workers change at each resume; the checkpoint fits itself to the new run."""
    changes: list[tuple[str, float, tuple[Any, ...]]] = [
        ("channels_last", 1e-4, ("false", "true", "false")),
        ("precision", 0.1, ("fp32", "bf16", "fp32")),
        ("data__workers", 0.0, (0, 3, 1)),
        ("channels_last", 1e-4, ("true", "false", "true")),
        ("precision", 0.1, ("bf16", "fp32", "bf16")),
        ("precision", 0.1, ("fp32", "fp16_o2", "fp32")),
        ("precision", 0.1, ("fp16", "fp32", "fp16")),
    ]
    for key, tolerance, values in changes if full else changes[:3]:
        with outcome.attempt():
            change_form(bench, key, values if full else values[:2], tolerance)


def change_form(bench: Bench, key: str, values: Sequence[Any], tolerance: float) -> None:
    """Each form runs a few steps and is killed, the last one runs to the end; held against a run in the first form."""
    run, reference = bench.folder / f"changed-{'-'.join(map(str, values))}", bench.reference(**{key: values[0]})
    for number, value in enumerate(values):
        is_last = number == len(values) - 1
        layout = "channels_last" if key == "channels_last" and value == "true" else "contiguous_format"
        plant = {"STEP": 3 * number + 3, "SIGNAL": int(signal.SIGKILL), "FORMAT": layout}
        hook, code = ("check_layout", 0) if is_last else ("check_layout_and_signal", -signal.SIGKILL)
        bench.run(run, code, hook=hook, plant=plant, **{key: value})
    if tolerance == 0:
        bench.check_equal(run, reference)
    else:
        tiny.check_losses(run, reference, tolerance)


# --- in evaluation ----------------------------------------------------------------------------------------------------

EVALUATED = {"model": "tests.faults.tiny:Slow", **UNSAVED}


def start_evaluation(bench: Bench, run: Path, world: int, of_ema: bool) -> list[Run]:
    """A run that has just begun the evaluation of the model, or of the moving average of its weights."""
    marker = bench.folder / f"{run.name}.marker"
    runs = bench.start_ranks(run, world, plant={"EVAL_MS": EVAL_MS, "MARKER": marker}, **EVALUATED)
    wait_for(Path(f"{marker}.ema") if of_ema else marker)
    return runs


def kill_in_evaluation(bench: Bench, outcome: Outcome, kills: int) -> None:
    """SIGKILL in the evaluation of the model and of its moving average: the epoch is saved, the run resumes exactly."""
    for number in range(kills):
        run, of_ema = bench.folder / f"evaluation-kill-{number}", number % 2 == 0
        (running,) = start_evaluation(bench, run, 1, of_ema)
        time.sleep(outcome.random.uniform(0.0, 0.0015 * EVAL_MS))
        running.send(signal.SIGKILL)
        running.wait()
        with outcome.attempt():
            check_epoch_resumed(bench, run, 1)


def stop_signal_in_evaluation(bench: Bench, outcome: Outcome, rounds: int) -> None:
    """SIGTERM or SIGINT in an evaluation, with 1 and 2 ranks: ends within 2 s and one batch, with the epoch saved."""
    for world in (1, 2):
        for number in outcome.numbers_until(rounds):
            run, signum = bench.folder / f"evaluation-{world}-{number}", (signal.SIGTERM, signal.SIGINT)[number % 2]
            runs = start_evaluation(bench, run, world, of_ema=number % 4 > 1)
            time.sleep(outcome.random.uniform(0.0, 0.001 * EVAL_MS))
            sent = time.monotonic()
            for one in runs:  # torchrun passes a signal on to all ranks
                one.send(signum)
            codes, seconds = [one.wait() for one in runs], time.monotonic() - sent
            if has_completed(run):
                continue
            with outcome.attempt():
                assert codes == [128 + signum] * world, f"{run.name}: {codes} {runs[0].output()[-400:]}"
                assert seconds <= bench.patience * (STOP_S + EVAL_MS / 1000), f"{run.name}: {seconds:.1f} s"
                check_epoch_resumed(bench, run, world)


def check_epoch_resumed(bench: Bench, run: Path, world: int) -> None:
    """The first epoch's checkpoint is there, and the run completes as if nothing had happened."""
    epoch_end = run / f"checkpoints/step-{tiny.STEPS_PER_EPOCH:08d}.pt"
    assert epoch_end.is_file(), f"{run.name}: the epoch was not saved before its evaluation"
    bench.check_resumed(run, bench.reference(world, **EVALUATED), world=world, **EVALUATED)
    tiny.check_loadable(run)
