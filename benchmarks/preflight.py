"""python -m benchmarks.preflight cuda|cpu: whether this Python can measure; prints its versions.

Exit codes: 0 it can, 2 packages or the GPU are missing; all of them are named at once.
"""

import importlib
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

_MODULES = {"hydra-core": "hydra", "pillow": "PIL", "pyyaml": "yaml"}  # where the names differ


def problem_of(requirement: str) -> str | None:
    """What is wrong with one line of `dependencies` in pyproject.toml, such as `numpy>=2`."""
    name, _, floor = requirement.partition(",")[0].partition(">=")
    try:
        installed = metadata.version(name)
        importlib.import_module(_MODULES.get(name, name))
    except metadata.PackageNotFoundError:
        return f"{requirement} is not installed"
    except ImportError as error:
        return f"{name} {installed} cannot be imported: {error}"
    numbers, least = ([int(n) for n in re.findall(r"\d+", text)] for text in (installed, floor))
    return None if numbers >= least else f"{name} {installed} is too old: {requirement}"


def main(device: str) -> int:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = project["dependencies"]
    problems = [problem for each in requirements if (problem := problem_of(each))]
    if problems:
        print(f"Python {sys.executable}: {'; '.join(problems)}")
        return 2
    if device == "cuda":
        from cl_train.errors import ConfigError
        from cl_train.system.distributed import choose_device

        try:
            choose_device("cuda")
        except ConfigError as error:
            print(f"{error}; dry_run=true tests the report on the CPU")
            return 2
    names = (re.split(r"[><=]", each)[0] for each in requirements)
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    print(f"Python {sys.version.split()[0]}, {versions}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
