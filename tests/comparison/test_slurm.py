"""Sweeps on a Slurm cluster; the tests without Slurm check what does not need one."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from cl_train.comparison import slurm
from cl_train.comparison.local_jobs import own_allocation
from cl_train.comparison.slurm import active_allocations, record_missing_outcomes
from cl_train.comparison.sweep import run_sweep
from cl_train.comparison.sweep_plan import Sweep, plan_sweep, read_sweep
from cl_train.config.schema import ConfigError, LauncherConfig


@pytest.fixture
def planned(tmp_path: Path) -> Sweep:
    words = ["channels_last=true,false", "seed=1,2", "launcher=slurm", "launcher.time_min=30"]
    sweep = plan_sweep(["-m", *words, f"hydra.sweep.dir={tmp_path / 'sweep'}"])
    sweep.folder.mkdir()
    sweep.allocations = {"7_0": [0, 1], "7_1": [2, 3]}
    return sweep


def test_jobs_that_are_compared_form_one_allocation(planned: Sweep) -> None:
    assert [[job.number for job in group] for group in planned.pending_groups()] == [[0, 1], [2, 3]]
    assert not any("launcher" in word for job in planned.jobs for word in job.overrides)


def test_the_record_holds_launcher_allocations_and_outcomes(planned: Sweep) -> None:
    planned.save()
    (planned.folder / "slurm").mkdir()
    planned.save_outcome(replace(planned.jobs[1], status="completed", exit_code=0))
    found = read_sweep(planned.folder)
    assert found.launcher == LauncherConfig(name="slurm", time_min=30)
    assert found.allocations == planned.allocations
    assert [job.status for job in found.jobs] == ["pending", "completed", "pending", "pending"]
    found.save()
    found.remove_outcomes()
    assert read_sweep(planned.folder).jobs == found.jobs


def test_jobs_of_an_ended_allocation_have_failed(planned: Sweep) -> None:
    planned.jobs[0].status = "completed"
    planned.jobs[1].status, planned.jobs[1].why = "interrupted", "stopped by SIGTERM"
    states = {"7_0": "CANCELLED", "7_1": "PENDING"}
    assert active_allocations(planned, states) == ["7_1"]
    record_missing_outcomes(planned, states)
    assert [job.status for job in planned.jobs] == ["completed", "failed", "pending", "pending"]
    assert [word in str(planned.jobs[1].why) for word in ("SIGTERM", "7_0", "CANCELLED")] == [True] * 3
    assert "PENDING" in str(planned.jobs[2].why)


def test_options_of_sbatch() -> None:
    launcher = LauncherConfig(name="slurm", nodes=2, cpus_per_task=4, time_min=1, setup=["module load cuda"])
    several = slurm._parameters(launcher, nproc=8)
    assert (several["nodes"], several["ntasks_per_node"], several["cpus_per_task"]) == (2, 4, 4)
    assert several["additional_parameters"]["signal"] == "B:USR2@20"
    assert several["setup"][1:] == ["module load cuda"]
    one = slurm._parameters(replace(launcher, nodes=1), nproc=8)
    assert (one["nodes"], one["ntasks_per_node"], one["cpus_per_task"]) == (1, 1, 32)


def test_an_element_of_an_array_is_not_the_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM_JOB_ID of the last element is the id of the array."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    assert own_allocation() == "7"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    assert own_allocation() == "7_1"


def test_without_submitit_nothing_is_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"cl-train\[slurm\]"):
        run_sweep(["-m", "channels_last=true,false", "launcher=slurm", f"hydra.sweep.dir={tmp_path}/a"])
    assert not (tmp_path / "a").exists()


def test_processes_are_spread_evenly(planned: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm.shutil, "which", lambda name: name)  # type: ignore[attr-defined]
    planned.launcher = LauncherConfig(name="slurm", nodes=2)
    with pytest.raises(ConfigError, match=r"launcher\.nodes=2"):
        slurm.check_slurm(planned)


@pytest.mark.parametrize(
    ("words", "is_warned"), [([], True), (["device=cpu"], False), (["launcher.gpus_per_node=1"], False)]
)
def test_a_missing_request_for_gpus_is_reported(
    words: list[str],
    is_warned: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(slurm.shutil, "which", lambda name: name)  # type: ignore[attr-defined]
    words = ["-m", "channels_last=true,false", "launcher=slurm", f"hydra.sweep.dir={tmp_path}/a", *words]
    slurm.check_slurm(plan_sweep(words))
    assert ("launcher.gpus_per_node" in capsys.readouterr().out) == is_warned


def test_a_record_of_an_earlier_version_can_be_read(planned: Sweep) -> None:
    planned.save()
    document = json.loads((planned.folder / "sweep.json").read_text())
    del document["launcher"], document["allocations"], document["jobs"][0]["group"]
    (planned.folder / "sweep.json").write_text(json.dumps(document))
    assert read_sweep(planned.folder).launcher == LauncherConfig()
