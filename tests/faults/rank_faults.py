"""Several ranks, one of which is killed or stopped, or whose number changes."""

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults import tiny
from tests.faults.bench import Bench, Outcome, newest_step, wait_for
from tests.faults.forkserver import REPOSITORY, Run
from tests.processes import children_of, fields_of, free_ports, wait_until

RANK_TIMEOUT_S = 8.0  # when a rank counts as hung; on a busy machine a sound one is slow
TORCHRUN_TIMEOUT_S = 15.0  # also the time in which both ranks must have imported torch
ROLL_CALL_S = 5.0
MAX_ORPHAN_S = 5.0
SLOW_STEP_MS = 300  # under torchrun: the 12 steps outlast the search for the ranks, also on a busy machine
TORCHRUN_GRACE_S = 30.0  # torchrun sends SIGTERM, and SIGKILL half a minute later


def kill_one_of_two_ranks(bench: Bench, outcome: Outcome, count: int) -> None:
    """One of two ranks killed at a random instant. The other names it and ends; both resume exactly."""
    reference = bench.reference(world=2)
    slow = {"MS": 60}  # so that most of a run's life is training, not start-up
    seconds = bench.seconds + 0.06 * tiny.STEPS
    for number in outcome.numbers_until(count):
        run, victim = bench.folder / f"killed-rank-{number}", outcome.random.choice((0, 1))
        plant = slow | ({"ANSWER_S": 60} if victim == 1 and bench.patience > 1 else {})
        ranks = bench.start_ranks(run, 2, "slow_steps", plant, rank_timeout_s=RANK_TIMEOUT_S)
        time.sleep(outcome.random.uniform(0.2, 1.0) * seconds)
        ranks[victim].send(signal.SIGKILL)
        code = ranks[victim].wait()
        other = ranks[1 - victim].wait(bench.patience * (RANK_TIMEOUT_S + ROLL_CALL_S + 5))
        for rank in ranks:
            rank.kill_group()
        if code == 0 or other == 0:  # it ended before the kill
            continue
        with outcome.attempt():
            tiny.check_loadable(run)
            assert other is not None, f"{run.name}: the other rank still ran"
            output = ranks[1 - victim].output()
            assert f"rank {victim} is dead or hangs" in output or not newest_step(run), output[-600:]
            bench.check_resumed(run, reference, world=2)


def hang_one_of_two_ranks(bench: Bench, outcome: Outcome, count: int) -> None:
    """One of two ranks stopped (SIGSTOP). The other names it and ends within the timeout and the roll call."""
    for number in range(count):
        run, victim = bench.folder / f"hung-rank-{number}", number % 2
        settings = {"epochs": 10_000, "rank_timeout_s": RANK_TIMEOUT_S}
        ranks = bench.start_ranks(run, 2, "slow_steps", {"MS": 30}, **settings)
        wait_for(run / "checkpoints", content=".pt")
        ranks[victim].send(signal.SIGSTOP)
        other = ranks[1 - victim].wait(bench.patience * (RANK_TIMEOUT_S + ROLL_CALL_S + 10))
        ranks[victim].kill_group()
        ranks[victim].wait()
        output = ranks[1 - victim].output()
        with outcome.attempt():
            assert other == 1, f"{run.name}: exit code {other}"
            assert f"rank {victim} is dead or hangs" in output, f"{run.name}: not named: {output[-700:]}"
            tiny.check_loadable(run)


def resume_with_other_number_of_ranks(bench: Bench, outcome: Outcome, full: bool) -> None:
    """1 -> 2 -> 4 -> 1 ranks at the same global batch: the same order, losses equal to 1e-5."""
    plain = {"model": "tests.networks:without_batchnorm", "ema_decay": 0, "log_every": 1}
    chains = [(1, 2), (2, 1)] + ([(1, 2, 4, 1), (4, 1), (2, 4), (1, 4)] if full else [])
    reference = bench.reference(**plain)
    for chain in chains:
        run = bench.folder / f"ranks-{'-'.join(map(str, chain))}"
        with outcome.attempt():
            for place, world in enumerate(chain[:-1]):
                plant = {"STEP": 2 * place + 2, "SIGNAL": int(signal.SIGTERM)}
                bench.run(run, 143, world=world, hook="signal_after_save", plant=plant, **plain)
            bench.run(run, world=chain[-1], **plain)
            tiny.check_losses(run, reference, tolerance=1e-5)


# --- under the real torchrun ------------------------------------------------------------------------------------------

ONE_NODE = ("--standalone", "--nproc-per-node=2")


def torchrun(
    bench: Bench, run: Path, *options: str, launcher: Sequence[str] = ONE_NODE, slow_ms: int = 0, **settings: Any
) -> Run:
    """The agent of `torchrun --standalone --nproc-per-node=2 train.py ...`."""
    words = tiny.words(bench.images, run, **{"rank_timeout_s": TORCHRUN_TIMEOUT_S, "batch_size": 4} | settings)
    program = ["-m", "tests.faults.plants"] if slow_ms else [str(REPOSITORY / "train.py")]
    arguments = [*launcher, *options, *program, *words]
    return bench.server.call("torch.distributed.run:main", [arguments], bench.new_log(), {"PLANT_MS": str(slow_ms)})


def ranks_of(agent: Run) -> dict[int, int]:
    """Rank -> process id, from /proc."""
    found = {}
    for pid in children_of(agent.pid):
        with contextlib.suppress(OSError, StopIteration):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            found[int(next(value[5:] for value in environment if value.startswith(b"RANK=")))] = pid
    return found


def ranks_in_training(agent: Run, run: Path) -> dict[int, int]:
    """Both ranks after the first checkpoint."""
    wait_for(run / "checkpoints", content=".pt")
    ranks = ranks_of(agent)
    assert len(ranks) == 2, f"{run.name}: ranks {ranks}: {agent.output()[-1500:]}"
    return ranks


def check_ended(running: Callable[[], list[int]], limit_s: float) -> None:
    """The processes end within the time; those that do not are killed."""
    deadline = time.monotonic() + limit_s
    while (left := running()) and time.monotonic() < deadline:
        time.sleep(0.01)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, f"processes {left} still ran after {limit_s} s"


def running_of(ranks: dict[int, int]) -> list[int]:
    return [pid for pid in ranks.values() if fields_of(pid)[:1] not in ([], ["Z"])]


def check_resumed_by_torchrun(bench: Bench, run: Path) -> None:
    agent = torchrun(bench, run)
    assert agent.wait() == 0, f"{run.name} did not resume: {agent.output()[-500:]}"
    bench.check_equal(run, bench.reference(world=2))


def rank_fails_under_torchrun(bench: Bench, outcome: Outcome) -> None:
    """A rank killed, stopped or terminated, and restarts by torchrun: bounded, named, resumed exactly."""
    with outcome.attempt():
        restarted_by_torchrun(bench)
    for signum in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM):
        for victim in (0, 1):
            with outcome.attempt():
                one_rank_down(bench, signum, victim)


def restarted_by_torchrun(bench: Bench) -> None:
    """--max-restarts=2 with resume=auto: a killed rank costs a restart and nothing else."""
    run = bench.folder / "torchrun-restarts"
    agent = torchrun(bench, run, "--max-restarts=2", slow_ms=SLOW_STEP_MS)
    os.kill(ranks_in_training(agent, run)[1], signal.SIGKILL)
    assert agent.wait() == 0, f"{run.name}: {agent.output()[-1500:]}"
    bench.check_equal(run, bench.reference(world=2))


def one_rank_down(bench: Bench, signum: signal.Signals, victim: int) -> None:
    run = bench.folder / f"torchrun-{signum.name}-{victim}"
    agent = torchrun(bench, run, slow_ms=SLOW_STEP_MS)
    ranks = ranks_in_training(agent, run)
    os.kill(ranks[victim], signum)
    code = agent.wait(TORCHRUN_TIMEOUT_S + ROLL_CALL_S + TORCHRUN_GRACE_S + 15)
    agent.send(signal.SIGKILL)
    if signum != signal.SIGTERM:
        assert code, f"{run.name}: exit code {code}"
        assert re.search(rf"rank {victim} is dead or hangs|rank\s*:\s*{victim}\b", agent.output()), agent.output()
    check_ended(partial(running_of, ranks), limit_s=0)
    tiny.check_loadable(run)
    check_resumed_by_torchrun(bench, run)


def kill_torchrun_agent(bench: Bench, outcome: Outcome, kills: int) -> None:
    """The agent is killed by SIGKILL or SIGUSR1, also while its ranks start: they end, the run is resumed exactly."""
    for number in range(kills):
        with outcome.attempt():
            agent_killed(bench, number, outcome)


def agent_killed(bench: Bench, number: int, outcome: Outcome) -> None:
    """Soon after it has started its ranks, or after their first checkpoint."""
    run, starting = bench.folder / f"torchrun-agent-{number}", number % 4 > 1
    agent = torchrun(bench, run, slow_ms=0 if starting else SLOW_STEP_MS)  # the plants of slow steps import torch first
    wait_until(lambda: len(ranks_of(agent)) == 2)
    ranks = ranks_of(agent) if starting else ranks_in_training(agent, run)
    time.sleep(outcome.random.uniform(0, 3.0 if starting else 0.5))
    agent.send((signal.SIGKILL, signal.SIGUSR1)[number % 2])
    agent.wait()
    check_ended(partial(running_of, ranks), MAX_ORPHAN_S)
    check_resumed_by_torchrun(bench, run)


def lose_a_node(bench: Bench, outcome: Outcome) -> None:
    """The second of two elastic agents is killed: the first continues alone, with two micro-steps instead of one."""
    plain = {"model": "tests.networks:without_batchnorm", "ema_decay": 0, "log_every": 1}
    reference, run, [port] = bench.reference(**plain), bench.folder / "elastic", free_ports(1)
    elastic = ("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=1")
    elastic = (*elastic, f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=last_call_timeout=10")
    agents = []
    for _ in range(2):
        agents.append(torchrun(bench, run, launcher=elastic, slow_ms=SLOW_STEP_MS, global_batch_size=8, **plain))
        wait_until(lambda: is_listening(port))  # on one machine both agents could hold the store
    wait_for(run / "metrics.jsonl", content='"world_size": 2')
    wait_for(run / "checkpoints", content=".pt")
    lost = agents[1]
    for pid in (lost.pid, *ranks_of(lost).values()):
        os.kill(pid, signal.SIGKILL)
    lost.wait()
    code = agents[0].wait()
    records = [record for record in tiny.records(run) if record["kind"] == "train"]
    with outcome.attempt():
        assert code == 0, f"exit code {code}: {agents[0].output()[-1500:]}"
        assert {record["world_size"] for record in records} == {1, 2}
        assert [record["step"] for record in records] == list(range(1, tiny.STEPS + 1))
        tiny.check_losses(run, reference, tolerance=1e-5)


def is_listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
