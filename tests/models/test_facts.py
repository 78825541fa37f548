"""What one run on shapes tells of a model: classes, FLOPs, the sizes that it takes, a crash."""

import pytest
import torch
import torchvision
from torch import nn

from cl_train.models.facts import facts_of, image_shapes
from tests.memory_format.test_crashes import stem


class ComputesWithValues(nn.Module):
    """A user's model, which does not run on shapes alone."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        return self.model(images) * float(images.mean() >= 0)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "squeezenet1_1"])
def test_flops_of_an_evaluation_are_the_published_ones(name):
    weights = next(iter(torchvision.models.get_model_weights(name)))
    size = weights.transforms().crop_size[0]
    with torch.device("meta"):
        model = torchvision.models.get_model(name, num_classes=1000)
    facts = facts_of(model, image_shapes(model, 1, 3, size, size), training=False)
    published = 2 * weights.meta["_ops"]  # billions of multiply-adds, rounded
    assert facts.gflop == pytest.approx(published, 0.02) and facts.step_gflop is None
    assert facts.classes == 1000 and facts.crash is None


@pytest.mark.parametrize(
    ("name", "frozen", "passes"),
    [
        ("resnet18", (), 2.93),  # no gradient of the images: the first convolution counts twice
        ("resnext50_32x4d", (), 2.97),  # groups
        ("resnet18", ("conv1", "bn1", "layer1"), 2.33),
        ("resnet18", "", None),
    ],
)
def test_a_backward_pass_counts_as_far_as_it_runs(name, frozen, passes):
    with torch.device("meta"):
        model = torchvision.models.get_model(name)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(not parameter_name.startswith(frozen))
    facts = facts_of(model, image_shapes(model, 2, 3, 64, 64))
    found = facts.step_gflop and facts.step_gflop / facts.gflop
    assert found == (passes and pytest.approx(passes, abs=0.05))


def test_a_model_that_computes_with_values_runs_on_two_images_of_the_batch():
    seen = []
    model = ComputesWithValues(stem())
    model.model.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    images, before = torch.randn(4, 3, 96, 96), torch.get_rng_state()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    facts = facts_of(model, images)
    assert (facts.classes, facts.gflop, facts.step_gflop) == (48, None, None)
    assert "oneDNN writes outside its memory" in facts.crash
    assert seen[-1].shape == (2, 3, 96, 96) and seen[-1].device.type == "cpu"
    assert torch.equal(before, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
