"""Models by name: the zoo, one's own, and what is said of names that do not exist."""

from urllib.error import URLError

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn

from cl_train.config.schema import DataConfig
from cl_train.errors import ConfigError
from cl_train.models.sources import build_model, replace_classifier
from cl_train.training import build
from cl_train.training.parts import ModelSettings
from tests import networks

SMALL = "tests.networks:small"
DEPTHS = ("DropPath", "StochasticDepth")


def closed():
    return nn.Identity()


def named_otherwise(classes):
    return networks.small(num_classes=classes)


REFUSED = [
    ("resnt50", None, "did you mean .*resnet50"),
    ("timm/resnet5o", None, "did you mean .*timm/resnet50"),
    ("no_such_package.nowhere:build", None, "'no_such_package.nowhere' .*: No module"),
    ("tests.raises_on_import:small", None, "cannot import.*RuntimeError"),
    ("tests.networks:smal", None, "did you mean small"),
    ("builtins:dict", None, "must return a torch"),
    ("tests.models.test_models:closed", None, "cannot be built: .*num_classes"),
    ("resnet50", "IMAGENET1K_V3", "IMAGENET1K_V2"),
    (SMALL, "DEFAULT", "your own model has no named weights"),
    (SMALL, "outputs/no", "no such file or folder"),
]


@pytest.mark.parametrize(("name", "weights", "problem"), REFUSED)
def test_unknown_names_are_refused(name, weights, problem):
    with pytest.raises(ConfigError, match=problem):
        build_model(name, num_classes=3, weights=weights)


OWN = "tests.models.test_models:named_otherwise"
OF_ANY_SIZE = ["resnet18", "squeezenet1_1", "mobilenet_v2", "shufflenet_v2_x0_5", SMALL, OWN]
OF_ONE_SIZE = [
    ("timm/test_resnet", 64),
    ("timm/deit_tiny_patch16_224", 32),
    pytest.param("vit_b_32", 64, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "size"), [*((name, 64) for name in OF_ANY_SIZE), *OF_ONE_SIZE])
def test_a_model_has_the_classes_and_the_image_size_of_the_data(name, size):
    model = build_model(name, num_classes=7, image_size=size).eval()
    assert model(torch.randn(1, 3, size, size)).shape == (1, 7)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["resnet18", "squeezenet1_1", "googlenet", "vgg11", "densenet121", "swin_t", "convnext_tiny"],
)
def test_a_pretrained_head_is_replaced(name):
    options = {"init_weights": False} if name == "googlenet" else {}
    model = torchvision.models.get_model(name, num_classes=1000, **options)
    replace_classifier(model, 7)
    outputs = model.train()(torch.randn(2, 3, 64, 64))
    for logits in outputs if isinstance(outputs, tuple) else [outputs]:
        assert logits.shape == (2, 7)


def test_images_that_a_model_cannot_take_are_refused_at_once():
    def built(model, batch_size, size, trained=True):
        data = DataConfig(image_size=size)
        wanted = ModelSettings(model, batch_size=batch_size, data=data, is_trained=trained)
        model = build.model_of(wanted, 3)
        build.facts_by_size(wanted, model)
        return model

    with pytest.raises(ConfigError, match=r"train on 4 images of 32 px.*data.image_size"):
        built("alexnet", 4, 32)
    assert next(built("alexnet", 4, 64).parameters()).device.type == "cpu"
    with pytest.raises(ConfigError, match="more than 1 value per channel"):
        built("resnet18", 1, 32)  # one pixel at the end
    built("resnet18", 1, 32, trained=False)
    with pytest.raises(ConfigError, match="100 px"):
        build_model("vit_b_16", num_classes=10, image_size=100)


@pytest.mark.parametrize(("suffix", "save"), [(".pth", torch.save), (".safetensors", save_file)])
def test_a_file_of_other_classes_gives_all_but_the_head(suffix, save, tmp_path):
    saved, path = build_model(SMALL, num_classes=3), tmp_path / f"weights{suffix}"
    save(saved.state_dict(), path)
    model = build_model(SMALL, num_classes=3, weights=str(path), keep_classifier=True)
    assert all(map(torch.equal, model.state_dict().values(), saved.state_dict().values()))
    other = build_model(SMALL, num_classes=4, weights=str(path))
    assert torch.equal(other[3].weight, saved[3].weight) and other[8].weight.shape == (4, 16)
    with pytest.raises(ConfigError, match="another number of classes"):
        build_model(SMALL, num_classes=4, weights=str(path), keep_classifier=True)


def test_drop_path_reaches_each_source_of_models(monkeypatch):
    asked = {}
    monkeypatch.setattr(networks, "small", lambda **given: asked.update(given) or nn.Linear(1, 1))
    build_model(SMALL, num_classes=3, drop_path=0.25)
    assert asked == {"num_classes": 3, "drop_path": 0.25}
    timms, torchvisions = ("timm/resnet18", "drop_prob"), ("convnext_tiny", "p")
    for name, rate in (timms, torchvisions):
        blocks = build_model(name, num_classes=3, drop_path=0.25).modules()
        rates = [getattr(block, rate) for block in blocks if type(block).__name__ in DEPTHS]
        assert max(rates) == pytest.approx(0.25)
    for name in ("resnet18", "swin_t", "timm/vgg11"):  # torchvision fixes the rate of Swin
        with pytest.raises(ConfigError, match=r"drop_path=0\.25"):
            build_model(name, num_classes=3, drop_path=0.25)


def test_weights_that_cannot_be_downloaded(monkeypatch):
    def offline(*_, **__):
        raise URLError("Name or service not known")

    monkeypatch.setattr(torchvision.models, "get_model", offline)
    with pytest.raises(ConfigError, match=r"resnet18-f37072fd.pth .*give weights=FILE"):
        build_model("resnet18", num_classes=3, weights="DEFAULT", image_size=32)
