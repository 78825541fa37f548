"""Whole training runs killed, stopped and resumed, and compared with an undisturbed run."""

import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
            kill_until_done(bench, run, rng, outcome, settings)
            problems = bench.compare(run, reference)
            outcome.counts["runs completed"] += 1
            outcome.lost += problems[:1]
            bench.forget(run)
    return outcome


def kill_until_done(bench: Bench, run: Path, rng: random.Random, outcome: Outcome, settings: dict[str, Any]) -> None:
    """One to three kills on the way. Steps are slowed down so that most of a run's life is training, not start-up."""
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
            if code != 0:
                outcome.lost.append(f"{run.name} ended with {code}: {running.output()[-500:]}")
            continue
        problems = tiny.unloadable(run)
        now = newest_step(run)
        if now < saved:
            problems.append(f"{run.name}: step {saved} was there before, now the newest is {now}")
        saved = now
        outcome.counts["killed before the first checkpoint"] += now == 0
        outcome.check(*problems)
    running = bench.start(run, **settings)
    code = running.wait()
    if code != 0:
        outcome.lost.append(f"{run.name} did not complete: {code}: {running.output()[-500:]}")


def stop_signal_in_training(bench: Bench, count: int) -> Outcome:
    """SIGTERM and SIGINT at a random instant of training: 143 or 130, saved at that step, resumed exactly."""
    rng = random.Random(bench.seed)
    reference = bench.reference()
    with Outcome("SIGTERM or SIGINT at a random step", bench.seed) as outcome:
        number = 0
        while outcome.tried < count and number < 10 * count + 10:
            number += 1
            signum = rng.choice((signal.SIGTERM, signal.SIGINT))
            run = bench.folder / f"signal-{number}"
            running = bench.start(
                run, "plants:slow_steps", SLOW, checkpoint__every_steps=0, data__workers=rng.choice((0, 2))
            )
            wait_for(run / "metrics.jsonl", content="train")
            time.sleep(rng.uniform(0.0, 0.25))
            sent = time.monotonic()
            running.send(signum)
            code = running.wait()
            seconds = time.monotonic() - sent
            if has_completed(run):
                outcome.counts["ended before the signal"] += 1
                bench.forget(run)
                continue
            outcome.slowest("exit", seconds)
            problems = [] if code == 128 + signum else [f"{run.name}: exit code {code}: {running.output()[-300:]}"]
            problems += [f"{run.name}: {seconds:.1f} s to exit"] if seconds > bench.limit_s(5) else []
            problems += problems_of_stop(run, running)
            outcome.counts[f"stopped at step {newest_step(run):02d}"] += 1
            again = bench.start(run, checkpoint__every_steps=0)
            if again.wait() != 0:
                problems.append(f"{run.name} did not resume: {again.output()[-500:]}")
            else:
                problems += bench.compare(run, reference)
            outcome.check(*problems)
            bench.forget(run)
        outcome.check(*second_signal(bench))
        outcome.check(*early_signal(bench))
        outcome.check(*save_and_go_on(bench, reference))
    return outcome


def problems_of_stop(run: Path, running: Run) -> list[str]:
    import json

    summary = json.loads((run / "summary.json").read_text())
    problems = [] if summary["status"] == "interrupted" else [f"{run.name}: status {summary['status']}"]
    if summary["steps"] != newest_step(run):
        problems.append(f"{run.name}: stopped at step {summary['steps']}, saved step {newest_step(run)}")
    if "Traceback" in running.output():
        problems.append(f"{run.name}: a traceback: {running.output()[-500:]}")
    return problems


def second_signal(bench: Bench) -> list[str]:
    """The step does not end; the second Ctrl-C does not wait for it."""
    run, hold = bench.folder / "signal-second", bench.folder / "signal-second.hold"
    running = bench.start(run, "plants:hold_step", {"PLANT_HOLD": str(hold)})
    wait_for(hold)
    send_and_wait(running.pid, signal.SIGINT)
    sent = time.monotonic()
    running.send(signal.SIGINT)
    code, seconds = running.wait(), time.monotonic() - sent
    is_well = code == 130 and seconds < bench.limit_s(1)
    return [] if is_well else [f"second Ctrl-C: exit code {code} after {seconds:.1f} s"]


def early_signal(bench: Bench) -> list[str]:
    """Ctrl-C before the first step: one line, no traceback."""
    run = bench.folder / "signal-early"
    running = bench.start(run, "plants:slow_data")
    wait_for(running.log, content="reading the data")
    running.send(signal.SIGINT)
    code, output = running.wait(), running.output()
    is_well = code == 130 and "stopped before the first step" in output and "Traceback" not in output
    return [] if is_well else [f"Ctrl-C before the first step: exit code {code}: {output[-400:]}"]


def save_and_go_on(bench: Bench, reference: Path) -> list[str]:
    """SIGUSR1: a checkpoint appears in mid-epoch, the run ends as if nothing had happened."""
    run, hold = bench.folder / "signal-usr1", bench.folder / "signal-usr1.hold"
    settings = {"checkpoint__every_steps": 0, "checkpoint__every_epochs": 0}
    running = bench.start(run, "plants:hold_step", {"PLANT_HOLD": str(hold)}, **settings)
    wait_for(hold)
    send_and_wait(running.pid, signal.SIGUSR1)
    hold.unlink()
    problems = [] if running.wait() == 0 else ["SIGUSR1: the run did not go on"]
    saved = sorted(path.name for path in run.glob("checkpoints/step-*.pt"))
    problems += [] if "step-00000003.pt" in saved else [f"SIGUSR1: no checkpoint of the held step, but {saved}"]
    return problems + bench.compare(run, reference)


def resume_at_every_step(bench: Bench, steps: Sequence[int], workers: Sequence[int]) -> Outcome:
    """ended at every step of a 2-epoch run, by SIGKILL and by SIGTERM, for each number of workers, then resumed."""
    reference = bench.reference()
    with Outcome("resume at every step of a 2-epoch run x workers", bench.seed) as outcome:
        for count in workers:
            for step in steps:
                for signum in (signal.SIGKILL, signal.SIGTERM):
                    outcome.check(*resume_once(bench, reference, step, count, signum))
                    outcome.counts[f"workers {count}"] += 1
    return outcome


def resume_once(bench: Bench, reference: Path, step: int, workers: int, signum: int) -> list[str]:
    run = bench.folder / f"resume-{workers}-{step}-{signum}"
    plant = {"PLANT_STEP": str(step), "PLANT_SIGNAL": str(int(signum))}
    code = bench.start(run, "plants:signal_after_save", plant, data__workers=workers).wait()
    expected = (-signal.SIGKILL,) if signum == signal.SIGKILL else (143, 0 if step == tiny.STEPS else 143)
    problems = [] if code in expected else [f"{run.name}: exit code {code}"]
    at = newest_step(run)
    if not step <= at <= step + 1:
        problems.append(f"{run.name}: newest checkpoint is step {at}")
    again = bench.start(run, data__workers=workers)
    if again.wait() != 0:
        return [*problems, f"{run.name} did not resume: {again.output()[-500:]}"]
    problems += bench.compare(run, reference)
    bench.forget(run)
    return problems


def resume_with_other_layout_or_precision(bench: Bench, full: bool) -> Outcome:
    """layout, precision and workers change at each resume; the checkpoint fits itself to the new run."""
    channels = [("false", "true", "false"), ("true", "false", "true")]
    precisions = [
        ("fp32", "bf16", "fp32"),
        ("bf16", "fp32", "bf16"),
        ("fp32", "fp16_o2", "fp32"),
        ("fp16", "fp32", "fp16"),
    ]
    parts = 3 if full else 2
    with Outcome("resume in another layout, precision or number of workers", bench.seed) as outcome:
        for layouts in channels if full else channels[:1]:
            outcome.check(
                *change_form(bench, [{"channels_last": layout} for layout in layouts][:parts], tolerance=1e-4)
            )
        for names in precisions if full else precisions[:1]:
            outcome.check(*change_form(bench, [{"precision": name} for name in names][:parts], tolerance=0.1))
        outcome.check(*change_form(bench, [{"data__workers": count} for count in (0, 3, 1)][:parts], tolerance=0.0))
    return outcome


def change_form(bench: Bench, forms: list[dict[str, Any]], tolerance: float) -> list[str]:
    """Each form runs a few steps and is killed, the last one runs to the end; held against a run in the first form."""
    name = "-".join(str(value) for form in forms for value in form.values())
    run, reference = bench.folder / f"changed-{name}", bench.reference(**forms[0])
    problems = []
    for number, form in enumerate(forms):
        last = number == len(forms) - 1
        layout = "channels_last" if form.get("channels_last") == "true" else "contiguous_format"
        plant = {"PLANT_STEP": str(3 * number + 3), "PLANT_SIGNAL": str(int(signal.SIGKILL)), "PLANT_FORMAT": layout}
        hook = "run_faults:plant_kill_and_layout" if not last else "plants:check_layout"
        running = bench.start(run, hook, plant, **form)
        if running.wait() != (0 if last else -signal.SIGKILL):
            problems.append(f"{name}, part {number}: {running.output()[-700:]}")
    if tolerance == 0:
        return problems or bench.compare(run, reference)
    return problems or problems_of_losses(name, run, reference, tolerance)


def plant_kill_and_layout() -> None:
    import plants

    plants.signal_after_save()
    plants.check_layout()


def problems_of_losses(name: str, run: Path, reference: Path, tolerance: float) -> list[str]:
    ours, theirs = ([r["loss"] for r in tiny.records(folder) if r["kind"] == "train"] for folder in (run, reference))
    gaps = [abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)]
    return [f"{name}: losses differ by {max(gaps):.1e}"] if max(gaps) > tolerance else []
