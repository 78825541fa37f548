"""The launcher's environment variables are read, or refused in one line."""

import subprocess
import sys

import pytest

from cl_train.config.schema import ConfigError
from cl_train.system.launcher import Launch, read_launch

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
