"""The GPU report's whole course on a CPU with tiny settings."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/gpu_report.sh"


def report(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""} | environment
    return subprocess.run(["bash", str(SCRIPT), *words], capture_output=True, text=True, env=variables)


@pytest.mark.slow
def test_a_dry_run_completes_every_command(tmp_path: Path) -> None:
    out = tmp_path / "report"
    done = report("dry_run=true", f"out={out}", PATH=os.environ["PATH"])
    text = (out / "report.md").read_text()
    assert done.returncode == 0, text
    assert done.stdout.count("done in") == text.count("\ndone in") == text.count("## ") >= 8
    assert len(json.loads((out / "resnet50.json").read_text())["results"]) == 1
    for run in ("fixed_batch", "jpegs"):
        assert json.loads((out / run / "summary.json").read_text())["status"] == "completed"
        assert "convolution" in (out / run / "operators.txt").read_text()


@pytest.mark.slow
def test_commands_without_time_are_left_out_and_named(tmp_path: Path) -> None:
    done = report("dry_run=true", "time_limit_s=1", f"out={tmp_path / 'report'}")
    assert done.returncode == 1
    assert "resnet50: left out" in done.stdout and "done" not in done.stdout


NO_GPU = pytest.param([], marks=pytest.mark.slow)  # imports torch


@pytest.mark.parametrize(
    "words", [["out="], ["speed=1"], ["time_limit_s=soon"], ["out=EXISTS", "dry_run=true"], NO_GPU]
)
def test_wrong_usage_is_refused_before_anything_runs(words: list[str], tmp_path: Path) -> None:
    done = report(*(word.replace("EXISTS", str(tmp_path)) for word in words))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and list(tmp_path.iterdir()) == []
