"""Buffers are restored, or keep good values."""

import torch
from torch import nn

from cl_train.step.backup import BufferBackup
from tests.networks import small


def test_a_variance_that_overflows_does_not_become_good():
    """Its loss is finite: what is divided by an infinite variance is 0."""
    model = small(3)
    backup = BufferBackup(model=model)
    model.get_buffer("1.running_var")[0] = torch.inf
    model.get_buffer("1.running_mean")[0] = 5.0
    backup.keep_or_restore(torch.tensor(False))
    assert model.get_buffer("1.running_var").tolist() == [1.0] * 8
    model.get_buffer("1.running_var")[0] = torch.inf
    model.get_buffer("1.running_mean")[0] = 6.0
    backup.mend()
    assert model.get_buffer("1.running_var").tolist() == [1.0] * 8
    assert model.get_buffer("1.running_mean")[0] == 6.0
    assert backup.good["model.1.running_mean"][0] == 5.0


def test_a_buffer_that_the_forward_pass_replaces_is_restored():
    model = nn.Module()
    model.calls = nn.Buffer(torch.zeros(()))
    backup = BufferBackup(model=model)
    model.calls = model.calls + 1
    backup.restore()
    assert model.calls.item() == 0
    for shape in ((), (2,)):
        model.calls = torch.full(shape, 5.0)
        backup.keep_or_restore(torch.tensor(False))
        model.calls = torch.zeros(3)
        backup.keep_or_restore(torch.tensor(True))
        assert model.calls.shape == shape and (model.calls == 5).all()
