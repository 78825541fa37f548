"""`launcher=slurm` on a real Slurm: one allocation is cancelled, one is interrupted and requeued."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cl_train.comparison.sweep_plan import problem_of, read_sweep
from tests.clusters import slurm
from tests.processes import LIMIT_S, wait_until
from tests.ranks import ENVIRONMENT, ROOT, TINY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not slurm.is_installed(), reason="needs slurmctld, slurmd, munge and root"),
]


def test_a_sweep_survives_scancel_and_a_requeue(tmp_path: Path, image_folder: Path) -> None:
    """Two seeds form two allocations, and the two repeats in each are equal runs: the resumed one must match."""
    folder, gate = tmp_path / "sweep", tmp_path / "gate"
    gate.mkdir()
    words = [
        *("-m", *TINY, "model=tests.networks:gated", f"data.root={image_folder}", "batch_size=16"),
        *("epochs=8", "warmup_steps=1", "evaluate_every=-1", "seed=1,2", "repeats=2", f"hydra.sweep.dir={folder}"),
        *("launcher=slurm", "launcher.cpus_per_task=1", "launcher.time_min=30"),
    ]
    with slurm.two_nodes(tmp_path / "slurm") as environment:
        environment = ENVIRONMENT | environment | {"GATE": str(gate)}
        command = [sys.executable, "train.py", *words]
        waiting = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)

        def slurm_command(*command: str) -> str:
            return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout

        requeued = folder / "tests.networks.gated_contiguous_seed=2_1"
        wait_until(lambda: len(list(gate.iterdir())) == 2)
        [first, second] = sorted(slurm_command("squeue", "-h", "--array", "-o", "%i").split())
        slurm_command("scancel", first)
        slurm_command("scancel", "--batch", "--signal=TERM", second)
        wait_until(lambda: slurm_command("squeue", "-h", "-j", second, "-o", "%T").strip() == "PENDING")
        (gate / "open").touch()
        slurm_command("scontrol", "update", f"jobid={second}", "StartTime=now")  # Slurm would wait two minutes
        output, _ = waiting.communicate(timeout=LIMIT_S)
    assert waiting.returncode == 1
    problems = [problem_of(folder / job.name) for job in read_sweep(folder).jobs]
    assert [problem is None for problem in problems] == [False, False, True, True], output
    failed = json.loads((folder / "comparison.json").read_text())["failed"]
    assert [entry["job"] for entry in failed] == [0, 1]
    assert ["interrupted" in failed[0]["why"], failed[1]["why"]] == [True, "has not run"], output
    assert "resume_sweep=" in output
    undisturbed = folder / requeued.name.replace("_1", "_2")
    assert "resumed from" in (requeued / "train.log").read_text()
    assert losses(requeued) == losses(undisturbed)


def losses(run: Path) -> dict[int, Any]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return {record["step"]: record["loss"] for record in records if record["kind"] == "train"}
