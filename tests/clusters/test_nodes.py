"""Two ranks as on two nodes without a shared folder: killed and resumed."""

import ctypes
import signal
import subprocess
from functools import partial

import pytest

from tests.faults.forkserver import train_script
from tests.processes import wait_until
from tests.ranks import TINY, fork_ranks, losses, run_two_ranks

pytestmark = pytest.mark.slow
SETTINGS = [*TINY, *["batch_size=16", "global_batch_size=32", "evaluate_every=-1", "epochs=8"]]
CLONE_NEWNS = 0x00020000
GATED = "model=tests.networks:gated checkpoint.every_steps=4 checkpoint.every_epochs=0"
needs_namespaces = pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0,
    reason="needs root: unshare -m",
)


def hide(folder):
    """This process sees an empty folder in its place."""
    libc = ctypes.CDLL(None)
    assert libc.unshare(CLONE_NEWNS) == 0
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(folder)], check=True)


def start_nodes(folder, *words):
    """A rank each; the second one sees an empty run folder of its own."""
    run = folder / "run"
    script = partial(train_script, [*SETTINGS, f"hydra.run.dir={run}", *words])
    environment = {"LOCAL_WORLD_SIZE": "1", "GATE": str(folder / "gate")}
    return fork_ranks([script, partial(script, partial(hide, run))], folder, environment)


@needs_namespaces
def test_killed_nodes_without_a_shared_folder_resume_exactly(image_folder, tmp_path):
    """SIGKILL to both in step 10, in which they wait at the gate."""
    words = (f"data.root={image_folder}", *GATED.split())
    undisturbed, run, gate = (tmp_path / name for name in ("undisturbed", "run", "gate"))
    run.mkdir()
    gate.mkdir()
    nodes = start_nodes(tmp_path, *words)
    wait_until(lambda: len(list(gate.iterdir())) == 2 or not nodes[0].is_alive())
    assert nodes[0].is_alive(), nodes[0].output()
    for node in nodes:
        node.send(signal.SIGKILL)
        node.wait()
    assert len(losses(run)) == 9
    (gate / "open").touch()
    script = partial(train_script, [*SETTINGS, *words, f"hydra.run.dir={undisturbed}"])
    run_two_ranks(tmp_path, script, GATE=str(gate), LOCAL_WORLD_SIZE="1")
    nodes = start_nodes(tmp_path, *words, "resume=auto")
    assert [node.wait() for node in nodes] == [0, 0], nodes[0].output()
    assert "resumed from" in nodes[0].output()
    assert losses(run) == losses(undisturbed) and len(losses(run)) == 24
    assert {path.name for path in run.iterdir()} == {path.name for path in undisturbed.iterdir()}
