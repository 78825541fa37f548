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
    name = name_of(requirement)
    try:
        metadata.version(name)
        importlib.import_module(_MODULES.get(name, name))
    except metadata.PackageNotFoundError:
        return f"{requirement} is not installed"
    except ImportError as error:
        return f"{name} cannot be imported: {error}"
    return None


def name_of(requirement: str) -> str:
    return re.split(r"[><=]", requirement)[0]


def main(device: str) -> int:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = project["dependencies"]
    if problems := list(filter(None, map(problem_of, requirements))):
        print(f"Python {sys.executable}: {'; '.join(problems)}")
        return 2
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print("torch sees no GPU; dry_run=true tests the report on the CPU")
            return 2
    names = map(name_of, requirements)
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    print(f"Python {sys.version.split()[0]}, {versions}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
