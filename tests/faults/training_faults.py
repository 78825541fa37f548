"""NaN and Inf, a collapsing loss scale, failing loader workers, full disks, shared folders, and a long run."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cl_train.system.checkpoints import load
from tests.faults import tiny
from tests.faults.bench import Bench, Outcome, newest_step, wait_for
from tests.faults.input_faults import peak_mib
from tests.faults.run_faults import held
from tests.processes import children_of


def nan_in_loss_or_gradient(bench: Bench, outcome: Outcome, full: bool) -> None:
    """NaN or Inf planted in the loss, in a gradient, in one rank only; policies stop and skip."""
    plants = [("bad_gradient", "nan")]
    plants += [("bad_loss", "nan"), ("bad_gradient", "inf"), ("bad_loss", "inf")] if full else []
    for hook, value in plants:
        for row in (stops_untouched, skips_and_goes_on, all_ranks_stop_together):
            with outcome.attempt():
                row(bench, hook, {"STEP": 5, "VALUE": value})
    plant, skip = {"STEP": 3, "VALUE": "nan", "COUNT": 5}, {"on_nonfinite": "skip", "max_nonfinite": 2}
    with outcome.attempt():
        bench.run(bench.folder / "bad-too-many", 1, "max_nonfinite=2", hook="bad_loss", plant=plant, **skip)
    with outcome.attempt():
        statistics_stay_finite(bench)


def bad_run(bench: Bench, hook: str, plant: dict[str, Any], what: str) -> Path:
    return bench.folder / f"{hook}-{plant['VALUE']}-{what}"


def stops_untouched(bench: Bench, hook: str, plant: dict[str, Any]) -> None:
    run = bad_run(bench, hook, plant, "stop")
    bench.run(run, 1, "at step 5 on rank 0", hook=hook, plant=plant, on_nonfinite="stop")
    state, before = (load(run / f"checkpoints/step-{step:08d}.pt") for step in (newest_step(run), 4))
    for name, tensor in state["model"].items():
        if "running" not in name and "num_b" not in name:
            assert torch.equal(tensor, before["model"][name]), f"{run.name}: {name} changed"


def skips_and_goes_on(bench: Bench, hook: str, plant: dict[str, Any]) -> None:
    run = bad_run(bench, hook, plant, "skip")
    bench.run(run, hook=hook, plant=plant, on_nonfinite="skip", max_nonfinite=2)
    state = tiny.final_state(run)
    assert state["progress"]["skipped_steps"] == 1, f"{run.name}: {state['progress']['skipped_steps']} skipped"
    check_finite(state["model"])


def check_finite(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        assert tensor.isfinite().all(), f"{name} is not finite"


def all_ranks_stop_together(bench: Bench, hook: str, plant: dict[str, Any]) -> None:
    run = bad_run(bench, hook, plant, "rank1")
    ranks = bench.start_ranks(run, 2, hook, plant | {"RANK": 1}, on_nonfinite="stop")
    codes = [rank.wait() for rank in ranks]
    assert codes == [1, 1], f"{run.name}: {codes}: {ranks[0].output()[-500:]}"
    for rank in ranks:
        assert "at step 5 on rank" in rank.output(), f"{run.name}: {rank.output()[-400:]}"
    if hook == "bad_loss":
        assert "on rank 1" in ranks[0].output(), f"{run.name}: rank 0 does not name rank 1: {ranks[0].output()[-400:]}"


def statistics_stay_finite(bench: Bench) -> None:
    """NaN images pass BatchNorm before the loss is known: a skipped step must not leave NaN statistics behind."""
    run = bench.folder / "bad-images"
    bench.run(run, hook="bad_images", plant={"STEP": 5}, on_nonfinite="skip")
    state = tiny.final_state(run)
    check_finite(state["model"])
    check_finite(state["average"])


def loss_scale_collapse(bench: Bench, outcome: Outcome, full: bool) -> None:
    """Gradients that overflow at every scale: stops within 20 steps with advice, never ends as a success."""
    plant = {"STEP": 1, "VALUE": "inf", "COUNT": 10_000}
    for scale in (4.0, 1.0, 1024.0) if full else (4.0,):
        with outcome.attempt():
            run, settings = bench.folder / f"scale-{scale:g}", {"precision": "fp16", "amp__init_scale": scale}
            output = bench.run(run, 1, "loss scale fell", hook="bad_gradient", plant=plant, epochs=20, **settings)
            steps = 2 * sum("Epoch:" in line for line in output.splitlines())
            assert steps <= 20, f"{run.name}: stopped after {steps} steps"
            assert "precision=bf16" in output, f"{run.name}: no advice"


def failing_loader_worker(bench: Bench, outcome: Outcome, rounds: int) -> None:
    """A loader worker is killed, hangs, raises, or leaves: the run ends in bounded time and names it."""
    for number in range(rounds):
        for signum in (signal.SIGKILL, signal.SIGSTOP):
            with outcome.attempt():
                signalled_worker(bench, number, signum, outcome)
        for leaves, said in ((0, "the run failed.*planted"), (1, r"the run failed.*exited with 3(.|\n)*\.JPEG")):
            run, plant = bench.folder / f"worker-{leaves}-{number}", {"STEP": outcome.random.randrange(5, 40)}
            with outcome.attempt():
                bench.run(run, 1, said, hook="bad_worker", plant=plant | {"EXIT": leaves}, data__workers=2)
                tiny.check_loadable(run)


def signalled_worker(bench: Bench, number: int, signum: int, outcome: Outcome) -> None:
    run = bench.folder / f"worker-{signum}-{number}"
    timeout_s = 2 if signum == signal.SIGSTOP else 300
    settings = {"data__workers": 2, "data__worker_timeout_s": timeout_s, "epochs": 10_000}
    running = bench.start(run, "slow_steps", {"MS": 20}, **settings)
    try:
        wait_for(run / "checkpoints", content=".pt")
        time.sleep(outcome.random.uniform(0, 0.2))
        workers = children_of(running.pid)[:2]  # those of the validation images start later
        assert len(workers) == 2, f"{run.name}: {len(workers)} workers found"
        os.kill(outcome.random.choice(workers), signum)
        started = time.monotonic()
        code, output = running.wait(), running.output()
        seconds = time.monotonic() - started
        said = ("the run failed", ".JPEG", "signal 9" if signum == signal.SIGKILL else "worker")
        is_told = all(words in output for words in said) and "Traceback" not in output
        assert code == 1 and is_told, f"{run.name}: exit code {code}, says {output[-500:]}"
        tiny.check_loadable(run)
        assert seconds <= bench.patience * 10, f"{run.name}: {seconds:.1f} s to the end"
    finally:
        running.kill_group()


# --- full disks -------------------------------------------------------------------------------------------------------


def disk_full_in_training_run(bench: Bench, outcome: Outcome, full: bool) -> None:
    """The disk is full: failed saves cost nothing, failures for too long end the run; then it resumes exactly."""
    for background in ("true", "false") if full else ("true",):
        reference, more = bench.reference(), {"hook": "full_disk", "checkpoint__background": background}
        with outcome.attempt():
            run = bench.folder / f"full-disk-briefly-{background}"
            output = bench.run(run, plant={"STEP": 4, "COUNT": 2}, **more)
            assert output.count("No space left on device") == 2, f"{run.name}: {output[-300:]}"
            bench.check_equal(run, reference)
        with outcome.attempt():
            run = bench.folder / f"full-disk-long-{background}"
            plant = {"STEP": 4, "COUNT": 99, "MINUTES": 0}
            bench.run(run, 1, "no checkpoint could be written", plant=plant, **more)
            assert newest_step(run) == 3, f"{run.name}: the newest is {newest_step(run)}"
            bench.check_resumed(run, reference)


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[bool]:
    """A small file system. It needs root; elsewhere it is left out."""
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    is_mounted = subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def disk_full_for_a_while(bench: Bench, outcome: Outcome, rounds: int, full_s: float) -> None:
    """A file system fills up in the middle of a run and has room again later: the run completes with all records."""
    step_s = 0.1
    settings = {"epochs": int((full_s + 3) / (step_s * tiny.STEPS_PER_EPOCH)) + 2}
    mount = bench.new_folder()
    with mounted(mount, "size=8m") as is_mounted:
        if not is_mounted:
            pytest.skip("cannot mount a file system")
        for number in range(rounds):
            run, reference = mount / f"full-for-a-while-{number}", bench.reference(**settings)
            running = bench.start(run, "slow_steps", {"MS": int(1000 * step_s)}, **settings)
            wait_for(run / "metrics.jsonl", content="train")
            time.sleep(outcome.random.uniform(0, 1.5))
            fill(mount / "ballast")
            time.sleep(full_s)
            (mount / "ballast").unlink()
            with outcome.attempt():
                assert running.wait() == 0, f"{run.name}: exit code {running.wait()}: {running.output()[-500:]}"
                bench.check_equal(run, reference)


def fill(ballast: Path) -> None:
    """Take all the room of a file system; a record that is written meanwhile leaves no gap."""
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        for size in (2**16, 2**12, 1):
            with contextlib.suppress(OSError):
                while file.write(b"x" * size):
                    pass


# --- the run folder ---------------------------------------------------------------------------------------------------


def shared_or_moved_run_folder(bench: Bench, outcome: Outcome) -> None:
    """A second run in the same folder, TensorBoard reading along, a folder that moves between kill and resume."""
    for row in (second_run, read_along, moved):
        with outcome.attempt():
            row(bench)


def second_run(bench: Bench) -> None:
    run = bench.folder / "shared-shared"
    first, hold = held(bench, run)
    bench.run(run, 2, f"process {first.pid}")
    hold.unlink()
    assert first.wait() == 0, "the first run did not end well"
    bench.check_equal(run, bench.reference())


def read_along(bench: Bench) -> None:
    """Killed and resumed, with a reader of its events throughout: no error, and no step twice."""
    run = bench.folder / "shared-read"
    for kill in (True, False):
        running = bench.start(run, "slow_steps", {"MS": 30}, checkpoint__every_steps=3)
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
    bench.start(run, "signal_after_save", {"STEP": 5, "SIGNAL": int(signal.SIGKILL)}).wait()
    shutil.move(run, elsewhere)
    bench.check_resumed(elsewhere, bench.reference())


def long_run_stays_bounded(bench: Bench, outcome: Outcome, steps: int) -> None:
    """10,000 steps: checkpoints rotate; memory, open files and disk stay bounded."""
    epochs = -(-steps // tiny.STEPS_PER_EPOCH)
    run = bench.folder / "long"
    settings: dict[str, Any] = {"epochs": epochs, "data__workers": 1}
    settings |= {"checkpoint__every_steps": 50, "checkpoint__every_epochs": 0, "evaluate_every": 100, "log_every": 6}
    running = bench.start(run, **settings)
    resident, open_files = [], []
    while running.wait(0.05) is None:
        with contextlib.suppress(OSError, IndexError):  # the process just ended
            open_files.append(len(os.listdir(f"/proc/{running.pid}/fd")))
            resident.append(peak_mib(running.pid, "VmRSS"))
    warm = len(resident) // 3  # start-up, the first epochs and the first checkpoints come before it
    growth = max(resident[warm:]) - resident[warm]
    more_files = max(open_files[warm:]) - max(open_files[:warm])  # not the minimum: a process that ends has closed them
    events = sum(path.stat().st_size for path in run.glob("events.*"))
    checkpoints = len(list((run / "checkpoints").glob("*.pt")))
    with outcome.attempt():
        assert running.wait() == 0, f"exit code {running.wait()}: {running.output()[-400:]}"
        assert growth < 50, f"memory grew by {growth} MiB"
        assert more_files <= 12, f"{more_files} more open files than in the first third"
        assert events < 200 * steps + 500_000, f"{events} bytes of events"
        assert checkpoints <= 4, f"{checkpoints} checkpoints"
        taken = json.loads((run / "summary.json").read_text())["steps"]
        assert taken == epochs * tiny.STEPS_PER_EPOCH, "steps are missing"
