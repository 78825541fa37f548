"""Two torchrun agents, as on two nodes without a shared folder: killed and resumed."""

import os
import shlex
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.faults.forkserver import train_script
from tests.processes import LIMIT_S, free_ports, wait_until
from tests.ranks import ENVIRONMENT, ROOT, TINY, fork_two_ranks, losses

pytestmark = pytest.mark.slow
SETTINGS = (*TINY, "batch_size=16", "global_batch_size=32", "evaluate_every=-1", "rank_timeout_s=300")
GATED = ("model=tests.networks:gated", "epochs=8", "checkpoint.every_steps=4", "checkpoint.every_epochs=0")
needs_namespaces = pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0, reason="needs root: unshare -m"
)


class Nodes:
    """Two agents with one process each; the second one sees an empty run folder of its own.

    The processes wait in step 10 until the gate is opened.
    """

    def __init__(self, folder: Path, *words: str) -> None:
        self.run, self.gate = folder / "run", folder / "gate"
        self.logs = [folder / f"node-{node}.log" for node in range(2)]
        for new in (self.run, self.gate):
            new.mkdir(parents=True, exist_ok=True)
        (port,) = free_ports(1)
        agent = f"--nnodes=2 --nproc-per-node=1 --master-addr=127.0.0.1 --master-port={port} --node-rank="
        program = shlex.join(["train.py", *SETTINGS, f"hydra.run.dir={self.run}", *words])
        environment = ENVIRONMENT | {"GATE": str(self.gate)}
        self.agents = []
        for node, log in enumerate(self.logs):
            command = f"exec {sys.executable} -m torch.distributed.run {agent}{node} {program}"
            if node == 1:
                mount = f"mount -t tmpfs tmpfs {shlex.quote(str(self.run))}"
                command = f"exec unshare -m sh -c {shlex.quote(f'{mount} && {command}')}"
            with log.open("ab") as out:
                shell = ["sh", "-c", command]
                self.agents.append(subprocess.Popen(shell, cwd=ROOT, env=environment, stdout=out, stderr=out))

    def kill_at_the_gate(self) -> None:
        """When both processes wait there, SIGKILL to the agents and, before they notice, to these processes."""
        wait_until(lambda: len(list(self.gate.iterdir())) == 2 or self.agents[0].poll() is not None)
        assert self.agents[0].poll() is None, self.log()
        for agent in self.agents:
            children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
            for pid in (agent.pid, *map(int, children)):
                os.kill(pid, signal.SIGKILL)
            agent.wait()

    def log(self) -> str:
        return "".join(log.read_text(errors="replace") for log in self.logs)


@needs_namespaces
def test_killed_nodes_without_a_shared_folder_resume_exactly(image_folder: Path, tmp_path: Path) -> None:
    words, undisturbed = (f"data.root={image_folder}", *GATED), tmp_path / "undisturbed"
    killed = Nodes(tmp_path / "killed", *words)
    killed.kill_at_the_gate()
    assert len(losses(killed.run)) == 9
    (killed.gate / "open").touch()
    script = partial(train_script, [*SETTINGS, *words, f"hydra.run.dir={undisturbed}"])
    fork_two_ranks(tmp_path, script, GATE=str(killed.gate), LOCAL_WORLD_SIZE="1")
    resumed = Nodes(tmp_path / "killed", *words, "resume=auto")
    assert [agent.wait(LIMIT_S) for agent in resumed.agents] == [0, 0], resumed.log()
    assert "resumed from" in resumed.log()
    assert losses(resumed.run) == losses(undisturbed) and len(losses(resumed.run)) == 24
    assert {path.name for path in resumed.run.iterdir()} == {path.name for path in undisturbed.iterdir()}
