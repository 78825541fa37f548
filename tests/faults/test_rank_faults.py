"""Several ranks, one of which is killed or stopped, or whose number changes."""

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
RANK_TIMEOUT_S = 20.0  # when a rank counts as hung; on a busy machine a sound one is slow
ROLL_CALL_S = 5.0
WITHOUT_BATCHNORM = {"model": "tests.networks:without_batchnorm", "ema_decay": 0, "log_every": 1}


def test_kill_one_of_two_ranks(bench):
    """One of two ranks killed at a random instant, without --full in a step.

    The other names it and ends; both resume exactly.
    """
    reference = bench.reference(world=2)
    ms = 60 * bench.is_full  # so that most of a run's life is training, not start-up
    seconds = bench.seconds + 0.001 * ms * tiny.STEPS
    for number in bench.numbers_until(bench.count(1, 20)):
        run, victim = bench.folder / f"killed-rank-{number}", bench.random.choice((0, 1))
        answer_s = 60 if victim == 1 and not bench.is_full else 3
        hooks = [partial(plants.slow_steps, ms, answer_s=answer_s)]
        hold = run.with_suffix(".hold")
        if not bench.is_full:
            hooks.append(partial(plants.on_rank, victim, partial(plants.hold_step, hold)))
        ranks = bench.start_ranks(run, 2, *hooks, rank_timeout_s=RANK_TIMEOUT_S)
        if bench.is_full:
            time.sleep(bench.random.uniform(0.2, 1.0) * seconds)
        else:
            wait_for(hold)
        ranks[victim].send(signal.SIGKILL)
        code = ranks[victim].wait()
        other = ranks[1 - victim].wait(bench.patience * (RANK_TIMEOUT_S + ROLL_CALL_S + 5))
        for rank in ranks:
            rank.kill_group()
        if code == 0 or other == 0:  # it ended before the kill
            continue
        with bench.attempt():
            tiny.check_loadable(run)
            assert other is not None, f"{run.name}: the other rank still ran"
            output = ranks[1 - victim].output()
            is_named = f"rank {victim} is dead or hangs" in output
            assert is_named or not tiny.newest_step(run), output[-600:]
            bench.check_resumed(run, reference, world=2)


def test_hang_one_of_two_ranks(bench):
    """One of two ranks stopped (SIGSTOP): the other names it and ends in bounded time."""
    for number in range(bench.count(1, 3)):
        run, victim = bench.folder / f"hung-rank-{number}", number % 2
        settings = {"epochs": 10_000, "rank_timeout_s": RANK_TIMEOUT_S}
        ranks = bench.start_ranks(run, 2, partial(plants.slow_steps, 30), **settings)
        wait_for(run / "checkpoints", content=".pt")
        ranks[victim].send(signal.SIGSTOP)
        other = ranks[1 - victim].wait(bench.patience * (RANK_TIMEOUT_S + ROLL_CALL_S + 10))
        ranks[victim].kill_group()
        ranks[victim].wait()
        output = ranks[1 - victim].output()
        with bench.attempt():
            is_named = f"rank {victim} is dead or hangs" in output
            assert other == 1 and is_named, f"{run.name}: {other}: {output[-700:]}"
            tiny.check_loadable(run)


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
            words = bench.words(run, rank_timeout_s=RANK_TIMEOUT_S, batch_size=4, epochs=10_000)
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
