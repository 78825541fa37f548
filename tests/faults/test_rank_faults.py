"""Several ranks: one is killed or has NaN, or their number changes."""

import signal
import time
from functools import partial

import pytest
from torch.distributed.run import main as run_agent

from tests.faults import plants, tiny
from tests.faults.bench import MAX_ORPHAN_S, check_ended, wait_for
from tests.faults.forkserver import REPOSITORY
from tests.processes import children_of, fields_of

pytestmark = pytest.mark.slow
MAX_END_S = 10.0
WITHOUT_BATCHNORM = {"model": "tests.networks:without_batchnorm", "ema_decay": 0, "log_every": 1}


def test_kill_one_of_two_ranks(bench):
    """One of two ranks killed at a random instant, without --full in a step.

    The other ends at once; both resume exactly.
    """
    reference = bench.reference(world=2)
    ms = 60 * bench.is_full  # so that most of a run's life is training
    seconds = bench.seconds + 0.001 * ms * tiny.STEPS
    for number in bench.numbers_until(bench.count(1, 20)):
        run, victim = bench.folder / f"killed-rank-{number}", bench.random.choice((0, 1))
        hooks = [partial(plants.slow_steps, ms)]
        hold = run.with_suffix(".hold")
        if not bench.is_full:
            hooks.append(partial(plants.on_rank, victim, partial(plants.hold_step, hold)))
        ranks = bench.start_ranks(run, 2, *hooks)
        wait_for(run / "config.yaml" if bench.is_full else hold)  # the ranks have met
        if bench.is_full:
            time.sleep(bench.random.uniform(0, 1.0) * seconds)
        ranks[victim].send(signal.SIGKILL)
        code = ranks[victim].wait()
        other = ranks[1 - victim].wait(bench.patience * MAX_END_S)
        for rank in ranks:
            rank.kill_group()
        if code == 0 or other == 0:  # it ended before the kill
            continue
        with bench.attempt():
            tiny.check_loadable(run)
            assert other is not None, f"{run.name}: the other rank still ran"
            output = ranks[1 - victim].output()
            is_said = "another rank died or hangs" in output and "Traceback" not in output
            assert is_said or not tiny.newest_step(run), output[-600:]
            bench.check_resumed(run, reference, world=2)


def test_nan_in_gradient(bench):
    """NaN in a gradient of one of two ranks: both stop at its step, weights unchanged."""
    with bench.attempt():
        run, hook = bench.folder / "nan-rank1", partial(plants.bad_gradient, at_step=5)
        of_one = partial(plants.on_rank, 1, hook)
        ranks = bench.start_ranks(run, 2, of_one, on_nonfinite="stop")
        codes, outputs = [rank.wait() for rank in ranks], [rank.output() for rank in ranks]
        assert codes == [1, 1], f"{codes}: {outputs[0][-500:]}"
        # The gradients of both ranks are bad after their exchange.
        assert all("at step 5 on rank" in output for output in outputs), outputs[0][-400:]
        assert tiny.newest_step(run) == 4


def test_resume_with_other_number_of_ranks(bench):
    """1 -> 2 -> 4 -> 1 ranks at the same global batch: the same order, losses equal to 1e-5."""
    reference = bench.reference(**WITHOUT_BATCHNORM)
    for chain in [(1, 2), (2, 1), *bench.count((), [(1, 2, 4, 1), (4, 1), (2, 4), (1, 4)])]:
        run = bench.folder / f"ranks-{'-'.join(map(str, chain))}"
        with bench.attempt():
            for place, world in enumerate(chain[:-1]):
                hook = partial(plants.signal_after_save, 2 * place + 2, signal.SIGTERM)
                bench.run(run, hook, code=143, world=world, **WITHOUT_BATCHNORM)
            bench.run(run, world=chain[-1], **WITHOUT_BATCHNORM)
            expected = pytest.approx(tiny.losses(reference), rel=1e-5, abs=0)
            assert tiny.losses(run) == expected, run.name


def test_kill_torchrun_agent(bench):
    """The agent of the real torchrun is killed by SIGKILL or SIGUSR1: its ranks end."""
    for number in range(bench.count(1, 10)):
        with bench.attempt():
            run = bench.folder / f"torchrun-agent-{number}"
            words = bench.words(run, batch_size=4, epochs=10_000)
            program = ["--standalone", "--nproc-per-node=2", str(REPOSITORY / "train.py"), *words]
            agent = bench.fork(partial(run_agent, program))
            wait_for(run / "checkpoints", content=".pt")
            ranks = children_of(agent.pid)
            time.sleep(bench.random.uniform(0, 0.5))
            agent.send((signal.SIGKILL, signal.SIGUSR1)[number % 2])
            agent.wait()
            check_ended(partial(running_of, ranks), bench.patience * MAX_ORPHAN_S)
            assert len(ranks) == 2
            tiny.check_loadable(run)


def running_of(pids):
    return [pid for pid in pids if fields_of(pid)[:1] not in ([], ["Z"])]
