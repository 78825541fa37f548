"""Start train.py, or a module of the tests, in several processes under torchrun, or in one; or fork
ranks.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.faults.forkserver import Forked, Function
from tests.processes import LIMIT_S

ROOT = Path(__file__).resolve().parents[1]
_SMALL = "data=folder data.image_size=32 data.workers=0 device=cpu precision=fp32 log_every=1"
TINY = [*_SMALL.split(), "model=tests.networks:without_batchnorm", "optim.lr=0.4", "log_to=[]"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def launch(processes: int, *program: str) -> subprocess.CompletedProcess[str]:
    """Run `train.py key=value ...` or `-m tests.module ...` to its end; its output as text."""
    torchrun = f"-m torch.distributed.run --standalone --nproc-per-node={processes}"
    command = [sys.executable, *(torchrun.split() if processes > 1 else ()), *program]
    run = partial(subprocess.run, capture_output=True, text=True, timeout=LIMIT_S)
    return run(command, cwd=ROOT, env=ENVIRONMENT)


@contextmanager
def group_of_one(folder: Path) -> Iterator[None]:
    """This process as the only rank."""
    from torch import distributed

    store = distributed.FileStore(str(folder / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def losses(run: Path) -> list[tuple[int, float]]:
    """Of the windows of a run that may still write, by step."""
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(record["step"], record["loss"]) for record in records if record["kind"] == "train"]


def fork_ranks(
    functions: Sequence[Function], folder: Path, environment: Mapping[str, str] = {}
) -> list[Forked]:
    """A function in each of several processes as torchrun starts them, without imports of torch;
    their output is in `folder`.
    """
    from torch.distributed import TCPStore

    # As that of torchrun's agent it outlives a run: rank 1 may begin the next one before rank 0 has
    # ended the first.
    store, world = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), len(functions)
    shared = {"WORLD_SIZE": f"{world}", "LOCAL_WORLD_SIZE": f"{world}", "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"GLOO_SOCKET_IFNAME": "lo", **environment}
    ranks = []
    for rank, function in enumerate(functions):
        own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(Forked(function, folder / f"rank-{rank}.log", own))
        ranks[-1].store = store
    return ranks


def run_two_ranks(folder: Path, function: Function, **environment: str) -> list[Forked]:
    """They have ended well."""
    ranks = fork_ranks([function, function], folder, environment)
    codes = [rank.wait(3 * LIMIT_S) for rank in ranks]
    assert codes == [0, 0], "".join(rank.output() for rank in ranks)
    return ranks
