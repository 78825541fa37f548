"""The operator table: outcomes of operators whose behaviour is certain, its files, and the committed table."""

import json
from pathlib import Path

import pytest
import torch

from cl_train.memory_format import operator_table

CPU = torch.device("cpu")
NAMES = ("conv2d 3x3", "relu", "batch_norm training", "reshape there and back", "conv2d 1x1", "flatten", "add",
         "adaptive_avg_pool2d to 1x1", "sum over channels, keepdim", "conv3d 3x3x3", "local_response_norm")  # fmt: skip


@pytest.fixture(scope="module")
def table() -> dict:
    return operator_table.measure(CPU, NAMES)


def outcome(table: dict, name: str, direction: str, dtype: str = "float32") -> str:
    (row,) = [row for row in table["operators"] if row["operator"] == name]
    return row[f"{dtype} {direction}"]


def test_outcomes(table: dict) -> None:
    for name in ("conv2d 3x3", "conv2d 1x1", "relu", "batch_norm training", "add", "conv3d 3x3x3"):
        assert [outcome(table, name, way) for way in ("forward", "backward")] == ["kept", "kept"], name
    assert outcome(table, "reshape there and back", "forward") == "lost"
    assert outcome(table, "flatten", "forward") == "no image"
    assert outcome(table, "adaptive_avg_pool2d to 1x1", "forward") == "ambiguous"
    assert outcome(table, "sum over channels, keepdim", "backward") == "expanded"
    assert outcome(table, "local_response_norm", "forward", "float16") == "unsupported"


def test_measuring_leaves_random_state_alone() -> None:
    before = torch.get_rng_state()
    operator_table.measure(CPU, ("relu",))
    assert torch.equal(torch.get_rng_state(), before)


def test_files(table: dict, tmp_path: Path) -> None:
    path = operator_table.write(table, tmp_path)
    version = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    assert path.name == f"operators-cpu-torch{version}.json"
    assert json.loads(path.read_text()) == table
    text = path.with_suffix(".md").read_text()
    assert "| reshape there and back | lost | lost |" in text and torch.__version__ in text


def test_the_whole_table_matches_the_committed_one() -> None:
    results = Path(__file__).resolve().parents[2] / "results"
    version = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    committed = results / f"operators-cpu-torch{version}.json"
    if not committed.exists():
        pytest.skip(f"no committed table for torch {version}")
    table, threads = json.loads(committed.read_text()), torch.get_num_threads()
    try:
        torch.set_num_threads(table["threads"])
        measured = operator_table.measure(CPU)
    finally:
        torch.set_num_threads(threads)
    # bf16 and fp16 kernels of a CPU depend on its instruction set; fp32 kernels depend only on the version of torch
    columns = ("operator", "float32 forward", "float32 backward")
    one, other = ([[row[column] for column in columns] for row in t["operators"]] for t in (table, measured))
    assert one == other
