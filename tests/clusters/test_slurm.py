"""The scripts of docs/clusters.md as they stand, on a real Slurm of two virtual nodes.

It has its own configuration, ports and munge, and needs root; skipped where Slurm is missing.
"""

import os
import random
import shutil
import socket
import subprocess
from functools import partial

import pytest

from cl_train.sweeps.launch import missing_jobs
from cl_train.sweeps.plan import read_sweep
from tests.faults import tiny
from tests.faults.forkserver import Forked, train_script
from tests.processes import LIMIT_S, wait_until
from tests.ranks import ENVIRONMENT, ROOT, TINY, losses, run_two_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0
        or not all(map(shutil.which, ("slurmctld", "slurmd", "munged", "mungekey"))),
        reason="needs slurmctld, slurmd, munge and root",
    ),
]
GATED = [*TINY, "model=tests.networks:gated", *["batch_size=16", "epochs=8", "evaluate_every=-1"]]
GATED += ["warmup_steps=1", "checkpoint.every_epochs=0"]
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
    # Below the ports that a program gets that asks for any.
    port, port_1, port_2 = random.SystemRandom().sample(range(10_000, 20_000), 3)
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
        yield environment
    finally:
        ask(environment, "scancel", "--state=RUNNING")
        wait_until(lambda: not ask(environment, "squeue", "-h", "-t", "RUNNING,COMPLETING"))
        for daemon in reversed(running):
            daemon.terminate()
            daemon.wait(LIMIT_S)


@pytest.fixture(scope="module")
def submit(cluster):
    def submit(script, log, *words, **environment):
        command = ["sbatch", "--parsable", f"--output={log}", f"scripts/slurm/{script}.sbatch"]
        run = partial(subprocess.run, capture_output=True, text=True, check=True)
        return run([*command, *words], cwd=ROOT, env=cluster | environment).stdout.strip()

    return submit


@pytest.fixture(scope="module")
def requeued(cluster, submit, image_folder, tmp_path_factory):
    """Folders of a training on both nodes and of a sweep, signalled in step 10, as before the end
    of their time, queued again, and done; and of an undisturbed training.

    `scancel --batch --signal=TERM` signals the script, as `--signal=B:TERM@120` does.
    """
    folder = tmp_path_factory.mktemp("requeued")
    training, sweep, undisturbed = (folder / name for name in ("training", "sweep", "undisturbed"))
    gates = {where: folder / f"gate-{where.name}" for where in (training, sweep)}
    for gate in gates.values():
        gate.mkdir()
    words = [*GATED, f"data.root={image_folder}"]
    of_two = [*words, "global_batch_size=32"]
    gate = str(gates[training])
    jobs = {
        training: submit(
            "several_nodes", folder / "training.log", *of_two, f"hydra.run.dir={training}",
            GATE=gate, PROCESSES="1",
        ),
        sweep: submit(
            "sweep", folder / "sweep.log", str(sweep), *words, "repeats=2",
            "environment='A=1'",  # named again after the requeue
            GATE=str(gates[sweep]),
        ),
    }  # fmt: skip
    for where, job in jobs.items():
        ranks = 2 if where == training else 1
        wait_until(lambda gate=gates[where], ranks=ranks: len(list(gate.iterdir())) == ranks)
        ask(cluster, "scancel", "--batch", "--signal=TERM", job)
    for where, job in jobs.items():
        start_soon(cluster, job)
        (gates[where] / "open").touch()
    # One rank per node: as many threads as there, and so the same sums.
    script = partial(train_script, [*of_two, f"hydra.run.dir={undisturbed}"])
    run_two_ranks(folder, script, GATE=gate, LOCAL_WORLD_SIZE="1")
    wait_until(lambda: tiny.summary(training).get("status") == "completed")
    wait_until(lambda: (sweep / "comparison.json").exists() and not missing_jobs(read_sweep(sweep)))
    return folder


def test_one_node_trains_like_one_process(submit, image_folder, tmp_path):
    words = [*TINY, "epochs=2", "evaluate_every=-1", f"data.root={image_folder}"]
    run, alone = tmp_path / "run", tmp_path / "alone"
    log = tmp_path / "log"
    submit("one_node", log, *words, "batch_size=16", f"hydra.run.dir={run}", PROCESSES="2")
    one = [*words, "batch_size=32", f"hydra.run.dir={alone}"]
    assert Forked(partial(train_script, one), tmp_path / "alone.log").wait() == 0
    wait_until(lambda: tiny.summary(run).get("status") == "completed")
    assert tiny.summary(run)["world_size"] == 2
    assert [step for step, _ in losses(alone)] == [1, 2, 3, 4, 5, 6]
    for found, expected in zip(losses(run), losses(alone), strict=True):
        assert found == pytest.approx(expected, abs=1e-6)
    assert log.read_text().count("Epoch: [0][1/3]") == 1, "rank 0 alone writes to the console"
    assert "ranks: 0 on" not in log.read_text()


def test_a_requeued_training_on_two_nodes_resumes_exactly(requeued):
    log = (requeued / "training.log").read_text()
    assert "resumed from" in log and "ranks: 0 on" in log, "where each rank runs"
    assert tiny.summary(requeued / "training")["world_size"] == 2
    assert losses(requeued / "training") == losses(requeued / "undisturbed")


def test_a_requeued_sweep_continues(requeued):
    """The two repeats are equal runs: the one that was interrupted must match the other."""
    interrupted, undisturbed = (
        requeued / f"sweep/tests.networks.gated_contiguous_{repeat}" for repeat in (1, 2)
    )
    assert "resumed from" in (interrupted / "train.log").read_text()
    assert losses(interrupted) == losses(undisturbed)
