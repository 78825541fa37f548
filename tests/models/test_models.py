"""Models by name: the zoo, one's own, and what is said of names that do not exist."""

from pathlib import Path
from urllib.error import URLError

import pytest
import torch
import torchvision
from torch import nn

from cl_train.config.schema import ConfigError
from cl_train.models.sources import build_model, check_input, check_model, model_names, replace_classifier


def test_all_classification_models_are_known() -> None:
    names = model_names()
    assert len(names) >= 80 and {"resnet50", "vit_b_16", "googlenet", "shufflenet_v2_x0_5"} <= set(names)
    assert not any("fcn" in name or "r3d" in name or "raft" in name for name in names)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resnt50", "did you mean"),
        ("resnt50", "resnet50"),
        ("timm/resnet5o", "timm/resnet50"),
        ("no_such_package.nowhere:build", "cannot import 'no_such_package.nowhere'"),
        ("tests.networks:smal", "did you mean small"),
    ],
)
def test_unknown_names_are_refused(name: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_model(name)
    assert expected in str(caught.value)


def test_unknown_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match="IMAGENET1K_V2"):
        check_model("resnet50", "IMAGENET1K_V3")


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1", "mobilenet_v2", "shufflenet_v2_x0_5"])
def test_the_head_has_the_datas_classes(name: str) -> None:
    model = build_model(name, num_classes=7).eval()
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 7)


@pytest.mark.parametrize(
    "name", ["resnet18", "squeezenet1_1", "googlenet", "vgg11", "densenet121", "swin_t", "convnext_tiny"]
)
@pytest.mark.slow
def test_a_pretrained_head_is_replaced(name: str) -> None:
    options = {"init_weights": False} if name == "googlenet" else {}
    model = torchvision.models.get_model(name, num_classes=1000, **options)
    replace_classifier(model, 7)
    outputs = model.train()(torch.randn(2, 3, 64, 64))
    for logits in outputs if isinstance(outputs, tuple) else [outputs]:
        assert logits.shape == (2, 7)


@pytest.mark.slow
def test_vision_transformers_are_built_for_the_image_size() -> None:
    model = build_model("vit_b_32", num_classes=4, image_size=64).eval()
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 4)


def test_ones_own_function_is_called_with_the_number_of_classes() -> None:
    assert build_model("tests.networks:small", num_classes=11)[-1].out_features == 11


def test_a_timm_model() -> None:
    pytest.importorskip("timm")
    model = build_model("timm/test_resnet", num_classes=6).eval()
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 6)


def test_an_image_too_small_for_the_model_is_refused_at_once() -> None:
    model = build_model("alexnet", num_classes=3)
    with pytest.raises(ConfigError, match=r"4 images of 32 px.*data.image_size"):
        check_input(model, "alexnet", 4, 32)
    check_input(model, "alexnet", 4, 64)
    assert next(model.parameters()).device.type == "cpu"


def test_a_batch_of_one_at_one_pixel_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than 1 value per channel"):
        check_input(build_model("resnet18", num_classes=3), "resnet18", 1, 32)


def test_weights_from_a_file_keep_the_models_layout(tmp_path: Path) -> None:
    saved = build_model("tests.networks:small", num_classes=3)
    torch.save(saved.state_dict(), tmp_path / "weights.pth")
    model = build_model("tests.networks:small", num_classes=3, weights=str(tmp_path / "weights.pth"))
    assert torch.equal(model[0].weight, saved[0].weight)


def test_a_file_of_other_classes_gives_all_but_the_head(tmp_path: Path) -> None:
    saved = build_model("tests.networks:small", num_classes=3)
    torch.save(saved.state_dict(), tmp_path / "weights.pth")
    model = build_model("tests.networks:small", num_classes=4, weights=str(tmp_path / "weights.pth"))
    assert torch.equal(model[3].weight, saved[3].weight) and model[8].weight.shape == (4, 16)


def test_a_safetensors_file(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    saved = build_model("tests.networks:small", num_classes=3)
    safetensors.save_file(saved.state_dict(), tmp_path / "weights.safetensors")
    model = build_model("tests.networks:small", num_classes=3, weights=str(tmp_path / "weights.safetensors"))
    assert torch.equal(model[8].weight, saved[8].weight)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    torch.save(build_model("resnet18", num_classes=3).state_dict(), tmp_path / "weights.pth")
    with pytest.raises(ConfigError, match=r"lacks 13 .* has 122 "):
        build_model("tests.networks:small", num_classes=3, weights=str(tmp_path / "weights.pth"))
    with pytest.raises(ConfigError, match=r"lacks 262 .* has 122 "):
        build_model("mobilenet_v2", num_classes=3, weights=str(tmp_path / "weights.pth"))
    (tmp_path / "weights.pth").write_bytes(b"not a checkpoint")
    with pytest.raises(ConfigError, match="tensors and plain types"):
        build_model("tests.networks:small", num_classes=4, weights=str(tmp_path / "weights.pth"))


def test_a_model_function_must_return_a_module() -> None:
    with pytest.raises(ConfigError, match="must return a torch"):
        build_model("tests.models.test_models:not_a_model", num_classes=3)


def not_a_model(num_classes: int) -> list[nn.Module]:
    return []


def test_a_size_that_a_transformer_cannot_cut_is_refused() -> None:
    with pytest.raises(ConfigError, match="100 px"):
        build_model("vit_b_16", num_classes=10, image_size=100)


def test_ones_own_model_has_no_named_weights() -> None:
    with pytest.raises(ConfigError, match="a model of your own has no named weights"):
        check_model("tests.networks:small", "DEFAULT")


@pytest.mark.parametrize("name", [":small", ".networks:small", "tests.raises_on_import:small"])
def test_modules_that_cannot_be_imported_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot import"):
        check_model(name)


def test_weights_of_other_classes_are_nothing_to_evaluate(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save(build_model("squeezenet1_1", num_classes=7).state_dict(), path)
    build_model("squeezenet1_1", num_classes=7, weights=str(path), keep_classifier=True)
    with pytest.raises(ConfigError, match="another number of classes"):
        build_model("squeezenet1_1", num_classes=3, weights=str(path), keep_classifier=True)


def test_a_batch_of_one_at_one_pixel_can_be_evaluated() -> None:
    check_input(build_model("resnet18", num_classes=3), "resnet18", 1, 32, training=False)


def test_drop_path_reaches_each_source_of_models() -> None:
    timm_model = build_model("timm/resnet18", num_classes=3, drop_path=0.25)
    rates = [module.drop_prob for module in timm_model.modules() if type(module).__name__ == "DropPath"]
    assert max(rates) == pytest.approx(0.25)
    blocks = build_model("convnext_tiny", num_classes=3, drop_path=0.25).modules()
    assert max(module.p for module in blocks if type(module).__name__ == "StochasticDepth") == pytest.approx(0.25)
    for name in ("resnet18", "swin_t", "timm/vgg11"):  # torchvision fixes the rate of Swin
        with pytest.raises(ConfigError, match=r"drop_path=0\.25"):
            build_model(name, num_classes=3, drop_path=0.25)


def test_timms_transformers_are_built_for_the_image_size() -> None:
    model = build_model("timm/deit_tiny_patch16_224", num_classes=3, image_size=32)
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 3)


@pytest.mark.parametrize("error", [URLError("Name or service not known"), ConnectionResetError()])
def test_weights_that_cannot_be_downloaded(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(torchvision.models, "get_model", offline)
    with pytest.raises(ConfigError, match=r"weights=DEFAULT cannot be downloaded .* weights=FILE"):
        build_model("resnet18", num_classes=3, weights="DEFAULT")
