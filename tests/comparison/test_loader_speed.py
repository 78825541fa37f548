"""The loader's benchmark: its table, its JSON, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cl_train.comparison.loader_speed import benchmark, table
from cl_train.config.benchmarks import LoaderBenchmarkSettings
from cl_train.config.schema import ConfigError
from tests.data.image_folders import write_folder

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "loader_benchmark.py"


def test_rows_ratios_and_the_cores_that_a_rate_needs(tmp_path):
    root = write_folder(tmp_path, train=40, val=2)
    settings = LoaderBenchmarkSettings(
        root=str(root), image_size=32, batch_size=8, images=32, rounds=2, workers=[1], others=False, device="cpu"
    )
    result = benchmark(settings)
    names = [row["pipeline"] for row in result["rows"]]
    assert names[0].startswith("decode only") and "cl_train" in names
    assert all(row["images_per_s"] > 0 and row["cpu_ms_per_image"] >= 0 for row in result["rows"])
    assert all(row["ratio_to_reference"] is None for row in result["rows"]), "no reference was asked for"
    assert result["cores_needed"] == -(-5400 // int(result["images_per_s_per_core"]))
    assert json.loads(json.dumps(result)) == result
    assert f"need {result['cores_needed']} cores" in table(result)


@pytest.mark.slow
def test_the_script_ends_with_json_and_compares_with_the_reference(tmp_path):
    root = write_folder(tmp_path, train=40, val=2)
    words = [f"data.root={root}", "data.image_size=32", "batch_size=8", "images=16", "rounds=1", "data.workers=1"]
    done = subprocess.run(
        [sys.executable, SCRIPT, *words, "json=true", "device=cpu"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    reference = [row for row in result["rows"] if row["pipeline"] == "torchvision reference"]
    assert len(reference) == 1 and reference[0]["ratio_to_reference"] == 1.0


def test_wrong_settings_are_refused(tmp_path):
    done = subprocess.run([sys.executable, SCRIPT, "data.worker=2"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "did you mean data.workers?" in done.stderr
    with pytest.raises(ConfigError, match="does not exist"):
        benchmark(LoaderBenchmarkSettings(root=str(tmp_path / "nowhere")))
