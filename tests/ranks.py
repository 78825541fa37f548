"""Start train.py, or a module of the tests, in several processes under torchrun, or in one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.processes import LIMIT_S

ROOT = Path(__file__).resolve().parents[1]
TINY = (
    *("data=folder", "data.image_size=32", "data.workers=0", "device=cpu", "precision=fp32", "log_every=1"),
    *("model=tests.networks:without_batchnorm", "optim.lr=0.4", "tensorboard=false"),
)
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def launch(processes: int, *program: str) -> subprocess.CompletedProcess[str]:
    """Run `train.py key=value ...` or `-m tests.module ...` to its end; its output as text."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    return subprocess.run(
        [sys.executable, *launcher, *program],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
