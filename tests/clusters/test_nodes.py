"""Two torchrun agents, as on two nodes without a shared folder: killed and resumed."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import LIMIT_S, free_ports, wait_until
from tests.ranks import ENVIRONMENT, ROOT, TINY

pytestmark = pytest.mark.slow
SETTINGS = (*TINY, "batch_size=16", "global_batch_size=32", "evaluate_every=-1", "rank_timeout_s=300")
GATED = ("model=tests.networks:gated", "epochs=8", "checkpoint.every_steps=4", "checkpoint.every_epochs=0")
needs_namespaces = pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0, reason="needs root: unshare -m"
)


class Nodes:
    """Two agents with one process each. The second one sees an empty run folder of its own if it is `private`.

    The processes wait in step 10 if the gate is not `opened`.
    """

    def __init__(self, folder: Path, *words: str, private: bool = False, opened: bool = True) -> None:
        self.run, self.gate = folder / "run", folder / "gate"
        self.logs = [folder / f"node-{node}.log" for node in range(2)]
        for new in (self.run, self.gate):
            new.mkdir(parents=True, exist_ok=True)
        if opened:
            (self.gate / "open").touch()
        (port,) = free_ports(1)
        agent = f"--nnodes=2 --nproc-per-node=1 --master-addr=127.0.0.1 --master-port={port} --node-rank="
        program = shlex.join(["train.py", *SETTINGS, f"hydra.run.dir={self.run}", *words])
        environment = ENVIRONMENT | {"GATE": str(self.gate)}
        self.agents = []
        for node, log in enumerate(self.logs):
            command = f"exec {sys.executable} -m torch.distributed.run {agent}{node} {program}"
            if node == 1 and private:
                mount = f"mount -t tmpfs tmpfs {shlex.quote(str(self.run))}"
                command = f"exec unshare -m sh -c {shlex.quote(f'{mount} && {command}')}"
            with log.open("ab") as output:
                self.agents.append(
                    subprocess.Popen(["sh", "-c", command], cwd=ROOT, env=environment, stdout=output, stderr=output)
                )

    def wait(self) -> list[int]:
        return [agent.wait(LIMIT_S) for agent in self.agents]

    def wait_for_the_gate(self) -> None:
        """Until both processes wait there."""
        wait_until(lambda: len(list(self.gate.iterdir())) == 2 or self.agents[0].poll() is not None)
        assert self.agents[0].poll() is None, self.log()

    def kill(self, *nodes: int) -> None:
        """SIGKILL to the agents and, before they notice, to their training processes."""
        for node in nodes:
            agent = self.agents[node]
            children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
            for pid in (agent.pid, *map(int, children)):
                os.kill(pid, signal.SIGKILL)
            agent.wait()

    def losses(self) -> list[tuple[int, float]]:
        path = self.run / "metrics.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [(record["step"], record["loss"]) for record in records if record["kind"] == "train"]

    def log(self) -> str:
        return "".join(log.read_text(errors="replace") for log in self.logs)


@needs_namespaces
def test_killed_nodes_without_a_shared_folder_resume_exactly(image_folder: Path, tmp_path: Path) -> None:
    words = (f"data.root={image_folder}", *GATED)
    undisturbed = Nodes(tmp_path / "undisturbed", *words, private=True)
    assert undisturbed.wait() == [0, 0], undisturbed.log()
    killed = Nodes(tmp_path / "killed", *words, private=True, opened=False)
    killed.wait_for_the_gate()
    killed.kill(0, 1)
    assert len(killed.losses()) == 9
    resumed = Nodes(tmp_path / "killed", *words, "resume=auto", private=True)
    assert resumed.wait() == [0, 0], resumed.log()
    assert "resumed from" in resumed.log()
    assert resumed.losses() == undisturbed.losses() and len(resumed.losses()) == 24
    assert {path.name for path in resumed.run.iterdir()} == {path.name for path in undisturbed.run.iterdir()}
