"""The launcher's variables; a failed collective; two processes train like one."""

import os
from functools import partial

import pytest
import torch

from cl_train.config.command_line import check_command_line
from cl_train.errors import ConfigError, RankFault
from cl_train.system.distributed import rank_faults
from cl_train.system.processes import (
    Launch,
    cores_of_process,
    read_launch,
)
from cl_train.training import loop
from tests.conftest import Run
from tests.faults.forkserver import train_script
from tests.ranks import TINY, launch, run_two_ranks

ADDRESS = {"MASTER_PORT": "29500", "MASTER_ADDR": "127.0.0.1"}
RANK_1 = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", **ADDRESS}


def test_the_variables_of_torchrun():
    for single in ({}, ADDRESS, {"RANK": "0", "WORLD_SIZE": "1"}):
        assert read_launch(single) is None
    assert read_launch(RANK_1) == Launch(1, 1, 2)
    for variables in ({"RANK": "1"}, RANK_1 | {"MASTER_ADDR": ""}, RANK_1 | {"RANK": "2"}):
        shown = ", ".join(f"{name}={variables.get(name, 'unset')!r}" for name in RANK_1)
        with pytest.raises(ConfigError, match=f"^the environment has {shown}: start with torchrun"):
            read_launch(variables)


def test_several_tasks_of_srun_without_torchrun_are_refused():
    """Each would train the whole run."""
    with pytest.raises(ConfigError, match=r"^srun started 4 tasks, .* torchrun, see scripts/slurm"):
        read_launch({"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"})
    assert read_launch(RANK_1 | {"SLURM_STEP_NUM_TASKS": "4"}) == Launch(1, 1, 2)
    for one in ({"SLURM_NTASKS": "4"}, {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}):
        assert read_launch(one) is None  # of salloc or sbatch; srun --ntasks=1


def test_cores_are_divided_among_the_ranks_of_a_machine():
    half = max(1, len(os.sched_getaffinity(0)) // 2)
    assert cores_of_process(2, {}) == cores_of_process(8, {"LOCAL_WORLD_SIZE": "2"}) == half


def test_only_errors_of_collectives_are_faults_of_ranks():
    """Real ranks are killed in tests/faults."""
    for error, is_fault in (
        (RuntimeError("[gloo/transport/tcp/pair.cc:545] Connection reset by peer"), True),
        (torch.distributed.DistNetworkError("x"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ):
        with pytest.raises(RuntimeError) as caught, rank_faults():
            raise error
        assert isinstance(caught.value, RankFault) == is_fault, error


# --- two processes --------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_train_like_one(image_folder, tmp_path):
    (tmp_path / "one").mkdir()
    shared = [f"data.root={image_folder}", "epochs=2", "channels_last=true"]
    (cfg,) = check_command_line([*TINY, "batch_size=32", *shared])
    assert loop.train(cfg, tmp_path / "one").exit_code == 0
    words = [f"hydra.run.dir={tmp_path}/two", "batch_size=16", "log_to=[tensorboard]", *shared]
    two = launch(2, "train.py", *TINY, *words)
    assert two.returncode == 0, two.stdout + two.stderr
    words = [f"hydra.run.dir={tmp_path}/accumulated", "batch_size=8", "global_batch_size=32"]
    run_two_ranks(tmp_path, partial(train_script, [*TINY, *words, *shared]))
    expected, *others = (Run(tmp_path / name, 0) for name in ("one", "two", "accumulated"))
    assert expected.summary["val"]["images"] == 21, "the ranks have 11 and 10"
    for run in others:
        weights = run.checkpoint()["model"], expected.checkpoint()["model"]
        torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-5)
        assert run.summary["val"] == pytest.approx(expected.summary["val"], rel=1e-4)
        assert (run.summary["world_size"], run.summary["global_batch_size"]) == (2, 32)
    assert two.stdout.count("Epoch: [0][1/3]") == 1, "rank 0 alone speaks"
    assert len(list((tmp_path / "two").glob("events*"))) == 1
