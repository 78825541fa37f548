"""A Slurm of two virtual nodes on this machine, with its own configuration, ports and munge; it needs root."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.processes import LIMIT_S, free_ports, wait_until

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/%n.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
MinJobAge=600
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={port_1} CPUs=2 RealMemory=4000
NodeName={host}-2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port_2} CPUs=2 RealMemory=4000
PartitionName=main Nodes=ALL Default=YES State=UP
"""


def is_installed() -> bool:
    return os.geteuid() == 0 and all(shutil.which(name) for name in ("slurmctld", "slurmd", "munged", "mungekey"))


@contextmanager
def two_nodes(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which `sbatch` and `srun` use this Slurm. The first node has this machine's host name."""
    port, port_1, port_2 = free_ports(3)
    host = socket.gethostname()
    for name in ("state", f"spool.{host}", f"spool.{host}-2"):
        (folder / name).mkdir(parents=True)
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(folder=folder, host=host, port=port, port_1=port_1, port_2=port_2)
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    environment["SLURM_CONF"] = str(folder / "slurm.conf")
    subprocess.run(["mungekey", "-k", folder / "munge.key"], check=True)
    munge_files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    daemons = [
        ["munged", "-F", "--force", f"--socket={folder}/munge.socket", *munge_files],
        ["slurmctld", "-D", "-c"],
        ["slurmd", "-D", "-N", host],
        ["slurmd", "-D", "-N", f"{host}-2"],
    ]
    running = []

    def answer(*command: str) -> str:
        return subprocess.run(command, env=environment, capture_output=True, text=True).stdout

    try:
        for command in daemons:
            with (folder / "daemons.log").open("ab") as log:
                running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            if command[0] == "munged":
                wait_until((folder / "munge.socket").exists)
            elif command[0] == "slurmctld":
                wait_until(lambda: "is UP" in answer("scontrol", "ping"))
        wait_until(lambda: answer("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "2")
        yield environment
    finally:
        answer("scancel", "--state=RUNNING")
        wait_until(lambda: not answer("squeue", "-h", "-t", "RUNNING,COMPLETING"))
        for daemon in reversed(running):
            daemon.terminate()
            daemon.wait(LIMIT_S)
