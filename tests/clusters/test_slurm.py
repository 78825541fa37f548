"""The scripts of docs/clusters.md as they stand, on a real Slurm of two virtual nodes.

It has its own configuration, ports and munge, and needs root; skipped where Slurm is missing.
"""

import os
import shutil
import socket
import subprocess
from functools import partial

import pytest

from cl_train.sweeps.launch import missing_jobs
from cl_train.sweeps.plan import read_sweep
from tests.faults import tiny
from tests.faults.forkserver import Forked, train_script
from tests.processes import LIMIT_S, free_ports, wait_until
from tests.ranks import ENVIRONMENT, ROOT, TINY, fork_two_ranks, losses

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0
        or not all(map(shutil.which, ("slurmctld", "slurmd", "munged", "mungekey"))),
        reason="needs slurmctld, slurmd, munge and root",
    ),
]
SETTINGS = (*TINY, "epochs=2", "batch_size=16", "global_batch_size=32", "evaluate_every=-1")
INTERRUPTED = (*SETTINGS, "model=tests.networks:gated", "epochs=8", "checkpoint.every_epochs=0")
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MinJobAge=600
SchedulerParameters=sched_interval=1,bf_interval=1
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={port_1} CPUs=2 RealMemory=4000
NodeName={host}-2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port_2} CPUs=2 RealMemory=4000
PartitionName=main Nodes=ALL Default=YES State=UP
"""


def ask(environment, *command):
    return subprocess.run(command, env=environment, capture_output=True, text=True).stdout.strip()


def start_soon(environment, job):
    """A requeued job; Slurm would wait cred_expire."""
    wait_until(lambda: ask(environment, "squeue", "-h", "-j", job, "-o", "%T") == "PENDING")
    # Within the second of the requeue, slurmd still takes the job for a killed one.
    ask(environment, "scontrol", "update", f"jobid={job}", "StartTime=now+2")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The environment in which `sbatch` and `srun` use this Slurm.

    The first node has this machine's host name.
    """
    folder, host = tmp_path_factory.mktemp("slurm"), socket.gethostname()
    port, port_1, port_2 = free_ports(3)
    for name in ("state", f"spool.{host}", f"spool.{host}-2"):
        (folder / name).mkdir()
    values = {"folder": folder, "host": host, "port": port, "port_1": port_1, "port_2": port_2}
    (folder / "slurm.conf").write_text(CONFIGURATION.format(**values))
    outer = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("SLURM")}
    programs = f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
    own = {"SLURM_CONF": str(folder / "slurm.conf"), "GLOO_SOCKET_IFNAME": "lo"}
    environment = outer | own | {"PATH": programs}
    subprocess.run(["mungekey", "-k", folder / "munge.key"], check=True)
    munge_files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    munge = ("munged", "-F", "--force", f"--socket={folder}/munge.socket", *munge_files)
    idle = ("sinfo", "-h", "-t", "idle", "-o", "%D")
    daemons = {
        munge: (folder / "munge.socket").exists,
        ("slurmctld", "-D", "-c"): lambda: "is UP" in ask(environment, "scontrol", "ping"),
        ("slurmd", "-D", "-N", host): lambda: True,
        ("slurmd", "-D", "-N", f"{host}-2"): lambda: ask(environment, *idle) == "2",
    }
    running = []
    try:
        for command, is_ready in daemons.items():
            with (folder / "daemons.log").open("ab") as log:
                running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            wait_until(is_ready)
        yield environment | {"PROCESSES": "1"}
    finally:
        ask(environment, "scancel", "--state=RUNNING")
        wait_until(lambda: not ask(environment, "squeue", "-h", "-t", "RUNNING,COMPLETING"))
        for daemon in reversed(running):
            daemon.terminate()
            daemon.wait(LIMIT_S)


@pytest.fixture
def submit(cluster, image_folder):
    def submit(script, folder, *settings, **environment):
        folder.mkdir()
        words = [f"data.root={image_folder}", f"hydra.run.dir={folder / 'run'}", *settings]
        command = ["sbatch", "--parsable", f"--output={folder / 'log'}"]
        command += [f"scripts/slurm/{script}.sbatch", *words]
        run = partial(subprocess.run, capture_output=True, text=True, check=True)
        done = run(command, cwd=ROOT, env=cluster | environment)
        return done.stdout.strip()

    return submit


def test_each_script_trains_like_one_process(submit, image_folder, tmp_path):
    for name in ("one_node", "several_nodes"):
        submit(name, tmp_path / name, *SETTINGS, PROCESSES="2" if name == "one_node" else "1")
    words = (f"data.root={image_folder}", f"hydra.run.dir={tmp_path / 'alone'}")
    assert Forked(partial(train_script, [*SETTINGS, *words]), tmp_path / "log").wait() == 0
    expected = losses(tmp_path / "alone")
    assert [step for step, _ in expected] == [1, 2, 3, 4, 5, 6]
    for name in ("one_node", "several_nodes"):
        folder = tmp_path / name
        wait_until(lambda run=folder / "run": tiny.summary(run).get("status") == "completed")
        assert tiny.summary(folder / "run")["world_size"] == 2, name
        for found, one in zip(losses(folder / "run"), expected, strict=True):
            assert found == pytest.approx(one, abs=1e-6), name
        log = (folder / "log").read_text()
        assert log.count("Epoch: [0][1/3]") == 1, "rank 0 alone writes to the console"
        assert ("ranks: 0 on" in log) == (name != "one_node"), "where each rank runs"


def test_a_requeued_job_resumes_exactly(submit, cluster, image_folder, tmp_path):
    """`scancel --batch --signal=TERM` signals the script, as `--signal=B:TERM@120` does."""
    undisturbed, folder, gate = (tmp_path / name for name in ("undisturbed", "requeued", "gate"))
    gate.mkdir()
    job = submit("several_nodes", folder, *INTERRUPTED, GATE=str(gate))
    wait_until(lambda: len(list(gate.iterdir())) == 2)
    subprocess.run(["scancel", "--batch", "--signal=TERM", job], env=cluster, check=True)
    start_soon(cluster, job)
    (gate / "open").touch()
    # One rank per node: as many threads as there, and so the same sums.
    words = [*INTERRUPTED, f"data.root={image_folder}", f"hydra.run.dir={undisturbed}"]
    fork_two_ranks(tmp_path, partial(train_script, words), GATE=str(gate), LOCAL_WORLD_SIZE="1")
    wait_until(lambda: tiny.summary(folder / "run").get("status") == "completed")
    assert "resumed from" in (folder / "log").read_text()
    assert losses(folder / "run") == losses(undisturbed)


def test_a_sweep_in_one_allocation_is_requeued_and_continues(
    submit, cluster, image_folder, tmp_path
):
    """The two repeats are equal runs: the one that was interrupted must match the other."""
    sweep, gate = tmp_path / "multirun", tmp_path / "gate"
    gate.mkdir()
    words = [*TINY, "model=tests.networks:gated", f"data.root={image_folder}", "batch_size=16"]
    words += ["epochs=8", "warmup_steps=1", "evaluate_every=-1", "repeats=2"]
    words += ["environment='A=1'"]  # named again after the requeue
    command = ["sbatch", "--parsable", f"--output={tmp_path / 'log'}"]
    command += ["scripts/slurm/sweep.sbatch", str(sweep), *words]
    environment = cluster | {"GATE": str(gate)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    job = done.stdout.strip()
    wait_until(lambda: len(list(gate.iterdir())) == 1)
    ask(cluster, "scancel", "--batch", "--signal=TERM", job)
    start_soon(cluster, job)
    (gate / "open").touch()
    wait_until(lambda: (sweep / "comparison.json").exists() and not missing_jobs(read_sweep(sweep)))
    interrupted, undisturbed = (
        sweep / f"tests.networks.gated_contiguous_{repeat}" for repeat in (1, 2)
    )
    assert "resumed from" in (interrupted / "train.log").read_text()
    assert losses(interrupted) == losses(undisturbed)
