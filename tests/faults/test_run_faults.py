"""Whole runs killed, stopped and resumed, and compared with undisturbed ones."""

import signal
import time
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch

from tests.faults import plants, tiny
from tests.faults.bench import wait_for
from tests.processes import send_and_wait

pytestmark = pytest.mark.slow
UNSAVED = {"checkpoint__every_steps": 0}


def test_kill_training_run(bench):
    """SIGKILL of a whole run at random instants, else in a step; `resume=auto` until done.

    A try is one kill of a live process.
    """
    choice = bench.random.choice
    for number in bench.numbers_until(bench.count(1, 100)):
        undisturbed = {"channels_last": choice(("true", "false")), "log_every": choice((1, 3))}
        undisturbed |= {"epochs": 3}
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
            if code == 0:  # before the kill
                continue
            with bench.attempt():
                assert code == -signal.SIGKILL, f"{run.name}: {code}: {running.output()[-500:]}"
                tiny.check_loadable(run)
                before, saved = saved, tiny.newest_step(run)
                assert saved >= before, f"{run.name}: step {before} is gone"
        with bench.attempt():
            bench.check_resumed(run, reference, **settings)
        bench.tried -= 1  # the end of the run is no try of its own


def test_stop_signal_in_training(bench):
    """SIGTERM and SIGINT at a random instant of training, without --full in a step: 143 or 130,
    saved at that step, resumed exactly.
    """
    reference = bench.reference()
    for number in bench.numbers_until(bench.count(1, 50)):
        signum = bench.random.choice((signal.SIGTERM, signal.SIGINT))
        run = bench.folder / f"signal-{number}"
        settings = UNSAVED | {"data__workers": bench.random.choice((0, 2))}
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
            told = f"{run.name}: exit code {code} after {seconds:.1f} s: {running.output()[-300:]}"
            assert code == 128 + signum and seconds <= bench.patience * 5, told
            assert "Traceback" not in running.output(), told
            summary, saved = tiny.summary(run), tiny.newest_step(run)
            assert (summary["status"], summary["steps"]) == ("interrupted", saved), told
            bench.check_resumed(run, reference, **UNSAVED)


def test_other_signals_in_training(bench):
    """A second Ctrl-C in a step, Ctrl-C before the first step, and SIGUSR1."""
    reference = bench.reference()
    with bench.attempt():  # the step does not end; the second Ctrl-C does not wait for it
        running, _ = bench.hold(bench.folder / "signal-second")
        running.send(signal.SIGINT)
        wait_for(running.log, content="stopping")
        running.send(signal.SIGINT)
        assert running.wait(bench.patience) == 130
    with bench.attempt():  # one line, no traceback
        running = bench.start(bench.folder / "signal-early", plants.slow_data)
        wait_for(running.log, content="reading the data")
        running.send(signal.SIGINT)
        code, output = running.wait(), running.output()
        assert code == 130 and "stopped before the first step" in output, output
        assert "Traceback" not in output
    with bench.attempt():  # SIGUSR1 saves in mid-epoch, and the run goes on
        run = bench.folder / "signal-usr1"
        running, hold = bench.hold(run, checkpoint__every_epochs=0, **UNSAVED)
        send_and_wait(running.pid, signal.SIGUSR1)
        hold.unlink()
        assert running.wait() == 0 and (run / "checkpoints/step-00000003.pt").is_file()
        tiny.check_equal(run, reference)


def test_resume_at_every_step(bench):
    """A run ended at each step by SIGKILL and by SIGTERM, for each number of workers, resumed."""
    reference, workers = bench.reference(), bench.count((0,), (0, 2))
    steps = bench.count((5,), range(1, tiny.STEPS + 1))
    for count, step, signum in product(workers, steps, (signal.SIGKILL, signal.SIGTERM)):
        with bench.attempt():
            run = bench.folder / f"resume-{count}-{step}-{signum}"
            hook = partial(plants.signal_after_save, step, signum)
            code = bench.start(run, hook, data__workers=count).wait()
            is_last = signum == signal.SIGTERM and step == tiny.STEPS
            expected = -signum if signum == signal.SIGKILL else 143
            assert code == expected or (is_last and code == 0), f"{run.name}: exit code {code}"
            assert step <= tiny.newest_step(run) <= step + 1, run.name
            bench.check_resumed(run, reference, data__workers=count)


def test_resume_with_other_layout_or_precision(bench):
    """Layout, precision or workers change at each resume after a kill, against the first form."""
    changes = [
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
        run = bench.folder / f"changed-{'-'.join(map(str, values))}"
        reference = bench.reference(**{key: values[0]})
        with bench.attempt():
            for number, value in enumerate(values, start=1):
                is_channels_last = (key, value) == ("channels_last", "true")
                layout = torch.channels_last if is_channels_last else torch.contiguous_format
                hooks = [partial(plants.check_layout, layout)]
                is_last = number == len(values)
                if not is_last:
                    kill = partial(plants.signal_after_save, 3 * number, signal.SIGKILL)
                    hooks.insert(0, kill)
                bench.run(run, *hooks, code=0 if is_last else -signal.SIGKILL, **{key: value})
            if tolerance == 0:
                changes_told = [f"workers: {old} -> {new}" for old, new in pairwise(values)]
                tiny.check_equal(run, reference, resumed_with=changes_told)
            else:
                expected = pytest.approx(tiny.losses(reference), rel=tolerance, abs=0)
                assert tiny.losses(run) == expected, run.name


# --- in evaluation --------------------------------------------------------------------------------

EVAL_MS = 200  # per validation batch
STOP_S = 2.0  # from a signal in an evaluation to the end, beside one validation batch
EVALUATED = {"model": "tests.faults.plants:Slow", **UNSAVED}


def test_end_in_evaluation(bench):
    """SIGKILL, SIGTERM or SIGINT in the evaluation of the model or of its moving average, with 1
    and 2 ranks: ends soon, the epoch is saved, the run resumes exactly.
    """
    environment = {"PLANT_EVAL_MS": str(EVAL_MS)}
    for world, signum in product((1, 2), (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)):
        if (world, signum) == (2, signal.SIGKILL):
            continue  # test_rank_faults.py
        for number in bench.numbers_until(bench.count(1, 5)):
            run = bench.folder / f"evaluation-{world}-{signum}-{number}"
            environment["PLANT_MARKER"] = marker = f"{run}.marker"
            ranks = bench.start_ranks(run, world, environment=environment, **EVALUATED)
            wait_for(Path(f"{marker}.ema" if number % 2 else marker))
            time.sleep(bench.random.uniform(0.0, 0.001 * EVAL_MS))
            sent = time.monotonic()
            for rank in ranks:  # torchrun passes a signal on to all ranks
                rank.send(signum)
            codes, seconds = [rank.wait() for rank in ranks], time.monotonic() - sent
            if tiny.summary(run).get("status") == "completed":
                continue
            with bench.attempt():
                told = f"{run.name}: {codes} after {seconds:.1f} s: {ranks[0].output()[-400:]}"
                expected = -signum if signum == signal.SIGKILL else 128 + signum
                assert codes == [expected] * world, told
                assert seconds <= bench.patience * (STOP_S + EVAL_MS / 1000), told
                check_epoch_resumed(bench, run, world)


def check_epoch_resumed(bench, run, world):
    """The first epoch's checkpoint is there, and the run completes as if nothing had happened."""
    epoch_end = run / f"checkpoints/step-{tiny.STEPS_PER_EPOCH:08d}.pt"
    assert epoch_end.is_file(), f"{run.name}: the epoch was not saved before its evaluation"
    bench.check_resumed(run, bench.reference(world, **EVALUATED), world=world, **EVALUATED)
    tiny.check_loadable(run)
