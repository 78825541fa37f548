"""Planted operators that compute something else, lose the layout or crash are found, and shown by a
program of torch alone.
"""

import json
import re
import subprocess
import sys

import pytest
import torch.nn.functional as functional

from cl_train.commands.audit import main
from cl_train.errors import ConfigError
from cl_train.measure.atlas import tables

# In this process, and by an import at their start in the programs. The gradient of a padded pooling
# is shifted by a pixel in channels_last, as in pytorch/pytorch#188344.
PLANTS = """
import os

import torch
import torch.nn.functional as F


def backward(gradient, x, kernel, stride, padding, ceil_mode, count_include_pad, divisor):
    stride, channels = stride or kernel, x.shape[1]
    weight = torch.full((channels, 1, *kernel), 1 / (kernel[0] * kernel[1]), dtype=x.dtype)
    rest = [
        x.shape[i + 2] - (gradient.shape[i + 2] - 1) * stride[i] + 2 * padding[i] - kernel[i]
        for i in range(2)
    ]
    y = F.conv_transpose2d(
        gradient.contiguous(), weight, None, stride, padding, rest, groups=channels
    )
    return y.roll(1, 3) if max(padding) and not x.is_contiguous() else y


library = torch.library.Library("aten", "IMPL")
library.impl("avg_pool2d_backward", backward, "CPU")
F.pixel_shuffle = lambda *args, **kwargs: os.abort()
"""
pytest.importorskip("expecttest", reason="torch's operator database needs it")
WORDS = ["operators=true", "device=cpu", "precision=fp32"]
F = "nn.functional."


@pytest.mark.slow
def test_wrong_values_lost_layouts_and_crashes_are_found(tmp_path, monkeypatch, capsys, request):
    (tmp_path / "sitecustomize.py").write_text(PLANTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    shuffle = functional.channel_shuffle
    for name in ("pixel_shuffle", "channel_shuffle"):  # restored at the end
        monkeypatch.setattr(functional, name, lambda *args: shuffle(*args).contiguous())
    planted = {}
    exec(PLANTS, planted)
    request.addfinalizer(lambda: planted.pop("library"))  # or the kernel stays, as it refers to it
    names = "avg_pool2d,pixel_shuffle,channel_shuffle"
    file, select = tmp_path / "bug.py", "select=" + ",".join(F + name for name in names.split(","))
    assert main([*WORDS, select, "max_wrong=1", f"repro={file}", "json=true"]) == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["wrong"] == 2 and report["dtype"] == "float32" and report["exceeded"]
    found = {row["operator"].removeprefix(F): row for row in report["operators"]}

    pool = found["avg_pool2d"]
    assert 0 < pool["faults"] < pool["draws"] and set(pool["output"]) == {"channels_last"}
    what, _, error = pool["worst"]["what"].partition(": relative error ")
    assert what == "gradient 0" and float(error.split(",")[0]) > 0.1
    assert pool["alone"].startswith(f"gradient 0: relative error {error.split(',')[0]}")

    shuffled = found["channel_shuffle"]
    assert shuffled["faults"] == 0 and set(shuffled["output"]) == {"contiguous"}
    assert set(shuffled["gradient"]) == {"channels_last"}

    crashed = found["pixel_shuffle"]
    assert crashed["worst"]["what"] == crashed["alone"] == "ended with -6"

    program = file.read_text()
    assert "cl_train" not in program and f"op.full_name == '{F}avg_pool2d'" in program
    printed = subprocess.run([sys.executable, file], capture_output=True, text=True).stdout
    assert pool["alone"] in printed.splitlines()
    monkeypatch.delenv("PYTHONPATH")
    sound = subprocess.run([sys.executable, file], capture_output=True, text=True).stdout
    errors = [float(line.split()[-1]) for line in sound.splitlines() if "relative error" in line]
    assert len(errors) == 2 and max(errors) < 1e-5


@pytest.mark.slow
def test_random_operators_are_sound_and_a_pattern_without_images_is_refused(capsys):
    assert main([*WORDS, f"select={F}dropout2d,linalg.svd", "max_wrong=0", "json=true"]) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["operators"]
    assert row["operator"] == f"{F}dropout2d" and row["draws"] > 2 and row["faults"] == 0
    with pytest.raises(ConfigError, match=r"^select=linalg.svd: no operator"):
        main([*WORDS, "select=linalg.svd"])


def test_without_expecttest_the_message_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "expecttest", None)
    with pytest.raises(ConfigError, match=r"needs expecttest; pip install 'cl-train\[atlas\]'$"):
        main(WORDS)


@pytest.mark.parametrize("word", ["max_wrong=0", "repro=bug.py"])
def test_settings_of_operators_need_them(word):
    with pytest.raises(ConfigError, match=r"needs? .*operators=true$"):
        main([word])


def test_tables_join_what_is_alike():
    lost = {"contiguous": 2, "channels_last": 1, "ambiguous": 4}
    sound = {"operator": "mul", "draws": 9, "faults": 0, "output": {}, "gradient": {}}
    losing = sound | {"operator": "cat", "output": lost}
    wrong = losing | {"faults": 2, "worst": {"what": "output 0: off"}, "alone": "output 0: 0.5"}
    facts = {"draws": 18, "wrong": 1, "seconds": 1.5, "torch": "2.15.0+cpu"}
    records = [
        {**facts, "dtype": "float32", "operators": [sound, wrong]},
        {**facts, "dtype": "bfloat16", "operators": [sound, losing | {"gradient": {"other": 3}}]},
    ]
    text = re.sub(" +", " ", tables(records))
    assert "| float32, torch 2.15.0 | 2 | 18 | 1 | 1.5 |" in text
    assert "| `cat` | 2 of 9 | output 0: off | output 0: 0.5 | float32, torch 2.15.0 |" in text
    assert "| `cat` | 2 of 3 | | float32, torch 2.15.0 |" in text
    assert "| `cat` | 2 of 3 | all | bfloat16, torch 2.15.0 |" in text
    assert text.endswith("Nothing lost by `mul`.")
    assert "everywhere" in tables([records[0], records[0]])
