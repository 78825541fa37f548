"""The GPU report: its order and its stops with a Python that does nothing, its whole course on a
CPU with tiny settings, and what it says of missing packages.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import preflight

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/gpu_report.sh"
DECISIVE = ["channels_last", "contiguous", "eager"]


def report(*words, **environment):
    variables = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""} | environment
    command = ["bash", str(SCRIPT), *words]
    return subprocess.run(command, capture_output=True, text=True, env=variables)


def outcomes(done):
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    return dict(line.partition("] ")[2].split(": ", 1) for line in lines)


@pytest.mark.slow
def test_a_dry_run_completes_every_command(tmp_path):
    """Without the limits of the single commands, which a busy machine may exceed."""
    out, timeout = tmp_path / "report", tmp_path / "bin/timeout"
    timeout.parent.mkdir()
    timeout.write_text('#!/bin/sh\nshift 2\nexec "$@"\n')
    timeout.chmod(0o755)
    path = f"{timeout.parent}:{os.environ['PATH']}"
    done = report("dry_run=true", "time_limit_s=100000", f"out={out}", PATH=path)
    text = (out / "report.md").read_text()
    assert done.returncode == 0, text
    assert done.stdout.count("done in") == text.count("\ndone in") == text.count("## ") >= 15
    assert [line.split()[1] for line in text.splitlines() if line.startswith("## ")][:3] == DECISIVE
    for name in ("eager", "graph", "compiled", "bf16", "all_algorithms"):
        assert len(json.loads((out / f"{name}.json").read_text())["results"]) == 1, name
    for run, layout in (("channels_last", "channels_last"), ("contiguous", "contiguous")):
        summary = json.loads((out / run / "summary.json").read_text())
        assert (summary["status"], summary["memory_format"]) == ("completed", layout)
    assert "convolution" in (out / "jpegs" / "operators.txt").read_text()


@pytest.fixture
def idle(tmp_path):
    """A Python that does nothing, but for `eager`, which fails."""
    path = tmp_path / "python"
    path.write_text('#!/bin/sh\ncase "$*" in *eager.json*) exit 3 ;; esac\n')
    path.chmod(0o755)
    return str(path)


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


def test_a_missing_package_is_named(monkeypatch, capsys):
    assert preflight.problem_of("numpy>=2") is None
    assert preflight.problem_of("simplejpg>=1") == "simplejpg>=1 is not installed"
    assert "is too old: numpy>=999" in str(preflight.problem_of("numpy>=999,<1000"))
    monkeypatch.setitem(sys.modules, "hydra", None)
    assert "cannot be imported" in str(preflight.problem_of("hydra-core>=1.3"))


NO_GPU = pytest.param([], marks=pytest.mark.slow)  # imports torch


@pytest.mark.parametrize(
    "words", [["out="], ["speed=1"], ["time_limit_s=soon"], ["out=EXISTS", "dry_run=true"], NO_GPU]
)
def test_wrong_usage_is_refused_before_anything_runs(words, tmp_path):
    done = report(*(word.replace("EXISTS", str(tmp_path)) for word in words))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and list(tmp_path.iterdir()) == []
