"""The moving average of the weights."""

import torch

from cl_train.step.precision import EMA, MasterWeights, cast_model, resolve_precision
from tests.networks import small


def test_the_average_follows_by_the_decay_in_the_models_layout() -> None:
    model = small(3).to(memory_format=torch.channels_last)
    average = EMA(model, decay=0.75)
    before = model[3].weight.detach().clone()
    with torch.no_grad():
        model[3].weight.add_(4.0)
        model[1].running_mean.add_(8.0)
        model[1].num_batches_tracked.add_(5)
    average.update(model)
    torch.testing.assert_close(average.module[3].weight, before + 1.0)
    torch.testing.assert_close(average.module[1].running_mean, torch.full((8,), 2.0))
    assert average.module[1].num_batches_tracked.item() == 5
    assert average.module[3].weight.stride() == model[3].weight.stride() == (72, 1, 24, 8)
    assert not average.module[3].weight.requires_grad and not average.module.training


def test_under_o2_the_average_follows_the_masters() -> None:
    """A change that fp16 cannot hold still moves the average."""
    model = cast_model(small(3), resolve_precision("fp16_o2", torch.device("cpu")))
    masters = MasterWeights(model)
    average = EMA(model, decay=0.5)
    before = average.module[3].weight.detach().clone()
    assert before.dtype == torch.float32
    with torch.no_grad():
        masters.by_name["3.weight"].add_(2e-6)
    average.update(model, masters)
    torch.testing.assert_close(average.module[3].weight - before, torch.full_like(before, 1e-6), rtol=0.05, atol=0)
