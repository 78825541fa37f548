"""NaN and Inf, a collapsing loss scale, failing loader workers and full disks in the middle of training."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import tiny
import torch
from bench import Bench, newest_step, wait_for
from outcome import Outcome
from rank_faults import finish, start_ranks

from cl_train.system.checkpoints import load


def nan_in_loss_or_gradient(bench: Bench, full: bool) -> Outcome:
    """NaN or Inf in the loss, in a gradient, in one rank only; policies stop and skip."""
    plants = [("plants:bad_gradient", "nan")]
    plants += [("plants:bad_loss", "nan"), ("plants:bad_gradient", "inf"), ("plants:bad_loss", "inf")] if full else []
    with Outcome("NaN or Inf planted in a loss or gradient", bench.seed) as outcome:
        for hook, value in plants:
            outcome.check(*stops_untouched(bench, hook, value))
            outcome.check(*skips_and_goes_on(bench, hook, value, count=1))
            if full or value == "nan":
                outcome.check(*all_ranks_stop_together(bench, hook, value))
        outcome.check(*too_many(bench))
        outcome.check(*statistics_stay_finite(bench))
    return outcome


def plant(step: int, value: str, **more: int) -> dict[str, str]:
    return {"PLANT_STEP": str(step), "PLANT_VALUE": value} | {f"PLANT_{key}": str(item) for key, item in more.items()}


def name_of(hook: str, value: str, what: str) -> str:
    return f"bad-{hook.partition(':')[2]}-{value}-{what}"


def stops_untouched(bench: Bench, hook: str, value: str) -> list[str]:
    run = bench.folder / name_of(hook, value, "stop")
    running = bench.start(run, hook, plant(5, value), on_nonfinite="stop")
    problems = [] if running.wait() == 1 else [f"{run.name}: exit code {running.wait()}"]
    output = running.output()
    if "at step 5 on rank 0" not in output or "Traceback" in output:
        problems.append(f"{run.name}: {output[-500:]}")
    newest = newest_step(run)
    state = load(run / f"checkpoints/step-{newest:08d}.pt")
    before = load(run / "checkpoints/step-00000004.pt") if newest > 4 else state
    weights = {name: tensor for name, tensor in state["model"].items() if "running" not in name and "num_b" not in name}
    problems += [
        f"{run.name}: {name} changed"
        for name, tensor in weights.items()
        if not torch.equal(tensor, before["model"][name])
    ]
    return problems


def skips_and_goes_on(bench: Bench, hook: str, value: str, count: int) -> list[str]:
    run = bench.folder / name_of(hook, value, "skip")
    code = bench.start(run, hook, plant(5, value, COUNT=count), on_nonfinite="skip", max_nonfinite=2).wait()
    if code != 0:
        return [f"{run.name}: exit code {code}"]
    state = tiny.final_state(run)
    problems = (
        []
        if state["progress"]["skipped_steps"] == count
        else [f"{run.name}: {state['progress']['skipped_steps']} skipped"]
    )
    return problems + not_finite(run, state["model"])


def not_finite(run: Path, tensors: dict[str, torch.Tensor]) -> list[str]:
    return [
        f"{run.name}: {name} is not finite" for name, tensor in tensors.items() if not bool(tensor.isfinite().all())
    ]


def all_ranks_stop_together(bench: Bench, hook: str, value: str) -> list[str]:
    run = bench.folder / name_of(hook, value, "rank1")
    ranks = start_ranks(bench, run, 2, hook, plant(5, value, RANK=1), batch_size=4, on_nonfinite="stop")
    codes = finish(ranks)
    problems = [] if codes == [1, 1] else [f"{run.name}: exit codes {codes}: {ranks[0].output()[-500:]}"]
    for rank in ranks:
        if "at step 5 on rank" not in rank.output():
            problems.append(f"{run.name}: {rank.output()[-400:]}")
    if hook == "plants:bad_loss" and "on rank 1" not in ranks[0].output():
        problems.append(f"{run.name}: rank 0 does not name rank 1: {ranks[0].output()[-400:]}")
    return problems


def too_many(bench: Bench) -> list[str]:
    run = bench.folder / "bad-too-many"
    running = bench.start(run, "plants:bad_loss", plant(3, "nan", COUNT=5), on_nonfinite="skip", max_nonfinite=2)
    code = running.wait()
    return (
        [] if code == 1 and "max_nonfinite=2" in running.output() else [f"{run.name}: {code} {running.output()[-400:]}"]
    )


def statistics_stay_finite(bench: Bench) -> list[str]:
    """NaN images pass BatchNorm before the loss is known: a skipped step must not leave NaN statistics behind."""
    run = bench.folder / "bad-images"
    running = bench.start(run, "plants:bad_images", plant(5, "nan"), on_nonfinite="skip")
    code = running.wait()
    if code != 0:
        return [f"{run.name}: exit code {code}: {running.output()[-400:]}"]
    state = tiny.final_state(run)
    return not_finite(run, state["model"]) + not_finite(run, state["average"])


def loss_scale_collapse(bench: Bench, full: bool) -> Outcome:
    """gradients that overflow at every scale: stops within 20 steps with advice, never ends as a success."""
    starts = (4.0, 1.0, 1024.0) if full else (4.0,)
    with Outcome("loss scale forced down", bench.seed) as outcome:
        for scale in starts:
            run = bench.folder / f"scale-{scale:g}"
            settings: dict[str, Any] = {"precision": "fp16", "amp__init_scale": scale, "epochs": 4}
            running = bench.start(run, "plants:bad_gradient", plant(1, "inf", COUNT=10_000), **settings)
            code = running.wait()
            lines = [line for line in running.output().splitlines() if "Epoch:" in line]
            outcome.check(
                "" if code == 1 and "loss scale fell" in running.output() else f"{code}: {running.output()[-400:]}",
                "" if len(lines) <= 10 else f"{run.name}: stopped after {2 * len(lines)} steps",
                "" if "precision=bf16" in running.output() else f"{run.name}: no advice",
            )
    return outcome


def failing_loader_worker(bench: Bench, rounds: int) -> Outcome:
    """a loader worker is killed, hangs, raises, or leaves: the run ends in bounded time and names it."""
    rng = random.Random(bench.seed)
    with Outcome("loader worker killed, hung, raising or leaving", bench.seed) as outcome:
        for number in range(rounds):
            for signum in (signal.SIGKILL, signal.SIGSTOP):
                outcome.check(*signalled_worker(bench, number, signum, rng, outcome))
            for hook in ("plants:worker_raises", "plants:worker_exits"):
                run = bench.folder / f"worker-{hook.partition(':')[2]}-{number}"
                environment = {"PLANT_STEP": str(rng.randrange(5, 40)), "PLANT_MS": "5"}
                running = bench.start(run, hook, environment, data__workers=2)
                code = running.wait()
                outcome.check(
                    *problems_of_worker(run, code, running.output(), "planted" if "raises" in hook else "exited with 3")
                )
    return outcome


def signalled_worker(bench: Bench, number: int, signum: int, rng: random.Random, outcome: Outcome) -> list[str]:
    run = bench.folder / f"worker-{signum}-{number}"
    timeout_s = 2 if signum == signal.SIGSTOP else 300
    settings = {"data__workers": 2, "data__worker_timeout_s": timeout_s, "epochs": 10_000}
    running = bench.start(run, "plants:slow_steps", {"PLANT_MS": "20"}, **settings)
    wait_for(run / "checkpoints", content=".pt")
    time.sleep(rng.uniform(0, 0.2))
    workers = children(running.pid)[:2]  # those of the validation images start later
    if len(workers) != 2:
        running.kill_group()
        return [f"{run.name}: {len(workers)} workers found"]
    os.kill(rng.choice(workers), signum)
    started = time.monotonic()
    code = running.wait()
    seconds = time.monotonic() - started
    outcome.slowest(f"end after {signal.Signals(signum).name}", seconds)
    problems = problems_of_worker(run, code, running.output(), "signal 9" if signum == signal.SIGKILL else "worker")
    if seconds > bench.limit_s(10):
        problems.append(f"{run.name}: {seconds:.1f} s to the end")
    running.kill_group()
    return problems


def children(pid: int) -> list[int]:
    """In the order of their start."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                if int(fields[1]) == pid:
                    found.append((int(fields[19]), int(entry.name)))
            except (OSError, IndexError):
                continue
    return [child for _, child in sorted(found)]


def problems_of_worker(run: Path, code: int | None, output: str, said: str) -> list[str]:
    problems = [] if code == 1 else [f"{run.name}: exit code {code}"]
    if "the run failed" not in output or said not in output or "Traceback" in output:
        problems.append(f"{run.name}: says {output[-500:]}")
    if said != "planted" and ".JPEG" not in output:
        problems.append(f"{run.name}: does not name the image: {output[-300:]}")
    return problems + tiny.unloadable(run)


def disk_full_in_training_run(bench: Bench, full: bool) -> Outcome:
    """failed saves cost nothing, failures for too long end it by a message; with space it resumes exactly."""
    with Outcome("disk full during a training run", bench.seed) as outcome:
        for background in ("true", "false") if full else ("true",):
            reference = bench.reference()
            run = bench.folder / f"full-disk-briefly-{background}"
            environment = {"PLANT_STEP": "4", "PLANT_COUNT": "2"}
            running = bench.start(run, "plants:full_disk", environment, checkpoint__background=background)
            code = running.wait()
            told = running.output().count("No space left on device")
            outcome.check(
                "" if code == 0 and told == 2 else f"{run.name}: {code}, told {told} times: {running.output()[-300:]}",
                *(bench.compare(run, reference) if code == 0 else []),
            )
            run = bench.folder / f"full-disk-long-{background}"
            environment = {"PLANT_STEP": "4", "PLANT_COUNT": "99", "PLANT_MINUTES": "0"}
            running = bench.start(run, "plants:full_disk", environment, checkpoint__background=background)
            code, said = running.wait(), "no checkpoint could be written"
            problems = (
                [] if code == 1 and said in running.output() else [f"{run.name}: {code} {running.output()[-300:]}"]
            )
            problems += [] if newest_step(run) == 3 else [f"{run.name}: the newest is {newest_step(run)}"]
            problems += ["did not resume"] if bench.start(run).wait() != 0 else bench.compare(run, reference)
            outcome.check(*problems)
    return outcome
