"""The launcher's variables; which rank a failed collective is blamed on; two processes train like
one.
"""

import multiprocessing
import os
import socket
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from unittest.mock import Mock

import pytest
import torch

from cl_train.config.command_line import check_command_line
from cl_train.errors import ConfigError
from cl_train.system import distributed
from cl_train.system.distributed import Dist, RankFault, processes, watch_ranks
from cl_train.system.processes import (
    Launch,
    adopt_srun,
    bind_to_cores,
    cores_of_process,
    read_launch,
)
from cl_train.training import loop
from tests.conftest import Run
from tests.faults.forkserver import train_script
from tests.processes import LIMIT_S
from tests.ranks import TINY, fork_two_ranks, launch

CPU = torch.device("cpu")
ADDRESS = {"MASTER_PORT": "29500", "MASTER_ADDR": "127.0.0.1"}
RANK_1 = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", **ADDRESS}


def test_the_variables_of_torchrun():
    for single in ({}, ADDRESS, {"RANK": "0", "WORLD_SIZE": "1"}):
        assert read_launch(single) is None
    assert read_launch(RANK_1) == Launch(1, 1, 2)
    refused = [{"RANK": "1"}, {"WORLD_SIZE": "2"}]
    refused += [RANK_1 | {"MASTER_PORT": "x"}, RANK_1 | {"MASTER_ADDR": ""}]
    refused += [RANK_1 | {"RANK": text} for text in ("abc", "-1", "", "0", "2")]
    for variables in refused:
        shown = ", ".join(f"{name}={variables.get(name, 'unset')!r}" for name in RANK_1)
        with pytest.raises(ConfigError, match=f"^the environment has {shown}: start with torchrun"):
            read_launch(variables)


def test_the_check_does_not_import_torch():
    modules = ", ".join(f"cl_train.system.{name}" for name in ("files", "processes"))
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


# What `srun --nodes=2 --ntasks-per-node=2` sets for its last task.
TASK = "JOB_ID=12345 STEP_ID=2 NTASKS=4 STEP_NUM_TASKS=4 PROCID=3 LOCALID=1 NODEID=1"
TASK += " STEP_TASKS_PER_NODE=2(x2) JOB_NODELIST=gpu[003-007,010],other1 STEP_NODELIST=gpu[004,010]"
SRUN = dict(f"SLURM_{word}".split("=") for word in TASK.split())
# Of a compressed list.
FIRST_HOSTS = {"n1": "n1", "gpu[003-007,010],other1": "gpu003", "other1,gpu[003-007]": "other1"}
FIRST_HOSTS |= {"gpu[010,012-014]-ib": "gpu010-ib", "rack[2-3]node[01-16],x": "rack2node01"}


def adopted(**variables):
    """The environment of a task of `srun` afterwards."""
    adopt_srun(environment := SRUN | variables)
    return environment


def test_a_task_of_srun_gets_the_variables_of_torchrun():
    found = adopted()
    assert read_launch(found) == Launch(rank=3, local_rank=1, world_size=4)
    assert (found["LOCAL_WORLD_SIZE"], found["MASTER_ADDR"]) == ("2", "gpu004")
    assert adopted(SLURM_STEP_TASKS_PER_NODE="3,1")["LOCAL_WORLD_SIZE"] == "1"
    assert 20000 <= int(found["MASTER_PORT"]) < 30000
    ports = {adopted(SLURM_STEP_ID=str(step))["MASTER_PORT"] for step in range(9)}
    assert len(ports) == 9, "steps of one job run beside each other"
    own = adopted(MASTER_ADDR="10.0.0.1", MASTER_PORT="1234")
    assert (own["MASTER_ADDR"], own["MASTER_PORT"]) == ("10.0.0.1", "1234")
    for nodes, host in FIRST_HOSTS.items():
        assert adopted(SLURM_STEP_NODELIST=nodes)["MASTER_ADDR"] == host


def test_a_process_that_srun_did_not_start_as_one_of_several_is_left_alone():
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "1"}
    others = [
        {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"},  # salloc
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},  # an sbatch script
        SRUN | {"SLURM_STEP_NUM_TASKS": "1"},  # srun --ntasks=1
        SRUN | ranks,  # torchrun inside srun
    ]
    for variables in others:
        adopt_srun(environment := dict(variables))
        assert environment == variables


def test_cores_are_divided_unless_srun_bound_them():
    cores = len(os.sched_getaffinity(0))
    half = max(1, cores // 2)
    bound = SRUN | {"SLURM_CPU_BIND_TYPE": "mask_cpu:"}
    assert cores_of_process(2, {}) == cores_of_process(8, {"LOCAL_WORLD_SIZE": "2"}) == half
    assert cores_of_process(4, bound) == cores
    assert cores_of_process(2, bound | {"TORCHELASTIC_RUN_ID": "1"}) == half


def cores_of_bound_rank(rank, ranks):
    bind_to_cores({"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks})
    return os.sched_getaffinity(0), cores_of_process(int(ranks))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_ranks_of_a_cpu_machine_have_their_own_cores():
    def in_child(rank, ranks):
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
            return pool.submit(cores_of_bound_rank, rank, ranks).result(LIMIT_S)

    bound = [in_child("0", "2"), in_child("1", "2")]
    alone = in_child("0", "1")

    share = len(os.sched_getaffinity(0)) // 2
    assert not bound[0][0] & bound[1][0]
    assert [(len(cores), count) for cores, count in bound] == [(share, share)] * 2
    assert alone == (os.sched_getaffinity(0), len(os.sched_getaffinity(0)))


# --- ranks that are missing; real ranks are killed and stopped in tests/faults --------------------


@pytest.mark.slow
def test_ranks_that_do_not_meet_are_named(monkeypatch):
    monkeypatch.setattr(distributed, "end_with_parent", lambda signum: None)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))  # nobody listens, and nobody else gets the port
        port = str(server.getsockname()[1])
        for name, value in (RANK_1 | {"MASTER_PORT": port}).items():
            monkeypatch.setenv(name, value)
        with (
            pytest.raises(ConnectionError, match=rf"rank 1 .*127\.0\.0\.1:{port}"),
            processes("cpu", 0.5),
        ):
            pass


def store(silent):
    """Counters of three ranks, read twice: those of `silent` stand still. Without a `silent` it
    does not respond.
    """
    both = [5, 5, 5, *(5 if rank in (silent or ()) else 9 for rank in range(3))]
    return Mock(add=Mock(side_effect=both if silent is not None else RuntimeError("no answer")))


def test_the_rank_whose_counter_stands_still_is_named(monkeypatch):
    monkeypatch.setattr(distributed, "LISTEN_S", 0.0)
    for rank, silent, named in (
        (0, (0, 1, 2), "rank 1 is dead or hangs, rank 2 is dead or hangs"),
        (0, (), "a rank hangs although its process is alive"),
        (1, None, "rank 0 is dead or hangs"),
        (0, None, "the ranks' store does not respond"),
    ):
        monkeypatch.setattr(distributed, "connect_to_store", partial(store, silent))
        assert distributed.find_silent_ranks(Dist(rank, 3, CPU)) == named


def test_only_errors_of_collectives_are_faults_of_ranks(monkeypatch):
    monkeypatch.setattr(distributed, "connect_to_store", Mock)
    monkeypatch.setattr(distributed, "find_silent_ranks", lambda dist: "rank 1 is dead or hangs")
    gloo = RuntimeError("[gloo/transport/tcp/pair.cc:545] Connection reset by peer")
    for error, ranks, is_fault in (
        (gloo, 2, True),
        (RuntimeError("Application timeout caused pair closure"), 2, True),
        (torch.distributed.DistNetworkError("x"), 2, True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), 2, False),
        (gloo, 1, False),
    ):
        with pytest.raises(RuntimeError) as caught, watch_ranks(Dist(0, ranks, CPU)):
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
    fork_two_ranks(tmp_path, partial(train_script, [*TINY, *words, *shared]))
    expected, *others = (Run(tmp_path / name, 0) for name in ("one", "two", "accumulated"))
    assert expected.summary["val"]["images"] == 21, "the ranks have 11 and 10"
    for run in others:
        weights = run.checkpoint()["model"], expected.checkpoint()["model"]
        torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-5)
        assert run.summary["val"] == pytest.approx(expected.summary["val"], rel=1e-4)
        assert (run.summary["world_size"], run.summary["global_batch_size"]) == (2, 32)
    assert two.stdout.count("Epoch: [0][1/3]") == 1, "rank 0 alone speaks"
    assert len(list((tmp_path / "two").glob("events*"))) == 1
