"""The scripts of docs/clusters.md as they stand, on a real Slurm of two virtual nodes; skipped where it is missing."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.clusters import slurm
from tests.processes import LIMIT_S, wait_until
from tests.ranks import ENVIRONMENT, ROOT, TINY, launch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not slurm.is_installed(), reason="needs slurmctld, slurmd, munge and root"),
]
SETTINGS = (*TINY, "epochs=2", "batch_size=16", "global_batch_size=32", "evaluate_every=-1")
INTERRUPTED = (*SETTINGS, "model=tests.networks:gated", "epochs=8", "checkpoint.every_epochs=0")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm.two_nodes(tmp_path_factory.mktemp("slurm")) as environment:
        python = f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
        yield ENVIRONMENT | environment | {"PATH": python, "PROCESSES": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture
def submit(cluster: dict[str, str], image_folder: Path) -> Callable[..., str]:
    def submit(script: str, folder: Path, *settings: str, **environment: str) -> str:
        folder.mkdir()
        words = [f"data.root={image_folder}", f"hydra.run.dir={folder / 'run'}", *settings]
        command = ["sbatch", "--parsable", f"--output={folder / 'log'}", f"scripts/slurm/{script}.sbatch", *words]
        done = subprocess.run(command, cwd=ROOT, env=cluster | environment, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    return submit


def is_completed(folder: Path) -> bool:
    summary = folder / "run" / "summary.json"
    return summary.is_file() and json.loads(summary.read_text())["status"] == "completed"


def losses(run: Path) -> list[tuple[int, float]]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(record["step"], record["loss"]) for record in records if record["kind"] == "train"]


def test_each_script_trains_like_one_process(submit: Callable[..., str], image_folder: Path, tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("one_node", "several_nodes", "torchrun_nodes")}
    submit("one_node", folders["one_node"], *SETTINGS, PROCESSES="2")
    submit("several_nodes", folders["several_nodes"], *SETTINGS)
    submit("torchrun_nodes", folders["torchrun_nodes"], *SETTINGS)
    words = (f"data.root={image_folder}", f"hydra.run.dir={tmp_path / 'alone'}")
    assert launch(1, "train.py", *SETTINGS, *words).returncode == 0
    expected = losses(tmp_path / "alone")
    assert len(expected) == 6
    for name, folder in folders.items():
        wait_until(lambda folder=folder: is_completed(folder))
        assert json.loads((folder / "run" / "summary.json").read_text())["world_size"] == 2, name
        for (step, loss), (expected_step, expected_loss) in zip(losses(folder / "run"), expected, strict=True):
            assert step == expected_step
            assert loss == pytest.approx(expected_loss, abs=1e-6), name
        log = (folder / "log").read_text()
        assert log.count("Epoch: [0][1/3]") == 1, "rank 0 alone writes to the console"
        assert ("ranks: 0 on" in log) == (name != "one_node"), "where each rank runs"


def test_a_requeued_job_resumes_exactly(submit: Callable[..., str], cluster: dict[str, str], tmp_path: Path) -> None:
    """`scancel --signal=TERM` signals the tasks, as `--signal=TERM@120` does before the time limit."""
    reference, folder, gate = (tmp_path / name for name in ("reference", "requeued", "gate"))
    gate.mkdir()
    job = submit("requeue", folder, *INTERRUPTED, GATE=str(gate))
    wait_until(lambda: len(list(gate.iterdir())) == 2)
    subprocess.run(["scancel", "--signal=TERM", job], env=cluster, check=True)
    wait_until(lambda: "interrupted after" in (folder / "log").read_text())
    (gate / "open").touch()
    submit("several_nodes", reference, *INTERRUPTED, GATE=str(gate))
    wait_until(lambda: is_completed(folder) and is_completed(reference))
    log = (folder / "log").read_text()
    assert "interrupted after" in log and "resumed from" in log
    assert losses(folder / "run") == losses(reference / "run")


def test_one_process_in_an_allocation_of_two_tasks_trains_alone(
    cluster: dict[str, str], image_folder: Path, tmp_path: Path
) -> None:
    """`salloc` sets SLURM_NTASKS=2 in a shell that nobody shares."""
    words = (*SETTINGS, f"data.root={image_folder}", f"hydra.run.dir={tmp_path / 'run'}", "max_steps=1")
    done = subprocess.run(
        ["salloc", "--nodes=2", "--ntasks=2", "python", "train.py", *words],
        cwd=ROOT,
        env=cluster,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["world_size"] == 1
