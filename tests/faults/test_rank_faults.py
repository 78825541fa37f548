"""Several ranks, one of which is killed or stopped, or whose number changes."""

import contextlib
import os
import re
import signal
import socket
import time
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from torch.distributed.run import main as run_agent

from tests.faults import plants, tiny
from tests.faults.bench import MAX_ORPHAN_S, check_ended, wait_for
from tests.faults.forkserver import REPOSITORY
from tests.processes import children_of, fields_of, free_ports, wait_until

pytestmark = pytest.mark.slow
RANK_TIMEOUT_S = 20.0  # when a rank counts as hung; on a busy machine a sound one is slow
TORCHRUN_TIMEOUT_S = 15.0  # also the time in which both ranks must have imported torch
ROLL_CALL_S = 5.0
TORCHRUN_GRACE_S = 30.0  # torchrun sends SIGTERM, and SIGKILL half a minute later
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


# --- under the real torchrun ----------------------------------------------------------------------

ONE_NODE = ("--standalone", "--nproc-per-node=2")


def torchrun(bench, run, launcher=ONE_NODE, *, is_slow=True, **settings):
    """The agent of `torchrun --standalone --nproc-per-node=2 train.py ...`."""
    words = bench.words(run, **{"rank_timeout_s": TORCHRUN_TIMEOUT_S, "batch_size": 4} | settings)
    program = ["-m", "tests.faults.plants"] if is_slow else [str(REPOSITORY / "train.py")]
    return bench.fork(partial(run_agent, [*launcher, *program, *words]))


def ranks_of(agent):
    """Rank -> process id, from /proc."""
    found = {}
    for pid in children_of(agent.pid):
        with contextlib.suppress(OSError, StopIteration):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            found[int(next(value[5:] for value in environment if value.startswith(b"RANK=")))] = pid
    return found


def ranks_in_training(agent, run):
    """Both ranks after the first checkpoint."""
    wait_for(run / "checkpoints", content=".pt")
    ranks = ranks_of(agent)
    assert len(ranks) == 2, f"{run.name}: ranks {ranks}: {agent.output()[-1500:]}"
    return ranks


def running_of(ranks):
    return [pid for pid in ranks.values() if fields_of(pid)[:1] not in ([], ["Z"])]


def check_completed(bench, run, agent):
    """The agent ends well, and the run is as if nothing had happened."""
    assert agent.wait() == 0, f"{run.name}: {agent.output()[-1500:]}"
    tiny.check_equal(run, bench.reference(world=2))


def test_rank_fails_under_torchrun(bench):
    """A rank killed, stopped or terminated, and restarts by torchrun: bounded, named, resumed
    exactly.
    """
    bench.count(None, 1)
    with bench.attempt():  # with resume=auto a killed rank costs a restart and nothing else
        run = bench.folder / "torchrun-restarts"
        agent = torchrun(bench, run, (*ONE_NODE, "--max-restarts=2"))
        os.kill(ranks_in_training(agent, run)[1], signal.SIGKILL)
        check_completed(bench, run, agent)
    for signum, victim in product((signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM), (0, 1)):
        with bench.attempt():
            run = bench.folder / f"torchrun-{signum.name}-{victim}"
            agent = torchrun(bench, run)
            ranks = ranks_in_training(agent, run)
            os.kill(ranks[victim], signum)
            code = agent.wait(TORCHRUN_TIMEOUT_S + ROLL_CALL_S + TORCHRUN_GRACE_S + 15)
            agent.send(signal.SIGKILL)
            if signum != signal.SIGTERM:
                assert code, f"{run.name}: exit code {code}"
                named = rf"rank {victim} is dead or hangs|rank\s*:\s*{victim}\b"
                assert re.search(named, agent.output()), agent.output()
            check_ended(partial(running_of, ranks), limit_s=0)
            tiny.check_loadable(run)
            check_completed(bench, run, torchrun(bench, run, is_slow=False))


def test_kill_torchrun_agent(bench):
    """The agent is killed by SIGKILL or SIGUSR1, also while its ranks start: they end, the run is
    resumed exactly.
    """
    for number in range(bench.count(None, 10)):
        with bench.attempt():
            run, starting = bench.folder / f"torchrun-agent-{number}", number % 4 > 1
            # The plants of slow steps import torch first.
            agent = torchrun(bench, run, is_slow=not starting)
            wait_until(lambda: len(ranks_of(agent)) == 2)  # noqa: B023
            ranks = ranks_of(agent) if starting else ranks_in_training(agent, run)
            time.sleep(bench.random.uniform(0, 3.0 if starting else 0.5))
            agent.send((signal.SIGKILL, signal.SIGUSR1)[number % 2])
            agent.wait()
            check_ended(partial(running_of, ranks), MAX_ORPHAN_S)
            check_completed(bench, run, torchrun(bench, run, is_slow=False))


def test_lose_a_node(bench):
    """The second of two elastic agents is killed: the first continues alone, with two micro-steps
    instead of one.
    """
    bench.count(None, 1)
    reference, run = bench.reference(**WITHOUT_BATCHNORM), bench.folder / "elastic"
    (port,) = free_ports(1)
    words = "--nnodes=1:2 --nproc-per-node=1 --max-restarts=3 --rdzv-backend=c10d --rdzv-id=1"
    elastic = (*words.split(), f"--rdzv-endpoint=127.0.0.1:{port}")
    elastic = (*elastic, "--rdzv-conf=last_call_timeout=10")

    def is_listening():
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    agents = []
    for _ in range(2):
        agents.append(torchrun(bench, run, elastic, global_batch_size=8, **WITHOUT_BATCHNORM))
        wait_until(is_listening)  # on one machine both agents could hold the store
    wait_for(run / "metrics.jsonl", content='"world_size": 2')
    wait_for(run / "checkpoints", content=".pt")
    lost = agents[1]
    for pid in (lost.pid, *ranks_of(lost).values()):
        os.kill(pid, signal.SIGKILL)
    lost.wait()
    code = agents[0].wait()
    records = [record for record in tiny.records(run) if record["kind"] == "train"]
    with bench.attempt():
        assert code == 0, f"exit code {code}: {agents[0].output()[-1500:]}"
        assert {record["world_size"] for record in records} == {1, 2}
        assert [record["step"] for record in records] == list(range(1, tiny.STEPS + 1))
        assert tiny.losses(run) == pytest.approx(tiny.losses(reference), rel=1e-5, abs=0)
