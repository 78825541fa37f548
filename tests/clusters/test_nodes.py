"""Two torchrun agents, as on two nodes without a shared folder: killed and resumed."""

import os
import shlex
import signal
import subprocess
import sys
from functools import partial

import pytest

from tests.faults.forkserver import train_script
from tests.processes import LIMIT_S, children_of, free_ports, wait_until
from tests.ranks import ENVIRONMENT, ROOT, TINY, fork_two_ranks, losses

pytestmark = pytest.mark.slow
OF_TWO = "batch_size=16 global_batch_size=32 evaluate_every=-1"
SETTINGS = [*TINY, *OF_TWO.split()]
GATED = "model=tests.networks:gated epochs=8 checkpoint.every_steps=4 checkpoint.every_epochs=0"
needs_namespaces = pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0,
    reason="needs root: unshare -m",
)


def start_nodes(folder, *words):
    """Two agents with one process each; the second one sees an empty run folder of its own."""
    (port,) = free_ports(1)
    agent = f"{sys.executable} -m torch.distributed.run --nnodes=2 --nproc-per-node=1"
    agent += f" --master-addr=127.0.0.1 --master-port={port}"
    program = shlex.join(["train.py", *SETTINGS, f"hydra.run.dir={folder / 'run'}", *words])
    commands = [f"exec {agent} --node-rank={node} {program}" for node in range(2)]
    mount = f"mount -t tmpfs tmpfs {shlex.quote(str(folder / 'run'))}"
    commands[1] = f"exec unshare -m sh -c {shlex.quote(f'{mount} && {commands[1]}')}"
    environment = ENVIRONMENT | {"GATE": str(folder / "gate")}
    with (folder / "log").open("ab") as log:
        start = partial(subprocess.Popen, cwd=ROOT, env=environment, stdout=log, stderr=log)
        return [start(["sh", "-c", command]) for command in commands]


@needs_namespaces
def test_killed_nodes_without_a_shared_folder_resume_exactly(image_folder, tmp_path):
    """SIGKILL to the agents and, before they notice, to their processes, which wait in step 10 at
    the gate.
    """
    words = (f"data.root={image_folder}", *GATED.split())
    undisturbed, log = tmp_path / "undisturbed", tmp_path / "log"
    run, gate = tmp_path / "run", tmp_path / "gate"
    run.mkdir()
    gate.mkdir()
    agents = start_nodes(tmp_path, *words)
    wait_until(lambda: len(list(gate.iterdir())) == 2 or agents[0].poll() is not None)
    assert agents[0].poll() is None, log.read_text()
    for agent in agents:
        for pid in (agent.pid, *children_of(agent.pid)):
            os.kill(pid, signal.SIGKILL)
        agent.wait()
    assert len(losses(run)) == 9
    (gate / "open").touch()
    script = partial(train_script, [*SETTINGS, *words, f"hydra.run.dir={undisturbed}"])
    fork_two_ranks(tmp_path, script, GATE=str(gate), LOCAL_WORLD_SIZE="1")
    agents = start_nodes(tmp_path, *words, "resume=auto")
    assert [agent.wait(LIMIT_S) for agent in agents] == [0, 0], log.read_text()
    assert "resumed from" in log.read_text()
    assert losses(run) == losses(undisturbed) and len(losses(run)) == 24
    assert {path.name for path in run.iterdir()} == {path.name for path in undisturbed.iterdir()}
