"""Imports leave CUDA untouched: forks of a process that has asked for a device cannot use it."""

import subprocess
import sys

import pytest

EVERYTHING = """
import cl_train, cl_train.measure.zoo, cl_train.training.loop
for name in cl_train.__all__:
    getattr(cl_train, name)
"""


@pytest.mark.parametrize(
    ("imports", "is_bad_fork"),
    [
        (EVERYTHING, False),  # the fork server of `zoo`, and notebooks whose launchers fork
        pytest.param("import torch; torch.cuda.is_available()", True, id="planted"),
    ],
)
def test_a_fork_can_use_cuda(imports: str, is_bad_fork: bool) -> None:
    fork = "import os, torch; os.fork() or os._exit(torch.cuda._is_in_bad_fork())"
    program = f"{imports}\n{fork}\nos._exit(os.waitstatus_to_exitcode(os.wait()[1]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == is_bad_fork, done.stderr
