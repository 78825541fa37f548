"""What surrounds a model has its strides; inductor's choices."""

import pytest
import torch
from torch import nn

from cl_train.config.schema import OptimConfig
from cl_train.memory_format.audit import compiled_graphs
from cl_train.memory_format.convert import convert
from cl_train.step.optim import build_optimizer
from cl_train.step.precision import EMA, MasterWeights, cast_model, resolve_precision


@pytest.mark.parametrize(("name", "optimizer"), [("fp32", "adamw"), ("fp32", "sgd"), ("fp16_o2", "sgd")])
def test_gradients_averages_moments_and_master_weights_have_the_strides_of_the_weights(
    name: str, optimizer: str
) -> None:
    precision = resolve_precision(name, torch.device("cpu"))
    model = cast_model(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)), precision)
    convert(model)
    masters, ema = MasterWeights(model, precision), EMA(model, 0.9)
    weights = masters.trainable()
    updates = build_optimizer(OptimConfig(name=optimizer), model, weights, lr=0.1)
    images = torch.randn(2, 3, 8, 8, dtype=precision.input_dtype).to(memory_format=torch.channels_last)
    model(images).float().square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    masters.copy_gradients_from_model()
    updates.step()
    ema.update(masters.state_dict())
    averages = dict(ema.module.named_parameters())
    for name, parameter in model.named_parameters():
        moments = [value for value in updates.state[weights[name]].values() if value.shape == parameter.shape]
        assert len(moments) == (2 if optimizer == "adamw" else 1)
        for tensor in (gradients[name], weights[name], weights[name].grad, averages[name], *moments):
            assert tensor.stride() == parameter.stride(), name
    assert model[0].weight.stride() == (27, 1, 9, 3)


def decisions(model: nn.Module, backward: bool) -> list[tuple[str, bool]]:
    x = torch.randn(2, 3, 32, 32)
    graphs = compiled_graphs(model, lambda compiled: compiled(x).square().mean(), backward)
    assert [graph["graph"] for graph in graphs] == list(range(len(graphs)))
    return [(graph["direction"], graph["channels_last"]) for graph in graphs]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of inductor and oneDNN about themselves
def test_what_inductor_decides() -> None:
    model = nn.Sequential(nn.Conv2d(3, 128, 3), nn.ReLU(), nn.Conv2d(128, 128, 3, groups=2))
    assert decisions(model, True) == [("forward", True), ("backward", True)]
    assert decisions(nn.Flatten(), False) == [("inference", False)]
    torch.backends.mkldnn.enabled = False  # as on a GPU: inductor's own rules
    try:
        assert not any(laid_out for _, laid_out in decisions(model, True))  # a grouped convolution
        wide = nn.Sequential(nn.Conv2d(3, 128, 3), nn.ReLU(), nn.Conv2d(128, 128, 3))
        assert all(laid_out for _, laid_out in decisions(wide, True))
    finally:
        torch.backends.mkldnn.enabled = True
