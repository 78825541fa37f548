"""Several ranks, one of which is killed or stopped, or whose number changes."""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny
from bench import Bench, newest_step, wait_for
from forkserver import HERE, Run
from outcome import Outcome

from tests.processes import LIMIT_S, children_of, fields_of, free_ports, wait_until

RANK_TIMEOUT_S, PATIENT_RANK_TIMEOUT_S = 4.0, 15.0
TORCHRUN_TIMEOUT_S = 15.0  # also the time in which both ranks must have imported torch
ROLL_CALL_S = 5.0
MAX_ORPHAN_S = 5.0
SLOW_STEP_MS = 300  # under torchrun: the 12 steps outlast the search for the ranks, also on a busy machine
TORCHRUN_GRACE_S = 30.0  # torchrun sends SIGTERM, and SIGKILL half a minute later


def start_ranks(
    bench: Bench, run: Path, world: int, hook: str = "", plant: dict[str, str] | None = None, **settings: Any
) -> list[Run]:
    """What torchrun would start, without its five seconds of imports."""
    [port] = map(str, free_ports(1))
    runs = []
    for rank in range(world):
        environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        words, log = tiny.words(bench.images, run, **settings), bench.folder / f"{run.name}.rank{rank}.log"
        runs.append(bench.server.start(words, log, environment | (plant or {}), hook))
    return runs


def finish(ranks: list[Run]) -> list[int | None]:
    return [rank.wait() for rank in ranks]


def rank_timeout_s(bench: Bench) -> float:
    """When a rank counts as hung; on a busy machine a sound one may take longer."""
    return RANK_TIMEOUT_S if bench.patience == 1 else PATIENT_RANK_TIMEOUT_S


def kill_one_of_two_ranks(bench: Bench, count: int) -> Outcome:
    """one of two ranks is killed at a random instant. The other names it and ends; both resume exactly."""
    rng = random.Random(bench.seed)
    reference = two_ranks(bench)
    slow = ("plants:slow_steps", {"PLANT_MS": "60"})  # so that most of a run's life is training, not start-up
    with Outcome("one of two ranks killed at a random instant", bench.seed) as outcome:
        started = time.monotonic()
        assert finish(start_ranks(bench, bench.folder / "killed-rank-timed", 2, *slow, batch_size=4)) == [0, 0]
        seconds = time.monotonic() - started
        number = 0
        while outcome.tried < count and number < 10 * count + 10:
            number += 1
            run, victim = bench.folder / f"killed-rank-{number}", rng.choice((0, 1))
            plant = slow[1] | ({"PLANT_ANSWER_S": "60"} if victim == 1 and bench.patience > 1 else {})
            ranks = start_ranks(bench, run, 2, slow[0], plant, batch_size=4, rank_timeout_s=rank_timeout_s(bench))
            time.sleep(rng.uniform(0.2, 1.0) * seconds)
            ranks[victim].send(signal.SIGKILL)
            code, killed_at = ranks[victim].wait(), time.monotonic()
            other = ranks[1 - victim].wait(bench.limit_s(RANK_TIMEOUT_S + ROLL_CALL_S + 5))
            outcome.slowest("end of the other", time.monotonic() - killed_at)
            if code == 0 or other == 0:
                outcome.counts["ended before the kill"] += 1
                for rank in ranks:
                    rank.kill_group()
                bench.forget(run)
                continue
            outcome.counts["killed before the first checkpoint"] += newest_step(run) == 0
            outcome.counts["killed before the ranks met"] += "run folder" not in ranks[0].output()
            with outcome.attempt():
                tiny.check_loadable(run)
                if other is None:
                    ranks[1 - victim].kill_group()
                    ranks[1 - victim].wait()
                assert other is not None, f"{run.name}: the other rank still ran"
                output = ranks[1 - victim].output()
                is_named = f"rank {victim} is dead or hangs" in output or not newest_step(run)
                assert is_named, f"{run.name}: the rank is not named: {output[-600:]}"
                again = start_ranks(bench, run, 2, batch_size=4)
                assert finish(again) == [0, 0], f"{run.name} did not resume: {again[0].output()[-500:]}"
                bench.check_equal(run, reference)
            bench.forget(run)
    return outcome


def hang_one_of_two_ranks(bench: Bench, count: int) -> Outcome:
    """one of two ranks is stopped (SIGSTOP). The other names it and ends within the timeout and the roll call."""
    with Outcome("one of two ranks stopped (SIGSTOP)", bench.seed) as outcome:
        for number in range(count):
            run, victim = bench.folder / f"hung-rank-{number}", number % 2
            settings = {"batch_size": 4, "epochs": 10_000, "rank_timeout_s": rank_timeout_s(bench)}
            ranks = start_ranks(bench, run, 2, "plants:slow_steps", {"PLANT_MS": "30"}, **settings)
            wait_for(run / "checkpoints", content=".pt")
            ranks[victim].send(signal.SIGSTOP)
            stopped = time.monotonic()
            other = ranks[1 - victim].wait(bench.limit_s(RANK_TIMEOUT_S + ROLL_CALL_S + 10))
            seconds = time.monotonic() - stopped
            outcome.slowest("end of the other", seconds)
            ranks[victim].kill_group()
            ranks[victim].wait()
            output = ranks[1 - victim].output()
            with outcome.attempt():
                assert other == 1, f"{run.name}: exit code {other}"
                assert f"rank {victim} is dead or hangs" in output, f"{run.name}: not named: {output[-700:]}"
                tiny.check_loadable(run)
            bench.forget(run)
    return outcome


def resume_with_other_number_of_ranks(bench: Bench, full: bool) -> Outcome:
    """1 -> 2 -> 4 -> 1 ranks at the same global batch: the same order, losses equal to 1e-5."""
    plain = {"model": "tiny:plain_model", "ema_decay": 0, "log_every": 1}
    chains = [(1, 2), (2, 1)] + ([(1, 2, 4, 1), (4, 1), (2, 4), (1, 4)] if full else [])
    with Outcome("resume with another number of ranks, same global batch", bench.seed) as outcome:
        reference = bench.reference(**plain)
        for chain in chains:
            run = bench.folder / f"ranks-{'-'.join(map(str, chain))}"
            with outcome.attempt():
                for place, world in enumerate(chain):
                    last = place == len(chain) - 1
                    hook, settings = "" if last else "plants:signal_after_save", plain | {"batch_size": 8 // world}
                    plant = {"PLANT_STEP": str(2 * place + 2), "PLANT_SIGNAL": str(int(signal.SIGTERM))}
                    ranks = start_ranks(bench, run, world, hook, plant, **settings)
                    codes = finish(ranks)
                    expected = [0 if last else 143] * world
                    assert codes == expected, f"{run.name}, {world} ranks: {codes} {ranks[0].output()[-600:]}"
                tiny.check_losses(run, reference, tolerance=1e-5)
            bench.forget(run)
    return outcome


# --- under the real torchrun ------------------------------------------------------------------------------------------


@dataclass
class Torchrun:
    """`torchrun --standalone --nproc-per-node=2 train.py ...`"""

    process: subprocess.Popen[bytes]
    log: Path

    def ranks(self) -> dict[int, int]:
        """Rank -> process id, from /proc."""
        found = {}
        for pid in children_of(self.process.pid):
            with contextlib.suppress(OSError, StopIteration):
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                found[int(next(value[5:] for value in environment if value.startswith(b"RANK=")))] = pid
        return found

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def end(self, limit_s: float = LIMIT_S) -> int | None:
        """The exit code; None after `limit_s`: then it is killed."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return None

    def ranks_in_training(self, run: Path) -> dict[int, int]:
        """Both ranks after the first checkpoint."""
        saved = wait_for(run / "checkpoints", content=".pt", seconds=180)
        ranks = self.ranks()
        assert saved and len(ranks) == 2, f"{run.name}: saved {saved}, ranks {ranks}: {self.output()[-1500:]}"
        return ranks


ONE_NODE = ("--standalone", "--nproc-per-node=2")


def torchrun(
    bench: Bench, run: Path, *options: str, launcher: Sequence[str] = ONE_NODE, slow_ms: int = 0, **settings: Any
) -> Torchrun:
    words = tiny.words(bench.images, run, rank_timeout_s=TORCHRUN_TIMEOUT_S, batch_size=4, **settings)
    log = bench.folder / f"{run.name}.log"
    program = str(HERE / "slow_train.py") if slow_ms else str(tiny.REPOSITORY / "train.py")
    environment = os.environ | {"PYTHONPATH": f"{HERE}:{tiny.REPOSITORY}", "OMP_NUM_THREADS": "1"}
    environment |= {"PLANT_MS": str(slow_ms)}
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, *options, program]
    with log.open("ab") as file:
        process = subprocess.Popen([*command, *words], stdout=file, stderr=file, env=environment)
    return Torchrun(process, log)


def two_ranks(bench: Bench) -> Path:
    """A run of two ranks that nothing disturbed."""
    reference = bench.folder / "two-ranks"
    if not reference.exists():
        ranks = start_ranks(bench, reference, 2, batch_size=4)
        assert finish(ranks) == [0, 0], ranks[0].output()
    return reference


def check_resumed_by_torchrun(bench: Bench, run: Path) -> None:
    job = torchrun(bench, run)
    assert job.end() == 0, f"{run.name} did not resume: {job.output()[-500:]}"
    bench.check_equal(run, two_ranks(bench))


def rank_fails_under_torchrun(bench: Bench, full: bool) -> Outcome:
    """A rank killed, stopped or terminated, and restarts by torchrun: bounded, named, resumed exactly."""
    with Outcome("under torchrun: a rank killed, stopped, terminated; --max-restarts", bench.seed) as outcome:
        with outcome.attempt():
            restarted_by_torchrun(bench)
        for signum in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM) if full else ():
            for victim in (0, 1):
                with outcome.attempt():
                    one_rank_down(bench, signum, victim, outcome)
    return outcome


def restarted_by_torchrun(bench: Bench) -> None:
    """--max-restarts=2 with resume=auto: a killed rank costs a restart and nothing else."""
    run = bench.folder / "torchrun-restarts"
    job = torchrun(bench, run, "--max-restarts=2", slow_ms=SLOW_STEP_MS)
    os.kill(job.ranks_in_training(run)[1], signal.SIGKILL)
    assert job.end() == 0, f"{run.name}: {job.output()[-1500:]}"
    bench.check_equal(run, two_ranks(bench))


def one_rank_down(bench: Bench, signum: signal.Signals, victim: int, outcome: Outcome) -> None:
    run = bench.folder / f"torchrun-{signum.name}-{victim}"
    job = torchrun(bench, run, slow_ms=SLOW_STEP_MS)
    ranks = job.ranks_in_training(run)
    os.kill(ranks[victim], signum)
    hit = time.monotonic()
    code = job.end(TORCHRUN_TIMEOUT_S + ROLL_CALL_S + TORCHRUN_GRACE_S + 15)
    outcome.counts[f"rank {victim} {signum.name}: seconds to the end"] = int(time.monotonic() - hit)
    if signum != signal.SIGTERM:
        assert code, f"{run.name}: exit code {code}"
        is_named = re.search(rf"rank {victim} is dead or hangs|rank\s*:\s*{victim}\b", job.output())
        assert is_named, f"{run.name}: rank {victim} is not named: {job.output()[-1500:]}"
    left = [pid for pid in ranks.values() if is_running(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"{run.name}: processes {left} are left"
    tiny.check_loadable(run)
    check_resumed_by_torchrun(bench, run)


def kill_torchrun_agent(bench: Bench, kills: int) -> Outcome:
    """The agent is killed by SIGKILL or SIGUSR1, also while its ranks start: they end, the run is resumed exactly."""
    rng = random.Random(bench.seed)
    with Outcome("the torchrun agent killed", bench.seed) as outcome:
        for number in range(kills):
            signum, starting = (signal.SIGKILL, signal.SIGUSR1)[number % 2], number % 4 > 1
            with outcome.attempt():
                agent_killed(bench, number, signum, starting, rng.uniform(0, 3.0 if starting else 0.5), outcome)
    return outcome


def agent_killed(bench: Bench, number: int, signum: int, starting: bool, wait_s: float, outcome: Outcome) -> None:
    """Kill the agent `wait_s` after it has started its ranks, or after their first checkpoint."""
    run = bench.folder / f"torchrun-agent-{number}"
    job = torchrun(bench, run, slow_ms=0 if starting else SLOW_STEP_MS)  # the plants of slow steps import torch first
    while len(ranks := job.ranks()) < 2:
        time.sleep(0.01)
    if not starting:
        job.ranks_in_training(run)
    time.sleep(wait_s)
    job.process.send_signal(signum)
    job.process.wait()
    killed_at = time.monotonic()
    while (left := [pid for pid in ranks.values() if is_running(pid)]) and time.monotonic() < killed_at + MAX_ORPHAN_S:
        time.sleep(0.02)
    outcome.slowest(f"end of the ranks{' while they start' if starting else ''}", time.monotonic() - killed_at)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"{run.name}: ranks still run"
    check_resumed_by_torchrun(bench, run)


def lose_a_node(bench: Bench) -> Outcome:
    """The second of two elastic agents is killed: the first continues alone, with two micro-steps instead of one."""
    plain = {"model": "tiny:plain_model", "ema_decay": 0, "log_every": 1}
    with Outcome("elastic torchrun loses a node", bench.seed) as outcome:
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
        for pid in (lost.process.pid, *lost.ranks().values()):
            os.kill(pid, signal.SIGKILL)
        lost.process.wait()
        code = agents[0].end()
        records = [record for record in tiny.records(run) if record["kind"] == "train"]
        with outcome.attempt():
            assert code == 0, f"exit code {code}: {agents[0].output()[-1500:]}"
            assert {record["world_size"] for record in records} == {1, 2}
            assert [record["step"] for record in records] == list(range(1, tiny.STEPS + 1))
            tiny.check_losses(run, reference, tolerance=1e-5)
    return outcome


def is_listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def is_running(pid: int) -> bool:
    return fields_of(pid)[:1] not in ([], ["Z"])
