"""Where a process runs: a Python, and variables that are added to its environment."""

import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cl_train.config.schema import HERE
from cl_train.errors import ConfigError

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*")


@dataclass(frozen=True)
class Environment:
    python: str
    variables: Mapping[str, str]

    def is_current(self) -> bool:
        """Whether this process runs in it; a job's PYTHONPATH has the project's folder, too."""
        has_variables = all(v in os.environ.get(name, "") for name, v in self.variables.items())
        return self.python == sys.executable and has_variables


def parse_environment(text: str) -> Environment:
    """Reads `environment=WORD,...`: a Python, variables (`A=1`), both, or `here`. Raises
    ConfigError.
    """
    words = text.split(",")
    variables = dict(word.split("=", 1) for word in words if _VARIABLE.fullmatch(word))
    pythons = [word for word in words if not _VARIABLE.fullmatch(word) and word != HERE]
    python = shutil.which(pythons[0]) if pythons else sys.executable
    if len(pythons) > 1 or python is None or Path(python).is_dir():
        raise ConfigError(
            f"environment={text}: name one Python that can be run "
            "(/opt/venv/bin/python), or variables (OMP_NUM_THREADS=4), or both"
        )
    return Environment(os.path.abspath(python), variables)
