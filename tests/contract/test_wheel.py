"""The wheel alone is enough: installed, outside the checkout, with its configuration and data."""

import json
import os
import shutil
import site
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import pytest

from tests.processes import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("cl_train", "conf"):
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source" / name)
    build = "-m pip wheel --quiet --no-deps --no-build-isolation --use-pep517 -w"
    command = [sys.executable, *build.split(), str(folder), str(folder / "source")]
    subprocess.run(command, check=True, timeout=LIMIT_S)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def cl_train(wheel, tmp_path_factory, cache_home):
    """`cl-train` of an environment that holds the wheel and sees the packages it depends on."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
    python = folder / "env/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, str(wheel)], check=True, timeout=LIMIT_S)
    packages = next((folder / "env/lib").glob("python*/site-packages"))
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    (folder / "work").mkdir()

    environment = os.environ | {"XDG_CACHE_HOME": str(cache_home)}
    run = partial(subprocess.run, capture_output=True, text=True, timeout=LIMIT_S)
    run = partial(run, cwd=folder / "work", env=environment)
    return lambda *words: run([folder / "env/bin/cl-train", *words])


@pytest.mark.slow
def test_the_wheel_holds_configuration_types_and_licence(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    data = "conf/config.yaml py.typed data/prepare/synsets.txt training/report.html"
    assert {f"cl_train/{name}" for name in data.split()} <= set(names)
    packed = {name for name in names if name.startswith("cl_train/") and name.endswith(".py")}
    assert packed == {str(path.relative_to(ROOT)) for path in (ROOT / "cl_train").rglob("*.py")}
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_sweep_and_comparison_of_the_wheel(cl_train, tmp_path):
    words = "-m channels_last=true,false experiment=smoke data=synthetic max_steps=3 log_every=1"
    words += f" batch_size=2 parity=false warmup_steps=1 hydra.sweep.dir={tmp_path}/sweep"
    swept = cl_train("train", *words.split())
    assert swept.returncode == 0, swept.stdout + swept.stderr
    compared = cl_train("compare", f"{tmp_path}/sweep", f"out={tmp_path}/report")
    assert compared.returncode == 0, compared.stderr
    assert json.loads((tmp_path / "report/comparison.json").read_text())["pairs"]
