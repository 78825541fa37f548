"""Sweeps on a Slurm cluster: what does not need one; tests/clusters runs them."""

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cl_train.comparison.sweep import array_script, own_allocation, run_sweep
from cl_train.comparison.sweep_plan import plan_sweep, read_sweep
from cl_train.config.schema import ConfigError, LauncherConfig

WORDS = ("-m", "channels_last=true,false", "launcher=slurm")


@pytest.fixture
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """An sbatch that refuses everything, and a squeue that knows of nothing."""
    bodies, run = {"sbatch": "echo 'invalid partition' >&2; exit 1", "squeue": "exit 0"}, subprocess.run

    def start(command: list[str], **words: Any) -> Any:
        return run(["sh", "-c", bodies[command[0]]] if command[0] in bodies else command, **words)

    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", start)


@pytest.mark.parametrize(
    ("nproc", "changes", "expected"),
    [
        (1, {}, ["--array=0,1\n", "--time=30\n", "--signal=B:USR2@120", "--ntasks-per-node=1\n", "only_group="]),
        (1, {"max_parallel": 1, "time_min": 1}, ["=0,1%1\n", "USR2@20"]),
        (8, {"nodes": 2, "cpus_per_task": 4}, ["-node=4\n", "--cpus-per-task=4\n"]),
        (8, {"cpus_per_task": 4, "gpus_per_node": 8}, ["--cpus-per-task=32\n", "--gpus-per-node=8\n"]),
        (1, {"partition": "gpu", "setup": ["module load cuda"]}, ["--partition=gpu\n", "\nmodule load cuda\n"]),
    ],
)
def test_jobs_that_are_compared_form_one_element_of_an_array(
    nproc: int, changes: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    words = ["seed=1,2", "launcher.time_min=30", f"nproc={nproc}", "epochs=50", f"hydra.sweep.dir={tmp_path}"]
    planned = plan_sweep([*WORDS, *words])
    script = array_script(replace(planned, launcher=replace(planned.launcher, **changes)), [0, 1])
    assert [words for words in expected if words not in script] == []
    assert [[job.number for job in group] for group in planned.missing_groups()] == [[0, 1], [2, 3]]
    assert not any("launcher" in word for job in planned.jobs for word in job.overrides)
    planned.save()
    assert read_sweep(planned.folder) == planned
    [[first, _]] = plan_sweep(["-m", f"resume_sweep={planned.folder}", "only_group=1"]).missing_groups()
    assert first.number == 2


@pytest.mark.parametrize(
    ("array", "name"), [({}, "7"), ({"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}, "7_1")]
)
def test_an_element_of_an_array_is_not_the_array(
    array: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM_JOB_ID of the last element is the id of the array."""
    monkeypatch.setattr(os, "environ", {"SLURM_JOB_ID": "7"} | array)
    assert own_allocation() == name


def test_without_slurm_nothing_is_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="no sbatch"):
        run_sweep([*WORDS, f"hydra.sweep.dir={tmp_path}/a"])
    assert not (tmp_path / "a").exists()


@pytest.mark.usefixtures("no_slurm")
@pytest.mark.parametrize(
    ("word", "is_warned"), [("epochs=5", True), ("device=cpu", False), ("launcher.gpus_per_node=1", False)]
)
def test_what_sbatch_refuses_can_be_submitted_again(
    word: str, is_warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No request for GPUs is reported, and processes are spread evenly."""
    with pytest.raises(ConfigError, match=r"launcher\.nodes=2"):
        run_sweep([*WORDS, "launcher.nodes=2", f"hydra.sweep.dir={tmp_path}/a"])
    with pytest.raises(ConfigError, match=r"invalid partition; resume_sweep="):
        run_sweep([*WORDS, word, f"hydra.sweep.dir={tmp_path}/a"])
    assert ("launcher.gpus_per_node" in capsys.readouterr().out) == is_warned
    assert len(read_sweep(tmp_path / "a").missing_groups()) == 1


def test_a_record_of_an_earlier_version_can_be_read(tmp_path: Path) -> None:
    job = '{"number": 0, "name": "a", "overrides": [], "status": "failed", "exit_code": 1, "why": "x", "seconds": 1.0}'
    (tmp_path / "sweep.json").write_text(f'{{"compare_by": "seed", "allocations": {{}}, "jobs": [{job}]}}')
    found = read_sweep(tmp_path)
    assert found.launcher == LauncherConfig() and [job.name for job in found.jobs] == ["a"]
