"""What one run on shapes tells of a model: classes, FLOPs, the sizes that it takes, a crash."""

import pytest
import torch
import torchvision
from torch import nn

from cl_train.models.facts import ModelFacts, facts_of, image_shapes
from tests.memory_format.test_crashes import stem


class ComputesWithValues(nn.Module):
    """A user's model, which does not run on shapes alone."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        return self.model(images) * float(images.mean() >= 0)


def test_classes_and_flops_are_those_of_the_batch():
    model = torchvision.models.resnet18(num_classes=7)
    facts = facts_of(model, image_shapes(model, 4, 3, 64, 64))
    convolutions = facts_of(model.layer1, image_shapes(model, 4, 64, 16, 16))
    assert facts.classes == 7 and facts.crash is None
    assert facts.gflop == pytest.approx(0.297, 0.02)  # 3.628 at 224 px, (64 / 224)^2 of it
    assert facts.step_gflop / facts.gflop == pytest.approx(2.93, abs=0.05)
    assert convolutions.classes is None
    assert convolutions.gflop == pytest.approx(4 * 2 * 64 * 64 * 9 * 16 * 16 / 1e9)


def test_an_evaluation_has_no_step_and_a_frozen_model_a_shorter_one():
    model = torchvision.models.resnet18(num_classes=7)
    images = image_shapes(model, 4, 3, 64, 64)
    evaluated = facts_of(model, images, training=False)
    assert evaluated.step_gflop is None and evaluated.gflop > 0
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is model.fc.weight)
    frozen = facts_of(model, images)
    assert frozen.step_gflop == pytest.approx(frozen.gflop, 0.001)  # the classifier's alone
    model.requires_grad_(False)
    assert facts_of(model, images).step_gflop is None


@pytest.mark.parametrize(
    "batch", [(torch.randn(4, 3, 64, 64), 2.0), {"images": torch.randn(4, 3, 64, 64), "scale": 2.0}]
)
def test_images_are_counted_in_any_batch(batch):
    class Scaled(nn.Conv2d):
        def forward(self, images, scale):
            return super().forward(images) * scale

    facts = facts_of(Scaled(3, 8, 3, padding=1), batch)
    assert facts.gflop == pytest.approx(2 * 3 * 8 * 9 * 64 * 64 / 1e9)


def test_a_model_that_computes_with_values_runs_on_two_images_of_the_batch():
    seen = []
    model = ComputesWithValues(stem())
    model.model.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    images, before = torch.randn(4, 3, 96, 96), torch.get_rng_state()
    facts = facts_of(model, images)
    assert (facts.classes, facts.gflop, facts.step_gflop) == (48, None, None)
    assert "oneDNN writes outside its memory" in facts.crash
    assert seen[-1].shape == (2, 3, 96, 96) and seen[-1].device.type == "cpu"
    assert torch.equal(before, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_the_model_raises_is_raised():
    model = torchvision.models.alexnet()
    with pytest.raises(RuntimeError, match="Output size is too small"):
        facts_of(model, image_shapes(model, 2, 3, 32, 32))


def test_statistics_and_modes_stay():
    model = stem().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert isinstance(facts_of(model, torch.randn(2, 3, 32, 32)), ModelFacts)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.training
