"""Unusual models through audit and convert: they work, or are refused with a remedy; what a run
changes is restored.

Training runs on the same models: tests/training/test_build.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from cl_train.errors import ConfigError
from cl_train.measure.audit import audit
from cl_train.memory_format.convert import convert
from cl_train.memory_format.layout import model_memory_format
from cl_train.step.backup import BufferBackup
from tests.memory_format.test_audit import images, windows
from tests.networks import small

pytestmark = pytest.mark.filterwarnings("ignore")  # of deprecated kinds of models, by torch


class Body(nn.Module):
    """A convolution and a head; `finish` makes the output of the features."""

    def __init__(self, finish=lambda x: x, convolution=None):
        super().__init__()
        self.conv = convolution or nn.Conv2d(3, 4, 3)
        self.finish = finish

    def forward(self, x):
        return self.finish(self.conv(x))


def with_tensor(tensor):
    model = Body()
    model.tensor = tensor if isinstance(tensor, nn.Parameter) else nn.Buffer(tensor)
    return model


class Swaps(Body):
    """Replaces its own parameter in forward."""

    def forward(self, x):
        self.conv.weight = nn.Parameter(self.conv.weight.detach() * 2)
        return self.conv(x)


class Cache(Body):
    """Calls a child twice; a plain attribute holds a non-leaf tensor, which cannot be
    deep-copied.
    """

    def forward(self, x):
        self.cache = self.conv(x)
        return self.conv(F.pad(self.cache[:, :3], (1, 1, 1, 1)))


CONV = nn.Conv2d(4, 4, 3)
PLAIN = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
FLATTENS = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Unflatten(1, (4, 6, 6)), nn.ReLU())
WEIGHTS = [torch.randn(4, 4, 3, 3)]
# How the audit of a model with this output ends: "ok", or "loses" and the operators; else words of
# the refusal.
OUTPUTS = {
    "tensor": (lambda x: x, "ok"),
    "dict": (lambda x: {"logits": x, "name": "a"}, "ok"),
    "own class": (lambda x: type("Output", (), {"logits": x})(), "output="),
    "view": (lambda x: x.view(x.shape[0], -1), ".reshape"),
    "raises": (lambda x: {}["odd key"], "odd key"),
    "checkpointed": (lambda x: checkpoint(CONV, x, use_reentrant=False), "loses copy_"),
    "no grad": (torch.no_grad()(lambda x: F.conv2d(x, WEIGHTS[0])), "ok"),
    "inference mode": (torch.inference_mode()(lambda x: F.conv2d(x, WEIGHTS[0])), "ok"),
    "window partitioning": (windows, "loses clone"),
}
TENSORS = {
    "sparse 4-D parameter": nn.Parameter(torch.ones(2, 2, 2, 2).to_sparse()),
    "expanded parameter": nn.Parameter(torch.zeros(1).expand(2, 3, 4, 4)),
    "complex parameter": nn.Parameter(torch.ones(1, 3, 1, 1, dtype=torch.complex64)),
    "empty parameter": nn.Parameter(torch.empty(0, 3, 4, 4)),
}
MODELS = {
    **{name: (partial(Body, finish), expected) for name, (finish, expected) in OUTPUTS.items()},
    **{name: (partial(with_tensor, tensor), "ok") for name, tensor in TENSORS.items()},
    "lazy": (lambda: nn.Sequential(nn.LazyConv2d(4, 3)), "run one batch"),
    "scripted inside": (lambda: nn.Sequential(torch.jit.script(PLAIN), nn.Conv2d(4, 4, 1)), "ok"),
    "scripted": (lambda: torch.jit.script(FLATTENS), "loses clone"),
    "traced": (lambda: torch.jit.trace(FLATTENS, torch.randn(2, 3, 8, 8)), "loses clone"),
    "traced by torch.fx": (lambda: torch.fx.symbolic_trace(FLATTENS), "loses clone"),
    "compiled": (lambda: torch.compile(nn.Sequential(nn.ReLU()), backend="eager"), "ok"),
    "swaps its parameter": (Swaps, "ok"),
    "cache, and a child called twice": (Cache, "loses slice_backward"),
    "inference parameters": (torch.inference_mode()(lambda: Body()), "Inference"),
    "meta": (lambda: Body().to("meta"), "meta"),
    "wrong channels": (lambda: nn.Sequential(nn.Conv2d(5, 4, 3)), "channels"),
    "no module children": (nn.Identity, "ok"),
}
SLOW = ("compiled", "scripted", "scripted inside", "traced")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in MODELS],
)
def test_odd_model(name):
    build, expected = MODELS[name]
    torch.manual_seed(0)
    model = build()
    try:
        report = convert(model)
        assert str(report) and report.to_dict()["mode"] == "full"
        assert not report.changed or model_memory_format(model) in ("channels_last", "mixed")
    except ConfigError as error:
        assert expected in str(error)
    if expected == "ok" or expected.startswith("loses "):
        result = audit(model, images(), measure=name == "tensor")
        assert {call.name for call in result.of("lost")} == set(expected.split()[1:])
        assert result.totals["kept"] and result.headline() in str(result)
    else:
        with pytest.raises(ConfigError, match=f"(?s).*{expected}"):
            audit(model, images())
    assert not getattr(model, "_forward_pre_hooks", None)


def test_an_entry_of_the_output_and_the_loss_are_selected():
    for finish, key in ((lambda x: {"a": x, "b": x * 2}, "b"), (lambda x: (x, x * 2), 1)):
        assert audit(Body(finish), images(), output=key).totals["kept"]
        with pytest.raises(ConfigError, match="no such entry"):
            audit(Body(finish), images(), output="nothing")
    one = torch.ones(1, requires_grad=True)
    assert audit(Body(lambda x: "cat"), images(), loss=lambda output: one.sum()).totals
    with pytest.raises(ConfigError, match="scalar"):
        audit(Body(), images(), loss=lambda output: output)


def test_a_variance_that_overflows_does_not_become_good():
    """Its loss is finite: what is divided by an infinite variance is 0."""
    model = small(3)
    backup = BufferBackup(model=model)
    model.get_buffer("1.running_var")[0] = torch.inf
    model.get_buffer("1.running_mean")[0] = 5.0
    saved = backup.values_after(is_bad=False)
    backup.keep_or_restore(torch.tensor(False))
    for values in (saved["model.1.running_var"], model.get_buffer("1.running_var")):
        assert values.tolist() == [1.0] * 8
    assert model.get_buffer("1.running_mean")[0] == 5.0
    model.get_buffer("1.running_mean")[0] = 6.0
    assert backup.values_after(is_bad=True)["model.1.running_mean"][0] == 5.0


def test_a_buffer_that_the_forward_pass_replaces_is_restored():
    model = nn.Module()
    model.calls = nn.Buffer(torch.zeros(()))
    backup = BufferBackup(model=model)
    model.calls = model.calls + 1
    backup.restore()
    assert model.calls.item() == 0
    for shape in ((), (2,), (1,)):
        model.calls = torch.full(shape, 5.0)
        backup.keep_or_restore(torch.tensor(False))
        model.calls = torch.zeros(3)
        backup.keep_or_restore(torch.tensor(True))
        assert model.calls.shape == shape and (model.calls == 5).all()
