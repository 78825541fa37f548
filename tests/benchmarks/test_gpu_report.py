"""The GPU report: its order and its stops with a Python that only notes what it is called with, its
commands in this process on a CPU with tiny settings, and what it says of missing packages.
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import preflight
from cl_train.cli import main
from cl_train.config.arguments import settings_from_arguments
from cl_train.config.command_line import check_command_line

ROOT = Path(__file__).resolve().parents[2]
DECISIVE = ["channels_last", "contiguous", "eager"]


def report(*words, **environment):
    variables = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""} | environment
    command = ["bash", str(ROOT / "benchmarks/gpu_report.sh"), *words]
    return subprocess.run(command, capture_output=True, text=True, env=variables)


def outcomes(done):
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    return dict(line.partition("] ")[2].split(": ", 1) for line in lines)


def python(path, script):
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def noted(tmp_path_factory):
    """The report's folder, and the arguments of Python for each of its parts."""
    folder = tmp_path_factory.mktemp("gpu")
    note = python(folder / "python", f"""printf '%s\\0' "$@" end >>{folder}/calls""")
    out = folder / "report"
    done = report("dry_run=true", "time_limit_s=100000", f"out={out}", PYTHON=note)
    assert done.returncode == 0, done.stderr
    _, *calls = (folder / "calls").read_text().removesuffix("\0end\0").split("\0end\0")
    return out, dict(zip(outcomes(done), (call.split("\0") for call in calls), strict=True))


def test_every_command_is_noted_and_has_settings_that_exist(noted):
    out, calls = noted
    text = (out / "report.md").read_text()
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == list(calls)
    assert list(calls)[:3] == DECISIVE and len(calls) >= 15
    assert text.count("\ndone in") == len(calls)
    for call in calls.values():
        match call:
            case ["train.py", *words]:
                assert check_command_line(words)
            case ["-m", "cl_train", command, *words] | ["-c", _, command, *words]:
                [schema] = importlib.import_module(f"cl_train.commands.{command}").SETTINGS.values()
                assert settings_from_arguments(schema, words)
            case ["-m", "pytest", *words]:
                path, _, test = next(word for word in words if "test_gpu" in word).partition("::")
                assert f"def {test}" in (ROOT / path).read_text()
            case _:
                assert call == calls["images"]


@pytest.mark.slow
def test_the_commands_of_a_dry_run_complete(noted, monkeypatch):
    """One of each kind; the others differ in settings that the commands' own tests have."""
    out, calls = noted
    monkeypatch.chdir(ROOT)
    exec(calls["images"][1])
    for name in ("jpegs", "b32", "operators", "loader"):
        call = calls[name]
        assert main(call[2:] if call[0] == "-m" else ["train", *call[1:]]) == 0, name
    assert "convolution" in (out / "jpegs/operators.txt").read_text()
    summary = json.loads((out / "jpegs/summary.json").read_text())
    assert (summary["status"], summary["memory_format"]) == ("completed", "channels_last")
    assert len(json.loads((out / "b32.json").read_text())["results"]) == 2


@pytest.fixture
def idle(tmp_path):
    """A Python that does nothing, but for `eager`, which fails."""
    return python(tmp_path / "python", 'case "$*" in *eager.json*) exit 3 ;; esac')


def test_it_ends_in_time_and_goes_on_where_it_stopped(tmp_path, idle):
    out = f"out={tmp_path / 'report'}"
    first = report("dry_run=true", "time_limit_s=75", out, PYTHON=idle)
    assert first.returncode == 1
    told = outcomes(first)
    assert list(told)[:4] == [*DECISIVE, "tests"]
    assert told["channels_last"].startswith("done in")
    assert told["eager"] == "failed with exit code 3"
    assert told["best"].startswith("left out"), "it may take 200 s, a third of which is not left"
    second = report("dry_run=true", "time_limit_s=100000", out, PYTHON=idle)
    again = outcomes(second)
    assert again["best"].startswith("done in") and again["eager"].startswith("failed with")
    assert "channels_last" not in again and second.returncode == 1
    (tmp_path / "report/eager.failed").unlink()
    text = (tmp_path / "report/report.md").read_text()
    assert text.count("## channels_last\n") == text.count("## best\n") == 1
    third = outcomes(report("dry_run=true", out, PYTHON=idle))
    assert list(third) == ["eager"]


def test_a_missing_package_is_named(monkeypatch):
    assert preflight.problem_of("numpy>=2") is None
    assert preflight.problem_of("simplejpg>=1") == "simplejpg>=1 is not installed"
    monkeypatch.setitem(sys.modules, "hydra", None)
    assert "cannot be imported" in str(preflight.problem_of("hydra-core>=1.3"))


@pytest.mark.slow  # the last one imports torch
@pytest.mark.parametrize("words", [["speed=1"], ["out=EXISTS", "dry_run=true"], []])
def test_wrong_usage_is_refused_before_anything_runs(words, tmp_path):
    done = report(*(word.replace("EXISTS", str(tmp_path)) for word in words))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and list(tmp_path.iterdir()) == []
