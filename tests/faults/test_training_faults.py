"""NaN and Inf, a collapsing loss scale, failing loader workers, full disks, shared folders, a long
run.
"""

import contextlib
import math
import os
import shutil
import signal
import time
from functools import partial

import pytest
import torch

from cl_train.system.checkpoints import load
from tests.faults import plants, tiny
from tests.faults.bench import peak_mib, wait_for
from tests.processes import children_of

pytestmark = pytest.mark.slow


def test_nan_in_loss_or_gradient(bench):
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
            assert tiny.final_state(run)["progress"]["skipped_steps"] == 1
            check_finite(run)
        with bench.attempt():  # all ranks stop together
            run = bench.folder / f"{name}-rank1"
            ranks = bench.start_ranks(run, 2, partial(plants.on_rank, 1, hook), on_nonfinite="stop")
            codes, outputs = [rank.wait() for rank in ranks], [rank.output() for rank in ranks]
            assert codes == [1, 1], f"{run.name}: {codes}: {outputs[0][-500:]}"
            # The gradients of both ranks are bad after their exchange.
            named = "at step 5 on rank 1" if plant == plants.bad_loss else "at step 5 on rank"
            assert all(named in output for output in outputs), f"{run.name}: {outputs[0][-400:]}"
    with bench.attempt():
        hook = partial(plants.bad_loss, float("nan"), range(3, 8))
        skip = {"on_nonfinite": "skip", "max_nonfinite": 2}
        bench.run(bench.folder / "bad-too-many", hook, code=1, said="max_nonfinite=2", **skip)
    with bench.attempt():  # NaN images pass BatchNorm before the loss is known
        run = bench.folder / "bad-images"
        bench.run(run, partial(plants.bad_images, range(5, 6)), on_nonfinite="skip")
        check_finite(run)


def check_finite(run):
    state = tiny.final_state(run)
    for name, tensor in [*state["model"].items(), *state["average"].items()]:
        assert tensor.isfinite().all(), f"{run.name}: {name} is not finite"


def test_loss_scale_collapse(bench):
    """Gradients that overflow at every scale: stops within 20 steps, with advice."""
    hook = partial(plants.bad_gradient, math.inf, range(1, 10_001))
    for scale in bench.count((4.0,), (4.0, 1.0, 1024.0)):
        with bench.attempt():
            run = bench.folder / f"scale-{scale:g}"
            settings = {"precision": "fp16", "amp__init_scale": scale, "epochs": 20}
            output = bench.run(run, hook, code=1, said="loss scale fell", **settings)
            assert output.count("Epoch:") <= 10, f"{run.name}: stopped after more than 20 steps"
            assert "precision=bf16" in output, f"{run.name}: no advice"


def test_failing_loader_worker(bench):
    """A loader worker is killed, hangs, raises, or leaves: the run ends in bounded time and names
    it.
    """
    for number in range(bench.count(1, 5)):
        for signum, said, timeout_s in (
            (signal.SIGKILL, "signal 9", 300),
            (signal.SIGSTOP, "worker", 10),
        ):
            run = bench.folder / f"worker-{signum}-{number}"
            settings = {"data__worker_timeout_s": timeout_s, "data__workers": 2, "epochs": 10_000}
            running = bench.start(run, partial(plants.slow_steps, 20), **settings)
            with bench.attempt():
                wait_for(run / "checkpoints", content=".pt")
                time.sleep(bench.random.uniform(0, 0.2))
                workers = children_of(running.pid)[:2]  # those of the validation images start later
                assert len(workers) == 2, f"{run.name}: {len(workers)} workers found"
                # One that is stopped while it has no task does no harm: the other one takes all.
                hit = workers if signum == signal.SIGSTOP else [bench.random.choice(workers)]
                for worker in hit:
                    os.kill(worker, signum)
                code, output = running.wait(bench.patience * 15), running.output()
                is_told = all(words in output for words in ("the run failed", ".JPEG", said))
                is_told &= "Traceback" not in output
                assert code == 1 and is_told, f"{run.name}: exit code {code}, says {output[-500:]}"
                tiny.check_loadable(run)
            running.kill_group()
        for leaves, said in (
            (False, "the run failed.*planted"),
            (True, r"the run failed.*exited with 3(.|\n)*\.JPEG"),
        ):
            run = bench.folder / f"worker-{leaves}-{number}"
            hook = partial(plants.bad_worker, bench.random.randrange(5, 40), leaves=leaves)
            with bench.attempt():
                bench.run(run, hook, code=1, said=said, data__workers=2)
                tiny.check_loadable(run)


def test_disk_full_in_training_run(bench):
    """The disk is full: failed saves cost nothing, failures for too long end the run; then it
    resumes exactly.
    """
    reference = bench.reference()
    for background in bench.count(("true",), ("true", "false")):
        settings = {"checkpoint__background": background}
        with bench.attempt():
            run = bench.folder / f"full-disk-briefly-{background}"
            output = bench.run(run, partial(plants.full_disk, range(4, 6)), **settings)
            assert output.count("No space left on device") == 2, f"{run.name}: {output[-300:]}"
            tiny.check_equal(run, reference)
        with bench.attempt():
            run = bench.folder / f"full-disk-long-{background}"
            said = "no checkpoint could be written"
            hook = partial(plants.full_disk, range(4, 103), minutes=0)
            bench.run(run, hook, code=1, said=said, **settings)
            assert tiny.newest_step(run) == 3, f"{run.name}: the newest is {tiny.newest_step(run)}"
            bench.check_resumed(run, reference)


def test_shared_or_moved_run_folder(bench):
    """A second run in the same folder, and a folder that moves between kill and resume."""
    with bench.attempt():
        run = bench.folder / "shared-shared"
        first, hold = bench.hold(run)
        bench.run(run, code=2, said=f"process {first.pid}")
        hold.unlink()
        assert first.wait() == 0, "the first run did not end well"
        tiny.check_equal(run, bench.reference())
    with bench.attempt():
        run, elsewhere = bench.folder / "shared-here", bench.folder / "shared-moved"
        bench.start(run, partial(plants.signal_after_save, 5, signal.SIGKILL)).wait()
        shutil.move(run, elsewhere)
        bench.check_resumed(elsewhere, bench.reference())


def test_long_run_stays_bounded(bench):
    """10,000 steps: checkpoints rotate; memory, open files and disk stay bounded."""
    steps, run = bench.count(None, 10_000), bench.folder / "long"
    epochs = -(-steps // tiny.STEPS_PER_EPOCH)
    settings = {"epochs": epochs, "data__workers": 1, "log_every": 6}
    settings |= {"checkpoint__every_steps": 50, "checkpoint__every_epochs": 0}
    running = bench.start(run, evaluate_every=100, **settings)
    resident, open_files = [], []
    while running.wait(0.05) is None:
        with contextlib.suppress(OSError, IndexError):  # the process just ended
            open_files.append(len(os.listdir(f"/proc/{running.pid}/fd")))
            resident.append(peak_mib(running.pid, "VmRSS"))
    warm = len(resident) // 3  # start-up, the first epochs and the first checkpoints come before it
    growth = max(resident[warm:]) - resident[warm]
    more_files = max(open_files[warm:]) - max(open_files[:warm])
    events = sum(path.stat().st_size for path in run.glob("events.*"))
    checkpoints = len(list((run / "checkpoints").glob("*.pt")))
    with bench.attempt():
        assert running.wait() == 0, f"exit code {running.wait()}: {running.output()[-400:]}"
        assert growth < 50, f"memory grew by {growth} MiB"
        assert more_files <= 12, f"{more_files} more open files than in the first third"
        assert events < 200 * steps + 500_000, f"{events} bytes of events"
        assert checkpoints <= 4, f"{checkpoints} checkpoints"
        assert tiny.summary(run)["steps"] == epochs * tiny.STEPS_PER_EPOCH, "steps are missing"
