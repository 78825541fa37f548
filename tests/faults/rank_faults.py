"""Several ranks, one of which is killed or stopped, or whose number changes."""

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

from tests.processes import LIMIT_S, free_ports, wait_until

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
        words = tiny.words(bench.images, run, **settings)
        runs.append(
            bench.server.start(words, bench.folder / f"{run.name}.rank{rank}.log", environment | (plant or {}), hook)
        )
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
            problems = tiny.unloadable(run)
            outcome.counts["killed before the first checkpoint"] += newest_step(run) == 0
            if other is None:
                ranks[1 - victim].kill_group()
                ranks[1 - victim].wait()
                problems.append(f"{run.name}: the other rank still ran")
            elif f"rank {victim} is dead or hangs" not in ranks[1 - victim].output():
                outcome.counts["killed before the ranks met"] += "run folder" not in ranks[0].output()
                if newest_step(run):
                    problems.append(f"{run.name}: the rank is not named: {ranks[1 - victim].output()[-600:]}")
            again = start_ranks(bench, run, 2, batch_size=4)
            if finish(again) != [0, 0]:
                problems.append(f"{run.name} did not resume: {again[0].output()[-500:]}")
            else:
                problems += bench.compare(run, reference)
            outcome.check(*problems)
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
            outcome.check(
                "" if other == 1 else f"{run.name}: exit code {other}",
                "" if f"rank {victim} is dead or hangs" in output else f"{run.name}: not named: {output[-700:]}",
                *tiny.unloadable(run),
            )
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
            problems = []
            for place, world in enumerate(chain):
                last = place == len(chain) - 1
                plant = {"PLANT_STEP": str(2 * place + 2), "PLANT_SIGNAL": str(int(signal.SIGTERM)), "PLANT_MS": "10"}
                ranks = start_ranks(
                    bench, run, world, "" if last else "plants:signal_after_save", plant, batch_size=8 // world, **plain
                )
                codes = finish(ranks)
                if codes != [0 if last else 143] * world:
                    problems.append(f"{run.name}, {world} ranks: {codes} {ranks[0].output()[-600:]}")
                    break
            problems += [] if problems else close_losses(run, reference)
            outcome.check(*problems)
            bench.forget(run)
    return outcome


def close_losses(run: Path, reference: Path, tolerance: float = 1e-5) -> list[str]:
    ours = {r["step"]: r["loss"] for r in tiny.records(run) if r["kind"] == "train"}
    theirs = {r["step"]: r["loss"] for r in tiny.records(reference) if r["kind"] == "train"}
    gaps = {step: abs(ours[step] - theirs[step]) / theirs[step] for step in ours.keys() & theirs.keys()}
    far = {step: gap for step, gap in gaps.items() if gap > tolerance}
    return [f"{run.name}: losses differ at steps {far}"] if len(far) > 0 or ours.keys() != theirs.keys() else []


# --- under the real torchrun ------------------------------------------------------------------------------------------


@dataclass
class Torchrun:
    """`torchrun --standalone --nproc-per-node=2 train.py ...`"""

    process: subprocess.Popen[bytes]
    log: Path

    def ranks(self) -> dict[int, int]:
        """Rank -> process id, from /proc."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                    if parent == self.process.pid:
                        environment = (entry / "environ").read_bytes().split(b"\0")
                        found[int(next(v for v in environment if v.startswith(b"RANK=")).split(b"=")[1])] = int(
                            entry.name
                        )
                except (OSError, StopIteration, IndexError):
                    continue
        return found

    def ranks_in_training(self, run: Path) -> dict[int, int]:
        """Both ranks after the first checkpoint. Raises RuntimeError with the end of the log if there are none."""
        saved = wait_for(run / "checkpoints", content=".pt", seconds=180)
        ranks = self.ranks()
        if not saved or len(ranks) < 2:
            raise RuntimeError(
                f"{run.name}: saved {saved}, ranks {ranks}: {self.log.read_text(errors='replace')[-1500:]}"
            )
        return ranks


ONE_NODE = ("--standalone", "--nproc-per-node=2")


def torchrun(
    bench: Bench, run: Path, *options: str, launcher: Sequence[str] = ONE_NODE, slow_ms: int = 0, **settings: Any
) -> Torchrun:
    words = tiny.words(bench.images, run, rank_timeout_s=TORCHRUN_TIMEOUT_S, batch_size=4, **settings)
    log = bench.folder / f"{run.name}.log"
    program = str(HERE / "slow_train.py") if slow_ms else str(tiny.REPOSITORY / "train.py")
    environment = os.environ | {
        "PYTHONPATH": f"{HERE}:{tiny.REPOSITORY}",
        "OMP_NUM_THREADS": "1",
        "PLANT_MS": str(slow_ms),
    }
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


def rank_fails_under_torchrun(bench: Bench, full: bool) -> Outcome:
    """A rank killed, stopped or terminated, and restarts by torchrun: bounded, named, resumed exactly."""
    with Outcome("under torchrun: a rank killed, stopped, terminated; --max-restarts", bench.seed) as outcome:
        reference = two_ranks(bench)
        outcome.check(*restarted_by_torchrun(bench, reference))
        for what, signum in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP), ("terminated", signal.SIGTERM)):
            for victim in (0, 1) if full else ():
                outcome.check(*one_rank_down(bench, reference, what, signum, victim, outcome))
    return outcome


def kill_torchrun_agent(bench: Bench, kills: int) -> Outcome:
    """The agent is killed by SIGKILL or SIGUSR1, also while its ranks start: they end, the run is resumed exactly."""
    rng = random.Random(bench.seed)
    with Outcome("the torchrun agent killed", bench.seed) as outcome:
        reference = two_ranks(bench)
        for number in range(kills):
            signum = (signal.SIGKILL, signal.SIGUSR1)[number % 2]
            starting = number % 4 > 1
            wait_s = rng.uniform(0, 3.0 if starting else 0.5)
            outcome.check(*agent_killed(bench, reference, number, signum, starting, wait_s, outcome))
    return outcome


def one_rank_down(bench: Bench, reference: Path, what: str, signum: int, victim: int, outcome: Outcome) -> list[str]:
    run = bench.folder / f"torchrun-{what}-{victim}"
    job = torchrun(bench, run, slow_ms=SLOW_STEP_MS)
    ranks = job.ranks_in_training(run)
    os.kill(ranks[victim], signum)
    hit = time.monotonic()
    limit = TORCHRUN_TIMEOUT_S + ROLL_CALL_S + TORCHRUN_GRACE_S + 15
    try:
        code: int | None = job.process.wait(limit)
    except subprocess.TimeoutExpired:
        code = None
        job.process.kill()
    outcome.counts[f"rank {victim} {what}: seconds to the end"] = int(time.monotonic() - hit)
    problems = [] if code not in (None, 0) or signum == signal.SIGTERM else [f"{run.name}: exit code {code}"]
    text = job.log.read_text(errors="replace")
    named = re.search(rf"rank {victim} is dead or hangs|rank\s*:\s*{victim}\b", text)
    problems += [] if named or signum == signal.SIGTERM else [f"{run.name}: rank {victim} is not named: {text[-1500:]}"]
    for pid in ranks.values():
        if Path(f"/proc/{pid}").exists() and "train.py" in Path(f"/proc/{pid}/cmdline").read_text(errors="replace"):
            problems.append(f"{run.name}: process {pid} is left")
            os.kill(pid, signal.SIGKILL)
    problems += tiny.unloadable(run)
    if torchrun(bench, run).process.wait(LIMIT_S) != 0:
        return [*problems, f"{run.name} did not resume"]
    return problems + bench.compare(run, reference)


def agent_killed(
    bench: Bench, reference: Path, number: int, signum: int, starting: bool, wait_s: float, outcome: Outcome
) -> list[str]:
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
    while any(is_running(pid) for pid in ranks.values()) and time.monotonic() < killed_at + MAX_ORPHAN_S:
        time.sleep(0.02)
    outcome.slowest(f"end of the ranks{' while they start' if starting else ''}", time.monotonic() - killed_at)
    problems = [f"{run.name}: rank {rank} still runs" for rank, pid in ranks.items() if is_running(pid)]
    for pid in filter(is_running, ranks.values()):
        os.kill(pid, signal.SIGKILL)
    if torchrun(bench, run).process.wait(LIMIT_S) != 0:
        return [*problems, f"{run.name} did not resume"]
    return problems + bench.compare(run, reference)


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
        code = agents[0].process.wait(LIMIT_S)
        steps = [record["step"] for record in tiny.records(run) if record["kind"] == "train"]
        sizes = {record["world_size"] for record in tiny.records(run) if record["kind"] == "train"}
        outcome.check(
            "" if code == 0 else f"exit code {code}: {agents[0].log.read_text(errors='replace')[-1500:]}",
            "" if steps == list(range(1, tiny.STEPS + 1)) and sizes == {1, 2} else f"steps {steps}, processes {sizes}",
            *close_losses(run, reference),
        )
    return outcome


def is_listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def restarted_by_torchrun(bench: Bench, reference: Path) -> list[str]:
    """--max-restarts=2 with resume=auto: a killed rank costs a restart and nothing else."""
    run = bench.folder / "torchrun-restarts"
    job = torchrun(bench, run, "--max-restarts=2", slow_ms=SLOW_STEP_MS)
    os.kill(job.ranks_in_training(run)[1], signal.SIGKILL)
    if job.process.wait(LIMIT_S) != 0:
        return [f"{run.name}: {job.log.read_text(errors='replace')[-1500:]}"]
    return bench.compare(run, reference)
