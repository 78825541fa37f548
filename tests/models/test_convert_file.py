"""Saved models of every kind: contiguous on disk, layout recorded, equal values and outputs, or no
file.
"""

import re

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn

from cl_train.commands.convert import main
from cl_train.errors import ConfigError
from cl_train.memory_format.convert import convert
from cl_train.memory_format.layout import (
    classify,
    memory_format_of,
    model_memory_format,
)
from cl_train.models.convert_file import NotConverted, convert_file
from cl_train.models.files import read_weights
from cl_train.models.load import load_model
from cl_train.system import checkpoints
from tests.networks import Fault, small

IMAGES, SMALL = (2, 3, 32, 32), "tests.networks:small"
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch about its own formats


def squeezenet():
    torch.manual_seed(0)
    model = torchvision.models.squeezenet1_1(num_classes=10).eval()
    convert(model, memory_format=torch.channels_last)
    return model


KINDS = {"state dict": "models.pth", "checkpoint": "c.pt", "safetensors": "w.safetensors",
         "TorchScript": "s.pt", "exported program": "e.pt2"}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Each kind of file, made by its own library from a channels_last model."""
    folder, model = tmp_path_factory.mktemp("files"), squeezenet()
    paths = {kind: folder / name for kind, name in KINDS.items()}
    torch.save(model.state_dict(), paths["state dict"])
    facts = {"model": "squeezenet1_1", "memory_format": "channels_last"}
    checkpoints.write(paths["checkpoint"], {"model": model.state_dict(), "facts": facts})
    contiguous = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(contiguous, paths["safetensors"])
    torch.jit.script(model).save(str(paths["TorchScript"]))
    program = torch.export.export(model, (torch.randn(IMAGES),))
    torch.export.save(program, paths["exported program"])
    return paths


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_is_converted_and_equal_in_both_directions(name, files, tmp_path):
    source, target = files[name], tmp_path / files[name].name
    model_name = "squeezenet1_1" if name in ("state dict", "safetensors") else None
    trust = name in ("TorchScript", "exported program")
    if trust:
        with pytest.raises(ConfigError, match="trust=true"):
            convert_file(source, target)
    words = {"input": IMAGES, "trust": trust}
    done, is_proved = convert_file(source, target, model=model_name, **words)
    assert is_proved and done.startswith(name)
    x, model = torch.randn(IMAGES), load_model(target, "squeezenet1_1", trust=trust)[0]
    assert model_memory_format(model) == "channels_last"
    assert torch.allclose(model(x), squeezenet()(x), atol=1e-4)
    weights = read_weights(target, trust=trust)
    assert weights.card.memory_format == "channels_last"
    stored = "channels_last" if trust else "contiguous"
    assert memory_format_of(weights.tensors.values()) == stored
    back, words["channels_last"] = tmp_path / f"back-{target.name}", False
    assert convert_file(target, back, model="squeezenet1_1", **words)[1]
    assert model_memory_format(load_model(back, "squeezenet1_1", trust=trust)[0]) == "contiguous"


@pytest.mark.parametrize(("suffix", "count"), [(".pth", 2), (".safetensors", 3)])
def test_weights_without_a_model_compare_values_only(suffix, count, tmp_path):
    """They stay tied in a file that can hold ties."""
    weight = torch.randn(8, 3, 3, 3).to(memory_format=torch.channels_last)
    weight[0, 0, 0, 0] = torch.nan
    target = tmp_path / f"out{suffix}"
    torch.save({"state_dict": {"a": weight, "b": weight, "head": weight[:2]}}, tmp_path / "in.pth")
    done, is_proved = convert_file(tmp_path / "in.pth", target)
    assert not is_proved and "its outputs are not compared (exit code 1): " in done
    assert "give model=NAME" in done
    tensors = read_weights(target).tensors
    assert memory_format_of(tensors.values()) == "contiguous"
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors.values()}) == count
    torch.testing.assert_close(tensors["head"], weight[:2], rtol=0, atol=0, equal_nan=True)
    with pytest.raises(ConfigError, match="model=NAME"):
        load_model(target)


def test_what_cannot_be_converted_is_refused(tmp_path, files):
    (tmp_path / "text.pth").write_text("hello")
    damaged = bytearray(files["checkpoint"].read_bytes())
    (tmp_path / "cut.pt").write_bytes(damaged[:-1000])
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "flipped.pt").write_bytes(damaged)
    weights, own = files["state dict"], tmp_path / "own.ckpt"
    state = {f"model.{name}": value for name, value in small(3).state_dict().items()}
    torch.save({"state_dict": state | {"loss.weight": torch.ones(3)}}, own)
    cases = [
        *((tmp_path / name, "out.pth", {}, name) for name in ("text.pth", "cut.pt", "flipped.pt")),
        (weights, str(weights), {}, "another name"),
        (own, "out.pth", {"model": SMALL}, r"does not fit the file: .* lacks .* prefix=model\. "),
        (
            weights,
            "out.pth",
            {"model": "squeezenet1_0"},
            r"for features\.0\.weight: .* And \d+ more",
        ),
        (own, "out.pth", {"entry": "state_dic"}, "did you mean state_dict"),
        (own, "out.pth", {"prefix": "neck."}, "prefix=neck"),
        (weights, "out.h5", {}, "suffixes .pth"),
        (weights, "out.onnx", {}, "model=NAME"),
        ("squeezenet1_1", "out.pth", {}, "weights=DEFAULT"),
        (tmp_path, "out.pth", {}, "no checkpoint in it"),
    ]
    for source, target, options, problem in cases:
        with pytest.raises(ConfigError, match=problem):
            convert_file(source, tmp_path / target, **options)
        assert not list(tmp_path.glob("out*"))


@pytest.mark.slow
def test_the_command(files, tmp_path, capsys):
    source, target = str(files["checkpoint"]), tmp_path / "c.pt"
    target.write_bytes(b"precious")
    with pytest.raises(ConfigError, match="overwrite=true"):
        main([source, f"out={target}"])
    assert target.read_bytes() == b"precious"
    assert main([source, f"out={target}", "input=2,3,32,32", "overwrite=true"]) == 0
    assert f"written as channels_last: {target}" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"contiguous model fails on \[1, 3, 8, 8\]"):
        main([source, f"out={tmp_path / 'e.onnx'}", "input=1,3,8,8"])
    assert main([str(files["state dict"]), f"out={tmp_path / 'w.pth'}"]) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"c.pt", "w.pth"}


def after_convolution(change):
    return lambda num_classes: nn.Sequential(
        nn.Conv2d(3, num_classes, 3), Fault(lambda _, x, number: change(x))
    )


layout_dependent = after_convolution(lambda x: x * (1.5 if classify(x) == "channels_last" else 1.0))
viewing = after_convolution(lambda x: x.view(x.shape[0], -1))


def bias_before_head(num_classes):
    """The last bias is not the classifier's."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes, False)
    )


OWN = [  # a function of this module
    ("bias_before_head", {}, ""),
    ("viewing", {}, r"not converted: .*\.reshape"),
    ("layout_dependent", {}, r"not converted: .* differ by 5.0e-01"),
]


@pytest.mark.parametrize(("made", "options", "problem"), OWN)
def test_what_is_not_proved_is_said(made, options, problem, tmp_path):
    torch.save(globals()[made](5).state_dict(), tmp_path / "in.pt")
    words = {"model": f"{__name__}:{made}", "input": (2, 3, 8, 8), **options}
    target = tmp_path / "out.pt"
    try:
        done, is_proved = convert_file(tmp_path / "in.pt", target, **words)
    except NotConverted as error:
        done, is_proved = f"not converted: {error}", False
    assert is_proved == (not problem) and re.search(problem, done), done
    assert target.exists() == (not problem.startswith("not converted"))
