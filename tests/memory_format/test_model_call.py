"""What a model's run changes is restored."""

import torch
from torch import nn

from cl_train.memory_format.model_call import BufferBackup
from cl_train.step.precision import EMA
from tests.networks import small


def test_batchnorm_statistics_are_restored_after_nan_activations() -> None:
    model = small(3)
    ema = EMA(model, 0.9)
    model(torch.randn(4, 3, 32, 32))
    backup = BufferBackup(model, ema.module)
    expected = [buffer.clone() for buffer in model.buffers()]
    model(torch.full((4, 3, 32, 32), float("nan")))
    ema.update(model.state_dict())
    assert not all(buffer.isfinite().all() for buffer in [*model.buffers(), *ema.module.buffers()])
    backup.restore()
    assert all(torch.equal(buffer, value) for buffer, value in zip(model.buffers(), expected, strict=True))
    assert all(buffer.isfinite().all() for buffer in ema.module.buffers())
    model(torch.randn(4, 3, 32, 32))
    backup.settle(torch.tensor(False))
    expected = [buffer.clone() for buffer in model.buffers()]
    model(torch.randn(4, 3, 32, 32))
    backup.settle(torch.tensor(True))
    assert all(torch.equal(buffer, value) for buffer, value in zip(model.buffers(), expected, strict=True))


def test_a_buffer_that_the_forward_pass_replaces_is_restored() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self) -> None:
            self.calls = self.calls + 1

    model = Counting()
    backup = BufferBackup(model)
    model()
    backup.restore()
    assert model.calls.item() == 0
    for shape in ((), (2,), (1,)):
        model.calls = torch.full(shape, 5.0)
        backup.settle(torch.tensor(False))
        model.calls = torch.zeros(3)
        backup.settle(torch.tensor(True))
        assert model.calls.shape == shape and (model.calls == 5).all()
