"""The table of torch's operators: eager formats by strides, and planted wrong predictions are
found.
"""

import json
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

from benchmarks.operators_page import shows
from cl_train.commands.audit import main
from cl_train.errors import ConfigError
from cl_train.memory_format.layout import CHANNELS_LAST_BY_DIM
from cl_train.memory_format.operator_probe import image_of, probe_function
from cl_train.memory_format.operators import PROBES, conformance, conformance_program, differs

CPU = torch.device("cpu")


def pixel_major(tensor):
    """Channels innermost: the strides of C, W, H, (D,) N ascend."""
    n, c, *rest = tensor.stride()
    order = [c, *reversed(rest), n]
    return order == sorted(set(order))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_table_agrees_with_direct_strides(dtype):
    rows = {(row["operator"], row["direction"]): row["eager"] for row in conformance(CPU, dtype)}
    assert len({operator for operator, _ in rows}) == len(PROBES) >= 110
    assert sum("Error" in eager for eager in rows.values()) <= 3
    for (operator, direction), eager in rows.items():
        if "Error" in eager or direction == "backward":
            continue
        x = image_of(operator, CPU, dtype)
        output = probe_function(operator, x)(x)
        memory_format = CHANNELS_LAST_BY_DIM.get(output.dim(), torch.contiguous_format)
        if output.dim() == x.dim():
            assert pixel_major(output) == eager.startswith("channels_last"), operator
        backward = rows.get((operator, "backward"))
        assert (backward is not None) == output.requires_grad
        if backward is not None:
            gradients = []
            x.register_hook(gradients.append)
            output.backward(torch.ones_like(output, memory_format=memory_format))
            assert pixel_major(gradients[0]) == backward.startswith("channels_last"), operator


@contextmanager
def planted(operator, wrong, monkeypatch):
    """`operator` has a wrong decomposition."""
    table = {**torch.export.default_decompositions(), operator: wrong}
    with monkeypatch.context() as patch:
        patch.setattr("torch.export.default_decompositions", lambda: table)
        yield


aten = torch.ops.aten
COPIED = "contiguous (512, 64, 8, 1)"
WRONG = {
    "strides": ("F.relu(x)", aten.relu.default, lambda x: x.clamp(min=0).contiguous(), COPIED),
    "values": ("F.silu(x)", aten.silu.default, lambda x: x * x.sigmoid() * 1.01, "values, by"),
    "shape": (
        "torch.full_like(x, 2)",
        aten.full_like.default,
        lambda x, value, **_: x[:, :4].clone(),
        "shape (2, 4, 8, 8)",
    ),
    "error": ("F.gelu(x)", aten.gelu.default, lambda x, **_: x.foo, "AttributeError"),
    "like": (
        "torch.zeros_like(x)",
        aten.zeros_like.default,
        lambda x, **_: x.new_empty(x.shape).fill_(0),
        COPIED,
    ),
    "video": ("F.relu(v)", aten.relu.default, lambda x: x.clamp(min=0).contiguous(), "contig"),
}


@pytest.mark.parametrize("name", WRONG)
def test_planted_differences_are_found_with_what_differs(name, monkeypatch):
    expression, operator, wrong, difference = WRONG[name]
    clean = conformance(CPU, torch.float32, ("fake", "decompose"), [expression])
    assert not any(map(differs, clean))
    with planted(operator, wrong, monkeypatch):
        rows = conformance(CPU, torch.float32, ("fake", "decompose"), [expression])
    assert rows[0]["decompose"].startswith(difference) and rows[0]["fake"] == "same"


def test_a_difference_becomes_a_program_of_torch_alone(tmp_path):
    """Of a bug that torch has had since 2.11: compiled, roll returns contiguous memory."""
    probes = ["F.relu(x)", "torch.as_strided(x.roll(1, 0), (5, 10), (4, 1), 0)"]
    rows = conformance(CPU, torch.float32, ("decompose",), probes)
    assert [differs(row) for row in rows] == [True, True, False, False]
    assert rows[0]["decompose"].startswith("values, by")
    text = conformance_program(rows[0], CPU, torch.float32)
    assert "cl_train" not in text
    path = tmp_path / "bug.py"
    path.write_text(text)
    done = subprocess.run([sys.executable, "-I", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert shows(done.stdout, rows[0], "eager") and shows(done.stdout, rows[0], "decompose")
    assert not shows(done.stdout, rows[0] | {"decompose": "values, by 0.01 of 1.5"}, "decompose")


def test_the_command_counts_differences(tmp_path, capsys):
    words = ["operators=true", "against=fake", "precision=fp32", "select=x.roll*,F.relu(x)"]
    program = tmp_path / "bug.py"
    assert main([*words, "max_differences=1", f"repro={program}"]) == 1
    assert "2 of 4 outputs and gradients differ" in capsys.readouterr().out
    compile(program.read_text(), "bug.py", "exec")
    assert main([*words, "max_differences=2", "json=true"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["differences"] == 2 and report["operators"][0]["operator"] == "x.roll(1, 2)"
    for wrong in ("against=eager", "repro=a.py", "select=no_such"):
        with pytest.raises(ConfigError):
            main(["operators=true", wrong])
    with pytest.raises(ConfigError):
        main(["against=fake"])


def test_an_operator_that_fails_has_a_row_of_its_own_but_is_not_compared(monkeypatch, capsys):
    def failing(*_):
        raise RuntimeError("planted")

    monkeypatch.setattr("torch.nn.functional.elu", failing)
    words = ["operators=true", "precision=fp32", "select=F.elu(x),F.relu(x)"]
    assert main([*words, "against=fake,decompose"]) == 0
    printed = capsys.readouterr().out
    assert "0 of 2 outputs and gradients differ" in printed and "F.elu" not in printed
    assert main(words) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "F." in line]
    assert len(rows) == 3 and "RuntimeError: planted" in rows[0]
