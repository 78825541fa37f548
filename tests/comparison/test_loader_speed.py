"""The benchmark of the loader: its table, its JSON, and the settings that it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cl_train.comparison.loader_speed import benchmark
from cl_train.config.schema import ConfigError, LoaderBenchmarkSettings
from tests.data.image_folders import write_folder
from tests.processes import LIMIT_S

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "loader_benchmark.py"


def test_rates_ratios_and_the_cores_that_a_rate_needs(tmp_path):
    root = write_folder(tmp_path, train=40, val=2)
    settings = LoaderBenchmarkSettings(
        root=str(root), image_size=32, batch_size=8, images=32, rounds=2, workers=[1], gpu_images_per_s=1e9
    )
    result, text = benchmark(settings)
    reference, row = result["rows"]
    assert (reference["pipeline"], reference["ratio"]) == ("torchvision reference", 1.0)
    assert (row["pipeline"], row["workers"]) == ("cl_train", 1) and row["images_per_s"] > 0 and row["ratio"] > 0
    assert result["cores_needed"] == -(-(10**9) // int(row["images_per_s"]))
    assert json.loads(json.dumps(result)) == result
    assert f"need {result['cores_needed']} cores" in text and "too few" in text


@pytest.mark.slow
@pytest.mark.parametrize("program", [[str(SCRIPT), "json=true"], ["-m", "benchmarks.peers", "loader", "json=true"]])
def test_the_programs_end_with_json(tmp_path, program):
    root = write_folder(tmp_path, train=40, val=2)
    words = [f"data.root={root}", "data.image_size=32", "batch_size=8", "images=16", "rounds=1", "data.workers=1"]
    done = subprocess.run(
        [sys.executable, *program, *words], capture_output=True, text=True, timeout=LIMIT_S, cwd=SCRIPT.parents[1]
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    names = {row["pipeline"] for row in result["rows"]}
    assert {"torchvision reference", "cl_train"} <= names
    assert "missing" not in result or {"timm"} <= names | set(result["missing"])


def test_wrong_settings_are_refused(tmp_path):
    done = subprocess.run([sys.executable, SCRIPT, "data.worker=2"], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2 and "did you mean data.workers" in done.stderr
    with pytest.raises(ConfigError, match="does not exist"):
        benchmark(LoaderBenchmarkSettings(root=str(tmp_path / "nowhere")))
