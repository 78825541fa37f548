"""Several ranks: one is killed or has NaN, or their number changes."""

import signal
from functools import partial

import pytest
from torch.distributed.run import main as run_agent

from tests.faults import plants, tiny
from tests.faults.bench import wait_for
from tests.faults.forkserver import REPOSITORY
from tests.processes import Process, children_of, wait_until
from tests.ranks import losses

pytestmark = pytest.mark.slow
WITHOUT_BATCHNORM = {"model": "tests.networks:without_batchnorm", "ema_decay": 0, "log_every": 1}


def test_kill_one_of_two_ranks(bench):
    """One of two ranks killed in a step: the other ends by itself; both resume exactly."""
    reference = bench.reference(world=2)
    for number in range(bench.count(1, 20)):
        run, victim = bench.folder / f"killed-rank-{number}", bench.random.choice((0, 1))
        hold = run.with_suffix(".hold")
        hook = partial(plants.hold_step, hold, bench.random.randint(1, 6))
        with bench.attempt():
            ranks = bench.start_ranks(run, 2, partial(plants.on_rank, victim, hook))
            wait_for(hold)
            ranks[victim].send(signal.SIGKILL)
            ranks[victim].wait()
            assert ranks[1 - victim].wait() is not None, f"{run.name}: the other rank still ran"
            output = ranks[1 - victim].output()
            assert "another rank died or hangs" in output and "Traceback" not in output, output
            tiny.check_loadable(run)
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
            expected = pytest.approx(dict(losses(reference)), rel=1e-5, abs=0)
            assert dict(losses(run)) == expected, run.name


def test_kill_torchrun_agent(bench):
    """The agent of the real torchrun is killed by SIGKILL or SIGUSR1: its ranks end."""
    for number in range(bench.count(1, 10)):
        with bench.attempt():
            run = bench.folder / f"torchrun-agent-{number}"
            words = bench.words(run, batch_size=4, epochs=10_000)
            program = ["--standalone", "--nproc-per-node=2", str(REPOSITORY / "train.py"), *words]
            agent = bench.fork(partial(run_agent, program))
            wait_for(run / "checkpoints", content=".pt")
            ranks = [Process(pid) for pid in children_of(agent.pid)]
            assert len(ranks) == 2
            agent.send((signal.SIGKILL, signal.SIGUSR1)[number % 2])
            agent.wait()
            for rank in ranks:
                wait_until(lambda rank=rank: not rank.is_running())
            tiny.check_loadable(run)
