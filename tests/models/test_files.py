"""Files of models: the card, versions of modules, and the usual wrappings of weights."""

import argparse
import importlib
import json
from collections import OrderedDict

import pytest
import torch
import torchvision
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from cl_train.errors import ConfigError
from cl_train.memory_format.layout import model_memory_format
from cl_train.models.card import ModelCard, Preprocessing
from cl_train.models.convert_file import PROGRAMS, convert_file
from cl_train.models.files import read_weights
from cl_train.models.load import load_model
from cl_train.models.sources import build_model
from cl_train.system import checkpoints
from tests import networks
from tests.networks import small

IMAGES, SMALL = (2, 3, 32, 32), "tests.networks:small"
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch about its own formats


PREPROCESSING = Preprocessing(40, 32, "bicubic", (0.5, 0.25, 0.125), (0.5, 0.25, 0.125))
CARD = ModelCard("channels_last", SMALL, "fp32", ("cat", "dog", "emu"), PREPROCESSING)


@pytest.mark.parametrize(
    "suffix",
    [*(".pth", ".safetensors"), *(pytest.param(n, marks=pytest.mark.slow) for n in PROGRAMS)],
)
def test_each_kind_runs_without_this_package_and_carries_the_card(suffix, tmp_path):
    torch.manual_seed(0)
    model, x, target = small(3).eval(), torch.randn(5, 3, 32, 32), tmp_path / f"out{suffix}"
    checkpoints.write(tmp_path / "in.pt", {"model": model.state_dict(), "facts": CARD.to_dict()})
    assert convert_file(tmp_path / "in.pt", target, model=SMALL)[1]
    recorded = dict.fromkeys(CARD.to_dict(), "")
    if suffix == ".onnx":
        session = importlib.import_module("onnxruntime").InferenceSession(target)
        recorded = session.get_modelmeta().custom_metadata_map
        values = (*session.get_inputs(), *session.get_outputs())
        assert [value.shape for value in values] == [["batch", 3, 32, 32], ["batch", 3]]
        found = torch.from_numpy(session.run(["logits"], {"images": x.numpy()})[0])
    elif suffix == ".pt2":
        program = torch.export.load(target, extra_files=recorded).module()
        assert model_memory_format(program) == "channels_last"
        found = program(x)
    else:
        is_text = suffix == ".safetensors"
        state = load_file(target) if is_text else torch.load(target)
        recorded = safe_open(target, "pt").metadata() if is_text else state._metadata[""]
        plain = small(3).eval()
        plain.load_state_dict(state)
        found = plain(x)
        with pytest.raises(ConfigError, match=r"give model=tests\.networks:small"):
            load_model(target)  # a function is not called because a file names it
    assert torch.allclose(found, model(x), atol=1e-4)
    assert json.loads(str(recorded["crop"])) == 32 and ModelCard.read(recorded) == CARD
    with pytest.raises(ConfigError, match=r"model is a name.* not a Sequential"):
        load_model(target, small(3))
    if suffix != ".onnx":
        loaded, *known = load_model(target, SMALL, trust=suffix == ".pt2")
        assert torch.allclose(loaded(x), model(x), atol=1e-4)
        assert known == [PREPROCESSING, CARD.classes]


@pytest.mark.parametrize(
    "metadata",
    [None, {"mean": "[[["}, {**CARD.to_dict(), "crop": 1 << 40}, {**CARD.to_dict(), "resize": 31}],
)
def test_a_card_of_odd_values_is_unknown(metadata):
    assert ModelCard.read(metadata).preprocessing is None


def test_a_zoo_model_by_name_and_a_run_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    (tmp_path / "hub/checkpoints").mkdir(parents=True)
    torch.manual_seed(0)
    model = torchvision.models.squeezenet1_1().eval()
    downloaded = tmp_path / "hub/checkpoints/squeezenet1_1-b8a52dc0.pth"
    torch.save(model.state_dict(), downloaded)
    target = tmp_path / "RUN/checkpoints/step-00000001.pt"
    target.parent.mkdir(parents=True)
    assert convert_file("squeezenet1_1", target, weights="DEFAULT", input=IMAGES)[1]
    loaded, preprocess, classes = load_model(tmp_path / "RUN")
    assert (len(classes), preprocess.resize, preprocess.crop) == (1000, 256, 224)
    built = build_model("squeezenet1_1", num_classes=1000, weights=str(tmp_path / "RUN"))
    for other in (loaded, built):
        assert torch.equal(other.features[0].weight, model.features[0].weight)


VERSIONED = "tests.networks:versioned"


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("prefix", [None, "backbone."])
def test_versions_of_modules_travel(prefix, suffix, tmp_path):
    wrapper = prefix.rstrip(".") if prefix else "_orig_mod"
    wrapped = nn.Sequential(OrderedDict([(wrapper, networks.versioned(5).eval())]))
    torch.save({"state_dict": wrapped.state_dict()}, tmp_path / "in.pth")
    words = {"model": VERSIONED, "input": IMAGES}
    assert convert_file(tmp_path / "in.pth", tmp_path / f"a{suffix}", prefix=prefix, **words)[1]
    assert convert_file(tmp_path / f"a{suffix}", tmp_path / "b.pth", **words)[1]
    model, *_ = load_model(tmp_path / "b.pth", VERSIONED)
    built = build_model(VERSIONED, num_classes=7, weights=str(tmp_path / f"a{suffix}"))
    for each in (model, built):
        assert torch.equal(each.get_parameter("0.weight"), wrapped[0][0].weight)


def test_a_file_of_an_older_version_is_loaded_as_torch_does(tmp_path):
    """BatchNorm counts its batches since its version 2."""
    state = {n: v for n, v in small(3).state_dict().items() if "num_batches" not in n}
    torch.save(state, tmp_path / "old.pth")
    model = build_model(SMALL, num_classes=3, weights=str(tmp_path / "old.pth"))
    assert torch.equal(model.get_buffer("1.running_mean"), torch.zeros(8))


STATE = {"conv.weight": torch.ones(4, 3, 3, 3), "conv.bias": torch.zeros(4)}


def prefixed(prefix):
    return {f"{prefix}{name}": value for name, value in STATE.items()}


ENTRIES = ("state_dict", "model", "model_state_dict", "model_ema", "ema")
WRAPPED = {  # the file, and words of what was taken
    "plain": (STATE, ""),
    **{name: ({name: STATE, "optimizer": {}, "epoch": 3}, f"'{name}'") for name in ENTRIES},
    "by option": ({"model": STATE, "ema": prefixed("backbone."), "epoch": 1}, "'backbone.'"),
    "both": ({"model": STATE, "model_ema": prefixed("x.")}, "'model'"),
    "DDP of a compiled model": (prefixed("module._orig_mod."), "'module._orig_mod.'"),
    "nested": ({"model": {"state_dict": prefixed("module.")}}, "'model.state_dict'"),
    "timm with args": (
        {"state_dict": STATE, "args": argparse.Namespace(lr=0.1, betas=(0.9, 0.99))},
        "'state_dict'",
    ),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_weights(name, tmp_path):
    content, taken = WRAPPED[name]
    torch.save(content, tmp_path / "w.pth")
    asked = {"entry": "ema", "prefix": "backbone."} if name == "by option" else {}
    weights = read_weights(tmp_path / "w.pth", **asked)
    assert list(weights.tensors) == list(STATE) and taken in weights.origin
