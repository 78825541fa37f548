"""The launcher's environment variables are read, or refused in one line."""

import os
import socket
import subprocess
import sys

import pytest

from cl_train.config.schema import ConfigError
from cl_train.system.launcher import (
    Launch,
    cores_of_process,
    first_host,
    read_launch,
    srun_variables,
    tasks_per_node,
)

ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_the_variables_of_torchrun() -> None:
    assert read_launch({}) is None
    assert read_launch(ADDRESS) is None
    assert read_launch({"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert read_launch({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"} | ADDRESS) == Launch(3, 1, 4)


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"RANK": "1"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"RANK": "abc", "LOCAL_RANK": "0", "WORLD_SIZE": "2"} | ADDRESS, "RANK"),
        ({"RANK": "-1", "LOCAL_RANK": "0", "WORLD_SIZE": "2"} | ADDRESS, "RANK"),
        ({"RANK": "", "LOCAL_RANK": "0", "WORLD_SIZE": "2"} | ADDRESS, "RANK"),
        ({"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2"} | ADDRESS, "WORLD_SIZE"),
        ({"RANK": "0", "LOCAL_RANK": "1", "WORLD_SIZE": "2"} | ADDRESS, "LOCAL_RANK"),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"} | ADDRESS | {"MASTER_PORT": "x"}, "MASTER_PORT"),
    ],
)
def test_others_are_refused_in_one_line(variables: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_launch(variables)
    (problem,) = caught.value.problems
    assert named in problem and "torchrun" in problem and "\n" not in problem


def test_the_check_does_not_import_torch() -> None:
    program = "import sys, cl_train.system.launcher; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


# What `srun --nodes=2 --ntasks-per-node=2` sets for its last task.
SRUN = {
    "SLURM_JOB_ID": "12345",
    "SLURM_STEP_ID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_NODELIST": "gpu[003-007,010],other1",
    "SLURM_STEP_NODELIST": "gpu[004,010]",
}


def test_a_task_of_srun_gets_the_variables_of_torchrun() -> None:
    found = srun_variables(SRUN)
    assert read_launch(found) == Launch(rank=3, local_rank=1, world_size=4)
    assert (found["LOCAL_WORLD_SIZE"], found["MASTER_ADDR"]) == ("2", "gpu004")
    assert 20000 <= int(found["MASTER_PORT"]) < 30000
    ports = {srun_variables(SRUN | {"SLURM_STEP_ID": str(step)})["MASTER_PORT"] for step in range(9)}
    assert len(ports) == 9, "steps of one job run beside each other"
    own = srun_variables(SRUN | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"})
    assert (own["MASTER_ADDR"], own["MASTER_PORT"]) == ("10.0.0.1", "1234")


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"},  # a shell of salloc
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"},  # an sbatch script
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},  # srun --ntasks=1, or the shell of an interactive step
        {**SRUN, "RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "1"},  # torchrun inside srun
    ],
)
def test_a_process_that_srun_did_not_start_as_one_of_several_is_left_alone(variables: dict[str, str]) -> None:
    assert srun_variables(variables) == {}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n[1-2]", "n1"),
        ("gpu[003-007,010],other1", "gpu003"),
        ("other1,gpu[003-007]", "other1"),
        ("gpu[010,012-014]-ib", "gpu010-ib"),
        ("rack[2-3]node[01-16],x", "rack2node01"),
        ("a-b.example.org,c", "a-b.example.org"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_compressed_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_task_counts_are_expanded() -> None:
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert tasks_per_node("8") == [8]


def test_cores_are_divided_unless_srun_bound_them() -> None:
    cores = len(os.sched_getaffinity(0))
    bound = {"SLURM_CPU_BIND_TYPE": "mask_cpu:"}
    assert cores_of_process(2, {}) == cores_of_process(8, {"LOCAL_WORLD_SIZE": "2"}) == max(1, cores // 2)
    assert cores_of_process(4, SRUN | bound) == cores
    assert cores_of_process(2, SRUN | bound | {"TORCHELASTIC_RUN_ID": "1"}) == max(1, cores // 2)


def test_ranks_that_do_not_meet_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from cl_train.system.distributed import processes

    monkeypatch.setattr("cl_train.system.distributed.end_with_parent", lambda signum: None)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))  # nobody listens, and nobody else gets the port
        port = str(server.getsockname()[1])
        variables = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ConnectionError, match=rf"rank 1 .*127\.0\.0\.1:{port}"), processes("cpu", 0.5):
            pass
