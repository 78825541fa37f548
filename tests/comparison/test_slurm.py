"""Sweeps on a Slurm cluster: what does not need one; tests/clusters runs them."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from cl_train.comparison.sweep import array_script, own_allocation, run_sweep
from cl_train.comparison.sweep_plan import Sweep, plan_sweep, read_sweep
from cl_train.config.schema import ConfigError, LauncherConfig


@pytest.fixture
def planned(tmp_path: Path) -> Sweep:
    words = ["channels_last=true,false", "seed=1,2", "launcher=slurm", "launcher.time_min=30"]
    sweep = plan_sweep(["-m", *words, f"hydra.sweep.dir={tmp_path / 'sweep'}"])
    sweep.folder.mkdir()
    sweep.save()
    return sweep


@pytest.fixture
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """An sbatch that refuses everything, and a squeue that knows of nothing."""
    bodies = {"sbatch": "echo 'invalid partition' >&2; exit 1", "squeue": "exit 0"}
    popen = subprocess.Popen

    def start(command: list[str], *arguments: object, **words: object) -> object:
        return popen(["sh", "-c", bodies[command[0]]] if command[0] in bodies else command, *arguments, **words)  # type: ignore[call-overload]

    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "Popen", start)


def test_jobs_that_are_compared_form_one_element(planned: Sweep) -> None:
    assert [[job.number for job in group] for group in planned.missing_groups()] == [[0, 1], [2, 3]]
    assert not any("launcher" in word for job in planned.jobs for word in job.overrides)
    assert read_sweep(planned.folder) == planned
    [[first, _]] = plan_sweep(["-m", f"resume_sweep={planned.folder}", "only_group=1"]).missing_groups()
    assert first.number == 2
    with pytest.raises(ConfigError, match="only_group needs resume_sweep"):
        plan_sweep(["-m", "seed=1,2", "only_group=1"])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["--array=0,1\n", "--time=30\n", "--signal=B:USR2@120", "--ntasks-per-node=1\n", "only_group="]),
        (
            {"max_parallel": 1, "time_min": 1, "setup": ["module load cuda"]},
            ["=0,1%1\n", "USR2@20", "\nmodule load cuda\n"],
        ),
        (
            {"nodes": 2, "cpus_per_task": 4, "partition": "gpu"},
            ["-node=4\n", "--cpus-per-task=4\n", "--partition=gpu\n"],
        ),
        ({"cpus_per_task": 4, "gpus_per_node": 8}, ["--cpus-per-task=32\n", "--gpus-per-node=8\n"]),
    ],
)
def test_the_script_of_an_array(planned: Sweep, changes: dict[str, object], expected: list[str]) -> None:
    nproc = 8 if "cpus_per_task" in changes else 1
    sweep = replace(
        planned,
        launcher=replace(planned.launcher, **changes),  # type: ignore[arg-type]
        jobs=[replace(job, nproc=nproc) for job in planned.jobs],
    )
    script = array_script(sweep, [0, 1])
    assert [words for words in expected if words not in script] == []


def test_an_element_of_an_array_is_not_the_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM_JOB_ID of the last element is the id of the array."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    assert own_allocation() == "7"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    assert own_allocation() == "7_1"


def test_without_slurm_nothing_is_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="no sbatch"):
        run_sweep(["-m", "channels_last=true,false", "launcher=slurm", f"hydra.sweep.dir={tmp_path}/a"])
    assert not (tmp_path / "a").exists()


@pytest.mark.usefixtures("no_slurm")
@pytest.mark.parametrize(
    ("words", "is_warned"), [([], True), (["device=cpu"], False), (["launcher.gpus_per_node=1"], False)]
)
def test_what_sbatch_refuses_can_be_submitted_again(
    words: list[str], is_warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No request for GPUs is reported."""
    words = ["-m", "channels_last=true,false", "launcher=slurm", f"hydra.sweep.dir={tmp_path}/a", *words]
    with pytest.raises(ConfigError, match=r"invalid partition; resume_sweep="):
        run_sweep(words)
    assert ("launcher.gpus_per_node" in capsys.readouterr().out) == is_warned
    assert len(read_sweep(tmp_path / "a").missing_groups()) == 1


@pytest.mark.usefixtures("no_slurm")
def test_processes_are_spread_evenly(tmp_path: Path) -> None:
    words = ["channels_last=true,false", "launcher=slurm", "launcher.nodes=2", f"hydra.sweep.dir={tmp_path}/a"]
    with pytest.raises(ConfigError, match=r"launcher\.nodes=2"):
        run_sweep(["-m", *words])


def test_a_record_of_an_earlier_version_can_be_read(tmp_path: Path) -> None:
    job = '{"number": 0, "name": "a", "overrides": [], "status": "failed", "exit_code": 1, "why": "x", "seconds": 1.0}'
    (tmp_path / "sweep.json").write_text(f'{{"compare_by": "seed", "allocations": {{}}, "jobs": [{job}]}}')
    found = read_sweep(tmp_path)
    assert found.launcher == LauncherConfig() and [job.name for job in found.jobs] == ["a"]
