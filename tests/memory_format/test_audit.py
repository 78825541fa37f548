"""The audit and the guard find planted losses with module, line, direction and bytes, and nothing
in a clean model.
"""

import colorsys
import json
import linecache
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cl_train
from cl_train.errors import ConfigError, LayoutLost
from cl_train.measure.audit import audit
from cl_train.memory_format.operator_recorder import traits_of
from cl_train.step.precision import Precision
from cl_train.system.tables import two_digits
from tests.ranks import group_of_one


def images(*shape):
    return torch.randn(shape or (2, 3, 8, 8)).to(memory_format=torch.channels_last)


def converted(model):
    cl_train.convert(model)
    return model


class Call(nn.Module):
    """Calls a function of a tensor or of several."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def with_gradient(backward):
    """A function whose forward pass copies."""

    class Planted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return backward(gradient)

    return Planted.apply


def windows(x):
    """Window partitioning, attention's part left out, and back."""
    n, c, h, w = x.shape
    parts = x.reshape(n, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(-1, 4, c)
    mixed = parts.softmax(1)
    return mixed.reshape(n, h // 2, w // 2, 2, 2, c).permute(0, 5, 1, 3, 2, 4).reshape(n, c, h, w)


LOSSES = {
    "contiguous": lambda x: x.contiguous(),
    "mixed windows": windows,
    "cat with contiguous": lambda x: torch.cat([x[:, :4].contiguous(), x[:, 4:]], 1),
    "written into contiguous": lambda x: torch.zeros(x.shape).copy_(x),
    "contiguous gradient": with_gradient(lambda gradient: gradient.contiguous()),
    "gradient written into contiguous": with_gradient(
        lambda gradient: torch.zeros(gradient.shape).copy_(gradient)
    ),
}
IMAGE_BYTES = 2 * 8 * 16 * 16 * 4


def model_with(loss=None):
    function = LOSSES.get(loss, loss)
    block = nn.Sequential(nn.BatchNorm2d(8), Call(function) if loss else nn.ReLU())
    return converted(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), block, nn.Conv2d(8, 4, 3)))


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        with cl_train.layout_guard():
            model(images(2, 3, 32, 32)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("name", LOSSES)
def test_a_planted_loss_is_found_at_its_line(name):
    direction = "backward" if "gradient" in name else "forward"
    words = {"contiguous gradient": "gradient.contiguous()"}
    advice = {"mixed windows": "permute(0, 2, 3, 1)", "written into contiguous": "empty_like"}
    report = audit(model_with(name), images(2, 3, 16, 16))
    call = next(call for call in report.of("lost", direction) if call.module == "1.1")
    file, line = call.source.rsplit(":", 1)
    assert file.endswith(Path(__file__).name) and call.module_type == "Call"
    assert linecache.getline(__file__, int(line)).strip() == call.line
    assert words.get(name, name.split()[0]) in call.line
    assert advice.get(name, "") in call.advice() and call.copy == "explicit"
    assert call.moved_bytes == 2 * IMAGE_BYTES // (1 + ("cat" in name))  # read and written
    restored = [call.module for call in report.of("restored", direction)]
    assert ("1.0" if direction == "backward" else "2") in restored
    with pytest.raises(LayoutLost) as raised:
        train(model_with(name))
    message = str(raised.value)
    found = re.search(r"at (\S+):(\d+) `(.*?)`,", message)
    assert (found[2], found[3]) == (line, call.line)
    assert "1.1 (Call)" in message and f"in {direction}" in message
    assert re.search(r"32, 32\]|8, 16, 2, 16, 2\]", message)


def test_a_line_of_pythons_library_is_nobodys_model():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), Call(lambda x: colorsys.rgb_to_yiq(x, x, x)[0]))
    calls = [call for call in audit(converted(model), images()).calls if call.name == "sub.Tensor"]
    assert calls and all("colorsys.rgb_to_yiq" in call.line for call in calls)


def test_a_clean_model_and_one_in_contiguous_give_nothing():
    report = audit(model_with(), images(2, 3, 16, 16))
    assert report.of("lost") == [] == report.of("restored") and report.moved_bytes == 0
    assert report.totals["kept"] > 8 and not report.losses() and not report.notes()
    of_contiguous_batch = audit(model_with(), torch.randn(2, 3, 16, 16))
    first = of_contiguous_batch.of("restored", "forward")[0]
    assert (first.module, first.copy, first.moved_bytes) == ("0", "hidden", 2 * 2 * 3 * 16 * 16 * 4)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Call(windows))
    report = audit(model, torch.randn(2, 3, 16, 16))
    assert report.of("lost") == [] == report.of("kept") and "convert the model" in str(report)
    # dimensions of size 1 are ambiguous
    to_one_channel = (nn.Conv2d(1, 8, 3), nn.Conv2d(8, 1, 1), nn.ReLU())
    to_one_pixel = (nn.Conv2d(1, 4, 3), nn.MaxPool2d(10), nn.ReLU())
    model = converted(nn.Sequential(*to_one_channel, *to_one_pixel))
    report = audit(model, images(2, 1, 14, 14))
    ambiguous = {call.module for call in report.of("ambiguous")}
    assert report.of("lost") == [] and {"2", "5"} <= ambiguous


def test_the_model_is_afterwards_what_it_was():
    model = model_with("contiguous")
    weight = model[0].weight
    weight.grad = kept = torch.ones_like(weight)
    batch, random_state = images(2, 3, 16, 16), torch.get_rng_state()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    report = audit(model, batch)
    with pytest.raises(ConfigError, match="expected input"):
        audit(model, batch[:, :2])
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert weight.grad is kept and torch.equal(kept, torch.ones_like(weight))
    assert model[2].weight.grad is None and not weight._backward_hooks
    assert not torch.nn.modules.module._global_forward_hooks
    assert 0 < report.moved_pct < 100
    assert ".contiguous()" in report.losses()[0]["line"]
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["totals"]["lost"] >= 1 and plain["calls"][0]["outcome"] == "lost"


CREATED = {
    "a mean: div": lambda x: F.adaptive_avg_pool2d(x, 1),
    "select: select_backward": lambda x: x[:, :, -1, -1],
    "index: new_zeros": lambda x: x[:, :, torch.tensor([0, 1])],
    "max: scatter": lambda x: x.flatten(2).max(2).values,
    # gradients that are images only after a view
    "unbind: stack": lambda x: x.flatten(2).unbind(2)[0],
    "unbind: stack of stacked": lambda x: torch.stack(x.flatten(2).unbind(2)[:2]),
    "select: select_backward of tokens": lambda x: x.flatten(2)[:, :, 0],
}


@pytest.mark.parametrize("name", CREATED)
def test_who_reads_a_gradient_that_a_kernel_creates_inherits_its_layout(name):
    forward, operator = name.split(" of")[0].split(": ")
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU6(), Call(CREATED[name])
    model, x = converted(nn.Sequential(*layers)), images(2, 3, 16, 16)
    report = audit(model, x)
    creator = report.of("created")[-1]
    inherited = next(call for call in report.of("inherited") if "hardtanh" in call.name)
    assert report.of("lost") == [] and creator.name.startswith(operator)
    assert (creator.moved_bytes, creator.copy, inherited.moved_bytes) == (0, "", 2 * IMAGE_BYTES)
    assert inherited.cause == creator.place == report.of("restored")[0].cause
    (note,) = report.notes()
    assert f"{creator.source} `" in note and f"gradient (of {forward}" in note
    verdict, paid = report.headline().split(", but ")
    assert "no operator loses" in verdict
    assert paid.endswith(f"calls convert {two_digits(report.moved_pct)} % of the step's bytes")
    assert report.inherited()["backward", "1", inherited.operator] == creator.where
    with cl_train.layout_guard():
        model(x).square().sum().backward()
    with pytest.raises(LayoutLost, match=creator.source), cl_train.layout_guard(strict=True):
        model(x).square().sum().backward()


def contiguous_weight(model):
    model[2].weight.data = model[2].weight.detach().contiguous()
    return model


CONSTANT = torch.randn(2, 8, 16, 16)
PAID = {
    "the batch is": (model_with(), torch.randn(2, 3, 16, 16)),
    "a weight is": (contiguous_weight(model_with()), images(2, 3, 16, 16)),
    "a tensor from outside": (model_with(lambda x: x + CONSTANT), images(2, 3, 16, 16)),
    "ones writes": (model_with(lambda x: x + torch.ones(x.shape)), images(2, 3, 16, 16)),
}


@pytest.mark.parametrize("why", PAID)
def test_who_pays_without_a_loss_is_told_which_input_is_contiguous(why):
    model, batch = PAID[why]
    (note,) = audit(model, batch).notes()
    assert why in note and "(forward)" in note
    with cl_train.layout_guard():
        model(batch)
    clean = model_with()
    with cl_train.layout_guard(strict=True):
        clean(torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last))
    with pytest.raises(LayoutLost, match=why), cl_train.layout_guard(strict=True):
        model(batch)


def test_keys_that_are_transposed_for_a_product_are_not_paid_for():
    def attention(x):
        tokens = x.flatten(2).mT.unflatten(2, (2, 4)).transpose(1, 2)
        weights = (tokens @ tokens.mT.contiguous()).softmax(-1)
        return x + (weights @ tokens).transpose(1, 2).flatten(2).mT.unflatten(2, x.shape[2:])

    report = audit(model_with(attention), images(2, 3, 8, 8))
    copies = [call for call in report.calls if call.name == "clone" and call.module == "1.1"]
    assert copies and not any(call.moved_bytes for call in copies) and report.of("lost") == []
    assert not any("clone" in call.cause for call in report.of("restored"))


def test_video_is_watched_in_five_dimensions():
    layers = nn.Conv3d(3, 8, 3), nn.BatchNorm3d(8), nn.ReLU(), Call(LOSSES["contiguous"])
    model = converted(nn.Sequential(*layers, nn.Conv3d(8, 8, 3)))
    video = torch.randn(2, 3, 6, 8, 8).to(memory_format=torch.channels_last_3d)
    report = audit(model, video)
    assert [(call.module, call.direction) for call in report.of("lost")] == [("3", "forward")]
    assert report.totals["kept"] > 4
    with pytest.raises(LayoutLost), cl_train.layout_guard():
        model(video)


def test_a_forward_pass_and_an_own_loss_are_audited_and_what_has_none_is_refused():
    model, bf16 = model_with("contiguous"), Precision("bf16", autocast_dtype=torch.bfloat16)
    report = audit(model, images(2, 3, 16, 16), precision=bf16, backward=False)
    assert {call.direction for call in report.calls} == {"forward"}
    assert [call.dtype for call in report.of("lost")] == ["bfloat16"]
    classes = converted(nn.Sequential(nn.Conv2d(3, 8, 3), Call(lambda x: x.mean((2, 3)).argmax(1))))
    assert audit(classes, images(), backward=False).calls
    one = torch.ones(1, requires_grad=True)
    assert audit(Call(lambda x: "cat"), images(), loss=lambda output: one.sum()).totals
    with pytest.raises(ConfigError, match="scalar"):
        audit(nn.ReLU(), images(), loss=lambda output: output)
    with pytest.raises(ConfigError, match="4 or 5 dim"):
        audit(nn.Linear(3, 2), torch.ones(2, 3))


def test_an_operator_whose_arguments_python_cannot_write_has_traits():
    traits = traits_of(torch.ops.aten.record_stream.default)
    assert traits.name == "record_stream" and traits.arguments == () and not traits.is_view


# --- the guard ------------------------------------------------------------------------------------


def test_losses_are_allowed_by_pattern_or_only_warned_about():
    model = model_with("contiguous")
    patterns = ("clone", "1.*", "Call", "test_audit.py:*", "*/test_audit.py:*", "*x.contiguous()*")
    for pattern in patterns:
        with cl_train.layout_guard(allow=[pattern]):
            model(images())
    warning = pytest.warns(UserWarning, match="clone lost channels_last")
    with warning as warned, cl_train.layout_guard("warn"):
        for _ in range(2):
            model(images())
    assert {Path(warning.filename).name for warning in warned} == {"test_audit.py"}
    with pytest.raises(ValueError, match="raise or warn"), cl_train.layout_guard("stop"):
        pass
    assert not torch.nn.modules.module._global_forward_hooks


@pytest.mark.filterwarnings("ignore")
def test_a_loop_with_ddp_is_guarded(tmp_path):
    with cl_train.layout_guard():  # not converted: there is nothing to lose
        nn.Sequential(nn.Conv2d(3, 8, 3), Call(LOSSES["contiguous"]))(torch.randn(2, 3, 8, 8))
    ddp = nn.parallel.DistributedDataParallel
    with group_of_one(tmp_path):
        train(ddp(model_with()))
        for name in ("contiguous", "contiguous gradient"):
            with pytest.raises(LayoutLost, match=r"module\.1\.1 \(Call\)"):
                train(ddp(model_with(name)))


def test_a_cost_has_no_exponent():
    assert [two_digits(value) for value in (110.4, 0.534, 4.0, 0)] == ["110", "0.53", "4", "0"]
