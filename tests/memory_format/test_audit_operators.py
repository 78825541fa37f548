"""The operator table: its outcomes for operators whose behaviour is certain, its files, and the diff of two tables."""

import copy
from pathlib import Path

import pytest
import torch

from cl_train.config.schema import ConfigError
from cl_train.memory_format import operators as operator_table

CPU = torch.device("cpu")
NAMES = ("conv2d 3x3", "relu", "batch_norm training", "reshape there and back", "conv2d 1x1", "flatten", "add",
         "adaptive_avg_pool2d to 1x1", "sum over channels, keepdim", "conv3d 3x3x3", "local_response_norm")  # fmt: skip


@pytest.fixture(scope="module")
def table() -> dict:
    return operator_table.measure(CPU, tuple(case for case in operator_table.CASES if case.name in NAMES))


def outcome(table: dict, name: str, direction: str, dtype: str = "float32") -> str:
    (row,) = [row for row in table["operators"] if row["operator"] == name]
    return row["outcomes"][dtype][direction]


def test_outcomes(table: dict) -> None:
    for name in ("conv2d 3x3", "conv2d 1x1", "relu", "batch_norm training", "add", "conv3d 3x3x3"):
        assert [outcome(table, name, way) for way in ("forward", "backward")] == ["kept", "kept"], name
    assert outcome(table, "reshape there and back", "forward") == "lost"
    assert outcome(table, "flatten", "forward") == "no image"
    assert outcome(table, "adaptive_avg_pool2d to 1x1", "forward") == "ambiguous"
    assert outcome(table, "sum over channels, keepdim", "backward") == "broadcast"
    assert outcome(table, "local_response_norm", "forward", "float16") == "unsupported"


def test_case_names_are_unique() -> None:
    names = [case.name for case in operator_table.CASES]
    assert len(names) == len(set(names)) and set(NAMES) <= set(names)


def test_measuring_leaves_random_state_alone() -> None:
    before = torch.get_rng_state()
    operator_table.measure(CPU, operator_table.CASES[:1])
    assert torch.equal(torch.get_rng_state(), before)


def test_files_and_diff(table: dict, tmp_path: Path) -> None:
    path = operator_table.write(table, tmp_path)
    version = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    assert path.name == f"operators-cpu-torch{version}.json"
    assert operator_table.read(path) == table
    text = path.with_suffix(".md").read_text()
    assert "| reshape there and back | lost | lost |" in text and torch.__version__ in text
    assert operator_table.diff(table, table) == []
    old = copy.deepcopy(table)
    old["torch"] = "2.0.0"
    relu = next(row for row in old["operators"] if row["operator"] == "relu")
    relu["outcomes"]["float32"]["backward"] = "lost"
    old["operators"] = [row for row in old["operators"] if row["operator"] != "flatten"]
    changes = operator_table.diff(old, table)
    assert {"operator": "relu", "dtype": "float32", "direction": "backward", "torch 2.0.0 cpu": "lost",
            f"now: torch {torch.__version__} cpu": "kept"} in changes  # fmt: skip
    assert [row["operator"] for row in changes if row["torch 2.0.0 cpu"] == "-"] == ["flatten"] * 6


def test_files_that_are_no_tables_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ConfigError, match="not an operator table"):
        operator_table.read(tmp_path / "a.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        operator_table.read(tmp_path / "b.json")


def test_the_whole_table_matches_the_committed_one() -> None:
    results = Path(__file__).resolve().parents[2] / "results"
    version = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    committed = results / f"operators-cpu-torch{version}.json"
    if not committed.exists():
        pytest.skip(f"no committed table for torch {version}")
    table, threads = operator_table.read(committed), torch.get_num_threads()
    try:
        torch.set_num_threads(table["threads"])
        changes = operator_table.diff(table, operator_table.measure(CPU))
    finally:
        torch.set_num_threads(threads)
    # What a CPU does in bf16 and fp16 depends on its instructions; in fp32 only on the version of torch.
    assert [change for change in changes if change["dtype"] == "float32"] == []
