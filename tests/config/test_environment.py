"""The Python and the variables of a job's process."""

import sys
from pathlib import Path

import pytest

from cl_train.config.environment import parse_environment
from cl_train.errors import ConfigError


def test_a_python_or_variables():
    both = parse_environment(f"{sys.executable},OMP_NUM_THREADS=4,A=")
    assert (both.python, both.variables) == (sys.executable, {"OMP_NUM_THREADS": "4", "A": ""})
    assert parse_environment("A=1").python == sys.executable
    for text in ("/no/such/python", str(Path.cwd()), f"{sys.executable},{sys.executable}"):
        with pytest.raises(ConfigError, match="name one Python"):
            parse_environment(text)
