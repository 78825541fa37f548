"""NaN and Inf, a collapsing loss scale, failing loader workers, full disks, shared folders, and a
long run.
"""

import contextlib
import math
import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cl_train.system.checkpoints import load
from tests.faults import plants, tiny
from tests.faults.bench import Bench, mounted, peak_mib, wait_for
from tests.processes import children_of

pytestmark = pytest.mark.slow


def test_nan_in_loss_or_gradient(bench: Bench) -> None:
    """NaN or Inf planted in the loss, in a gradient, in one rank only; policies stop and skip."""
    losses = [(plants.bad_loss, "nan"), (plants.bad_gradient, "inf"), (plants.bad_loss, "inf")]
    for plant, value in [(plants.bad_gradient, "nan"), *bench.count((), losses)]:
        hook, name = partial(plant, float(value), range(5, 6)), f"{plant.__name__}-{value}"
        with bench.attempt():
            run = bench.folder / f"{name}-stop"
            bench.run(run, hook, code=1, said="at step 5 on rank 0", on_nonfinite="stop")
            state, before = (
                load(run / f"checkpoints/step-{step:08d}.pt") for step in (tiny.newest_step(run), 4)
            )
            for key, tensor in state["model"].items():
                if "running" not in key and "num_b" not in key:
                    assert torch.equal(tensor, before["model"][key]), f"{run.name}: {key} changed"
        with bench.attempt():
            run = bench.folder / f"{name}-skip"
            bench.run(run, hook, on_nonfinite="skip", max_nonfinite=2)
            state = tiny.final_state(run)
            assert state["progress"]["skipped_steps"] == 1, (
                f"{run.name}: {state['progress']['skipped_steps']} skipped"
            )
            assert all(tensor.isfinite().all() for tensor in state["model"].values()), run.name
        with bench.attempt():  # all ranks stop together
            run = bench.folder / f"{name}-rank1"
            ranks = bench.start_ranks(run, 2, partial(plants.on_rank, 1, hook), on_nonfinite="stop")
            codes, outputs = [rank.wait() for rank in ranks], [rank.output() for rank in ranks]
            assert codes == [1, 1], f"{run.name}: {codes}: {outputs[0][-500:]}"
            for output in outputs:
                assert "at step 5 on rank" in output, f"{run.name}: {output[-400:]}"
            if plant == plants.bad_loss:
                assert "on rank 1" in outputs[0], (
                    f"{run.name}: rank 0 does not name rank 1: {outputs[0][-400:]}"
                )
    with bench.attempt():
        hook, skip = (
            partial(plants.bad_loss, float("nan"), range(3, 8)),
            {"on_nonfinite": "skip", "max_nonfinite": 2},
        )
        bench.run(bench.folder / "bad-too-many", hook, code=1, said="max_nonfinite=2", **skip)
    with (
        bench.attempt()
    ):  # NaN images pass BatchNorm before the loss is known: its statistics must stay finite
        bench.run(
            bench.folder / "bad-images",
            partial(plants.bad_images, range(5, 6)),
            on_nonfinite="skip",
        )
        state = tiny.final_state(bench.folder / "bad-images")
        for name, tensor in [*state["model"].items(), *state["average"].items()]:
            assert tensor.isfinite().all(), f"{name} is not finite"


def test_loss_scale_collapse(bench: Bench) -> None:
    """Gradients that overflow at every scale: stops within 20 steps with advice, never ends as a
    success.
    """
    hook = partial(plants.bad_gradient, math.inf, range(1, 10_001))
    for scale in bench.count((4.0,), (4.0, 1.0, 1024.0)):
        with bench.attempt():
            run, settings = (
                bench.folder / f"scale-{scale:g}",
                {"precision": "fp16", "amp__init_scale": scale},
            )
            output = bench.run(run, hook, code=1, said="loss scale fell", epochs=20, **settings)
            steps = 2 * sum("Epoch:" in line for line in output.splitlines())
            assert steps <= 20, f"{run.name}: stopped after {steps} steps"
            assert "precision=bf16" in output, f"{run.name}: no advice"


def test_failing_loader_worker(bench: Bench) -> None:
    """A loader worker is killed, hangs, raises, or leaves: the run ends in bounded time and names
    it.
    """
    for number in range(bench.count(1, 5)):
        for signum, said, timeout_s in (
            (signal.SIGKILL, "signal 9", 300),
            (signal.SIGSTOP, "worker", 10),
        ):
            run, settings = (
                bench.folder / f"worker-{signum}-{number}",
                {"data__worker_timeout_s": timeout_s},
            )
            running = bench.start(
                run, partial(plants.slow_steps, 20), data__workers=2, epochs=10_000, **settings
            )
            with bench.attempt():
                wait_for(run / "checkpoints", content=".pt")
                time.sleep(bench.random.uniform(0, 0.2))
                workers = children_of(running.pid)[:2]  # those of the validation images start later
                assert len(workers) == 2, f"{run.name}: {len(workers)} workers found"
                # one that is stopped while it has no task does no harm: the other one takes all
                hit = workers if signum == signal.SIGSTOP else [bench.random.choice(workers)]
                for worker in hit:
                    os.kill(worker, signum)
                started = time.monotonic()
                code, output = running.wait(), running.output()
                seconds = time.monotonic() - started
                is_told = all(words in output for words in ("the run failed", ".JPEG", said))
                is_told &= "Traceback" not in output
                assert code == 1 and is_told, f"{run.name}: exit code {code}, says {output[-500:]}"
                tiny.check_loadable(run)
                assert seconds <= bench.patience * 10, f"{run.name}: {seconds:.1f} s to the end"
            running.kill_group()
        for leaves, said in (
            (False, "the run failed.*planted"),
            (True, r"the run failed.*exited with 3(.|\n)*\.JPEG"),
        ):
            run, hook = (
                bench.folder / f"worker-{leaves}-{number}",
                partial(plants.bad_worker, leaves=leaves),
            )
            with bench.attempt():
                bench.run(
                    run,
                    partial(hook, bench.random.randrange(5, 40)),
                    code=1,
                    said=said,
                    data__workers=2,
                )
                tiny.check_loadable(run)


def test_disk_full_in_training_run(bench: Bench) -> None:
    """The disk is full: failed saves cost nothing, failures for too long end the run; then it
    resumes exactly.
    """
    reference = bench.reference()
    for background in bench.count(("true",), ("true", "false")):
        with bench.attempt():
            run, hook = (
                bench.folder / f"full-disk-briefly-{background}",
                partial(plants.full_disk, range(4, 6)),
            )
            output = bench.run(run, hook, checkpoint__background=background)
            assert output.count("No space left on device") == 2, f"{run.name}: {output[-300:]}"
            tiny.check_equal(run, reference)
        with bench.attempt():
            run, hook = (
                bench.folder / f"full-disk-long-{background}",
                partial(plants.full_disk, range(4, 103), 0),
            )
            bench.run(
                run,
                hook,
                code=1,
                said="no checkpoint could be written",
                checkpoint__background=background,
            )
            assert tiny.newest_step(run) == 3, f"{run.name}: the newest is {tiny.newest_step(run)}"
            bench.check_resumed(run, reference)


def test_disk_full_for_a_while(bench: Bench) -> None:
    """A file system fills up in the middle of a run and has room again later: the run completes
    with all records.
    """
    (rounds, full_s), step_s, mount = bench.count((1, 1.0), (5, 30.0)), 0.1, bench.new_folder()
    settings = {"epochs": int((full_s + 3) / (step_s * tiny.STEPS_PER_EPOCH)) + 2}
    with mounted(mount, "size=8m") as is_mounted:
        if not is_mounted:
            pytest.skip("cannot mount a file system")
        for number in range(rounds):
            run, reference = mount / f"full-for-a-while-{number}", bench.reference(**settings)
            running = bench.start(run, partial(plants.slow_steps, int(1000 * step_s)), **settings)
            wait_for(run / "metrics.jsonl", content="train")
            time.sleep(bench.random.uniform(0, 1.5))
            fill(mount / "ballast")
            time.sleep(full_s)
            (mount / "ballast").unlink()
            with bench.attempt():
                assert running.wait() == 0, (
                    f"{run.name}: exit code {running.wait()}: {running.output()[-500:]}"
                )
                tiny.check_equal(run, reference)


def fill(ballast: Path) -> None:
    """Take all the room of a file system; a record that is written meanwhile leaves no gap."""
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        for size in (2**16, 2**12, 1):
            with contextlib.suppress(OSError):
                while file.write(b"x" * size):
                    pass


@pytest.mark.filterwarnings("ignore")
def test_shared_or_moved_run_folder(bench: Bench) -> None:
    """A second run in the same folder, TensorBoard reading along, a folder that moves between kill
    and resume.
    """
    with bench.attempt():
        run = bench.folder / "shared-shared"
        first, hold = bench.hold(run)
        bench.run(run, code=2, said=f"process {first.pid}")
        hold.unlink()
        assert first.wait() == 0, "the first run did not end well"
        tiny.check_equal(run, bench.reference())
    with (
        bench.attempt()
    ):  # killed and resumed, with a reader of its events throughout: no error, and no step twice
        run = bench.folder / "shared-read"
        for kill in (True, False):
            running = bench.start(run, partial(plants.slow_steps, 30), checkpoint__every_steps=3)
            wait_for(run / "checkpoints", content=".pt")
            deadline = time.monotonic() + (0.15 if kill else 20)
            while time.monotonic() < deadline and running.wait(0) is None:
                check_events(run)
            if kill:
                running.send(signal.SIGKILL)
            running.wait()
        assert "train/loss" in check_events(run), "no train/loss in the events"
    with bench.attempt():
        run, elsewhere = bench.folder / "shared-here", bench.folder / "shared-moved"
        bench.start(run, partial(plants.signal_after_save, 5, signal.SIGKILL)).wait()
        shutil.move(run, elsewhere)
        bench.check_resumed(elsewhere, bench.reference())


def check_events(run: Path) -> list[str]:
    """Every tag has each step once; returns the tags."""
    events = EventAccumulator(str(run), purge_orphaned_data=True).Reload()
    tags: list[str] = events.Tags()["scalars"]
    for tag in tags:
        steps = [event.step for event in events.Scalars(tag)]
        assert steps == sorted(set(steps)), f"{tag}: steps {steps}"
    return tags


def test_long_run_stays_bounded(bench: Bench) -> None:
    """10,000 steps: checkpoints rotate; memory, open files and disk stay bounded."""
    steps, run = bench.count(None, 10_000), bench.folder / "long"
    epochs = -(-steps // tiny.STEPS_PER_EPOCH)
    settings: dict[str, Any] = {"epochs": epochs, "data__workers": 1}
    settings |= {
        "checkpoint__every_steps": 50,
        "checkpoint__every_epochs": 0,
        "evaluate_every": 100,
        "log_every": 6,
    }
    running = bench.start(run, **settings)
    resident, open_files = [], []
    while running.wait(0.05) is None:
        with contextlib.suppress(OSError, IndexError):  # the process just ended
            open_files.append(len(os.listdir(f"/proc/{running.pid}/fd")))
            resident.append(peak_mib(running.pid, "VmRSS"))
    warm = len(resident) // 3  # start-up, the first epochs and the first checkpoints come before it
    growth = max(resident[warm:]) - resident[warm]
    more_files = max(open_files[warm:]) - max(
        open_files[:warm]
    )  # not the minimum: a process that ends has closed them
    events = sum(path.stat().st_size for path in run.glob("events.*"))
    checkpoints = len(list((run / "checkpoints").glob("*.pt")))
    with bench.attempt():
        assert running.wait() == 0, f"exit code {running.wait()}: {running.output()[-400:]}"
        assert growth < 50, f"memory grew by {growth} MiB"
        assert more_files <= 12, f"{more_files} more open files than in the first third"
        assert events < 200 * steps + 500_000, f"{events} bytes of events"
        assert checkpoints <= 4, f"{checkpoints} checkpoints"
        assert tiny.summary(run)["steps"] == epochs * tiny.STEPS_PER_EPOCH, "steps are missing"
