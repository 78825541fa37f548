"""NaN and Inf, a collapsing loss scale, failing loader workers and full disks in the middle of training."""

import os
import random
import signal
import time
from typing import Any

import tiny
import torch
from bench import Bench, newest_step, wait_for
from outcome import Outcome
from rank_faults import finish, start_ranks

from cl_train.system.checkpoints import load
from tests.processes import children_of


def nan_in_loss_or_gradient(bench: Bench, full: bool) -> Outcome:
    """NaN or Inf in the loss, in a gradient, in one rank only; policies stop and skip."""
    plants = [("plants:bad_gradient", "nan")]
    plants += [("plants:bad_loss", "nan"), ("plants:bad_gradient", "inf"), ("plants:bad_loss", "inf")] if full else []
    with Outcome("NaN or Inf planted in a loss or gradient", bench.seed) as outcome:
        for hook, value in plants:
            for row in (stops_untouched, skips_and_goes_on, all_ranks_stop_together):
                with outcome.attempt():
                    row(bench, hook, value)
        for row in (too_many, statistics_stay_finite):
            with outcome.attempt():
                row(bench)
    return outcome


def plant(step: int, value: str, **more: int) -> dict[str, str]:
    return {"PLANT_STEP": str(step), "PLANT_VALUE": value} | {f"PLANT_{key}": str(item) for key, item in more.items()}


def stops_untouched(bench: Bench, hook: str, value: str) -> None:
    run = bench.folder / f"bad-{hook.partition(':')[2]}-{value}-stop"
    running = bench.start(run, hook, plant(5, value), on_nonfinite="stop")
    assert running.wait() == 1, f"{run.name}: exit code {running.wait()}"
    output = running.output()
    assert "at step 5 on rank 0" in output and "Traceback" not in output, f"{run.name}: {output[-500:]}"
    state, before = (load(run / f"checkpoints/step-{step:08d}.pt") for step in (newest_step(run), 4))
    for name, tensor in state["model"].items():
        if "running" not in name and "num_b" not in name:
            assert torch.equal(tensor, before["model"][name]), f"{run.name}: {name} changed"


def skips_and_goes_on(bench: Bench, hook: str, value: str) -> None:
    run = bench.folder / f"bad-{hook.partition(':')[2]}-{value}-skip"
    code = bench.start(run, hook, plant(5, value), on_nonfinite="skip", max_nonfinite=2).wait()
    assert code == 0, f"{run.name}: exit code {code}"
    state = tiny.final_state(run)
    assert state["progress"]["skipped_steps"] == 1, f"{run.name}: {state['progress']['skipped_steps']} skipped"
    check_finite(state["model"])


def check_finite(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        assert tensor.isfinite().all(), f"{name} is not finite"


def all_ranks_stop_together(bench: Bench, hook: str, value: str) -> None:
    run = bench.folder / f"bad-{hook.partition(':')[2]}-{value}-rank1"
    ranks = start_ranks(bench, run, 2, hook, plant(5, value, RANK=1), batch_size=4, on_nonfinite="stop")
    assert finish(ranks) == [1, 1], f"{run.name}: {finish(ranks)}: {ranks[0].output()[-500:]}"
    for rank in ranks:
        assert "at step 5 on rank" in rank.output(), f"{run.name}: {rank.output()[-400:]}"
    if hook == "plants:bad_loss":
        assert "on rank 1" in ranks[0].output(), f"{run.name}: rank 0 does not name rank 1: {ranks[0].output()[-400:]}"


def too_many(bench: Bench) -> None:
    run = bench.folder / "bad-too-many"
    running = bench.start(run, "plants:bad_loss", plant(3, "nan", COUNT=5), on_nonfinite="skip", max_nonfinite=2)
    is_well = running.wait() == 1 and "max_nonfinite=2" in running.output()
    assert is_well, f"{run.name}: {running.wait()} {running.output()[-400:]}"


def statistics_stay_finite(bench: Bench) -> None:
    """NaN images pass BatchNorm before the loss is known: a skipped step must not leave NaN statistics behind."""
    run = bench.folder / "bad-images"
    running = bench.start(run, "plants:bad_images", plant(5, "nan"), on_nonfinite="skip")
    assert running.wait() == 0, f"{run.name}: exit code {running.wait()}: {running.output()[-400:]}"
    state = tiny.final_state(run)
    check_finite(state["model"])
    check_finite(state["average"])


def loss_scale_collapse(bench: Bench, full: bool) -> Outcome:
    """gradients that overflow at every scale: stops within 20 steps with advice, never ends as a success."""
    with Outcome("loss scale forced down", bench.seed) as outcome:
        for scale in (4.0, 1.0, 1024.0) if full else (4.0,):
            run = bench.folder / f"scale-{scale:g}"
            settings: dict[str, Any] = {"precision": "fp16", "amp__init_scale": scale, "epochs": 4}
            running = bench.start(run, "plants:bad_gradient", plant(1, "inf", COUNT=10_000), **settings)
            code, output = running.wait(), running.output()
            with outcome.attempt():
                assert code == 1 and "loss scale fell" in output, f"{code}: {output[-400:]}"
                steps = 2 * sum("Epoch:" in line for line in output.splitlines())
                assert steps <= 20, f"{run.name}: stopped after {steps} steps"
                assert "precision=bf16" in output, f"{run.name}: no advice"
    return outcome


def failing_loader_worker(bench: Bench, rounds: int) -> Outcome:
    """a loader worker is killed, hangs, raises, or leaves: the run ends in bounded time and names it."""
    rng = random.Random(bench.seed)
    with Outcome("loader worker killed, hung, raising or leaving", bench.seed) as outcome:
        for number in range(rounds):
            for signum in (signal.SIGKILL, signal.SIGSTOP):
                with outcome.attempt():
                    signalled_worker(bench, number, signum, rng, outcome)
            for hook, said in (("worker_raises", "planted"), ("worker_exits", "exited with 3")):
                environment = {"PLANT_STEP": str(rng.randrange(5, 40)), "PLANT_MS": "5"}
                run = bench.folder / f"{hook}-{number}"
                running = bench.start(run, f"plants:{hook}", environment, data__workers=2)
                running.wait()
                with outcome.attempt():
                    check_worker(running, said)
                    tiny.check_loadable(run)
    return outcome


def signalled_worker(bench: Bench, number: int, signum: int, rng: random.Random, outcome: Outcome) -> None:
    run = bench.folder / f"worker-{signum}-{number}"
    timeout_s = 2 if signum == signal.SIGSTOP else 300
    settings = {"data__workers": 2, "data__worker_timeout_s": timeout_s, "epochs": 10_000}
    running = bench.start(run, "plants:slow_steps", {"PLANT_MS": "20"}, **settings)
    try:
        wait_for(run / "checkpoints", content=".pt")
        time.sleep(rng.uniform(0, 0.2))
        workers = children_of(running.pid)[:2]  # those of the validation images start later
        assert len(workers) == 2, f"{run.name}: {len(workers)} workers found"
        os.kill(rng.choice(workers), signum)
        started = time.monotonic()
        running.wait()
        seconds = time.monotonic() - started
        outcome.slowest(f"end after {signal.Signals(signum).name}", seconds)
        check_worker(running, "signal 9" if signum == signal.SIGKILL else "worker")
        tiny.check_loadable(run)
        assert seconds <= bench.limit_s(10), f"{run.name}: {seconds:.1f} s to the end"
    finally:
        running.kill_group()


def check_worker(running: Any, said: str) -> None:
    code, output = running.wait(), running.output()
    is_told = "the run failed" in output and said in output and "Traceback" not in output
    assert code == 1 and is_told, f"{running.log.name}: exit code {code}, says {output[-500:]}"
    assert said == "planted" or ".JPEG" in output, f"{running.log.name}: does not name the image: {output[-300:]}"


def disk_full_in_training_run(bench: Bench, full: bool) -> Outcome:
    """failed saves cost nothing, failures for too long end it by a message; with space it resumes exactly."""
    with Outcome("disk full during a training run", bench.seed) as outcome:
        for background in ("true", "false") if full else ("true",):
            reference = bench.reference()
            run = bench.folder / f"full-disk-briefly-{background}"
            environment = {"PLANT_STEP": "4", "PLANT_COUNT": "2"}
            running = bench.start(run, "plants:full_disk", environment, checkpoint__background=background)
            code, told = running.wait(), running.output().count("No space left on device")
            with outcome.attempt():
                assert code == 0 and told == 2, f"{run.name}: {code}, told {told} times: {running.output()[-300:]}"
                bench.check_equal(run, reference)
            run = bench.folder / f"full-disk-long-{background}"
            environment = {"PLANT_STEP": "4", "PLANT_COUNT": "99", "PLANT_MINUTES": "0"}
            running = bench.start(run, "plants:full_disk", environment, checkpoint__background=background)
            code, output = running.wait(), running.output()
            with outcome.attempt():
                assert code == 1 and "no checkpoint could be written" in output, f"{run.name}: {code} {output[-300:]}"
                assert newest_step(run) == 3, f"{run.name}: the newest is {newest_step(run)}"
                bench.check_resumed(run, reference)
    return outcome
