"""Unusual models in the audit, in parity, timed and trained: each works, or is refused in one line
that says why.
"""

import re
from contextlib import nullcontext
from dataclasses import make_dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cl_train.errors import ConfigError
from cl_train.measure.audit import audit
from cl_train.measure.paired import compare_layouts
from cl_train.measure.parity import check_parity
from cl_train.memory_format.convert import convert
from cl_train.memory_format.layout import CHANNELS_LAST_BY_DIM
from tests.measure.test_parity import Made, body, features, pooled, viewing, with_head

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, about odd and deprecated models
Output = make_dataclass("Output", ["logits", "hidden"])
CONV = nn.Conv2d(8, 8, 3)
FLATTENS = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Unflatten(1, (4, 10, 10)), nn.ReLU())


def segmentation():
    heads = nn.ModuleDict({"out": nn.Conv2d(8, 4, 1), "aux": nn.Conv2d(8, 4, 1)})
    return with_head(lambda heads, x: {name: head(x) for name, head in heads.items()}, heads)


def detector():
    def run(model, images):
        boxes = [pooled(model.body(image[None])) for image in images]
        return [{"boxes": box, "labels": torch.zeros(1, dtype=torch.int64)} for box in boxes]

    return Made(run, body=body())


def two_inputs():
    parts = {"body": body(), "table": nn.Embedding(5, 8)}
    return Made(lambda m, image, token: pooled(m.body(image)) * m.table(token), **parts)


MODELS = {
    "logits": features,
    "dict": segmentation,
    "dict with a selected entry": segmentation,
    "dict with a wrong entry": segmentation,
    "tuple": lambda: features(lambda x: (pooled(x), x)),
    "dataclass": lambda: features(lambda x: Output(pooled(x), (x,))),
    "classes": lambda: features(lambda x: pooled(x).argmax(1)),
    "video": lambda: nn.Sequential(
        nn.Conv3d(3, 8, 3), nn.BatchNorm3d(8), nn.AdaptiveAvgPool3d(1), nn.Flatten()
    ),
    "detector": detector,
    "two inputs": two_inputs,
    "keywords": two_inputs,
    # Creates fp32 tensors whatever the model's dtype is: does not run in float64.
    "fp32 only": lambda: with_head(lambda head, x: head(pooled(x).float()), nn.Linear(8, 4)),
    "scripted": lambda: torch.jit.script(FLATTENS),
    "traced by torch.fx": lambda: torch.fx.symbolic_trace(FLATTENS),
    "compiled": lambda: torch.compile(features(), backend="eager"),
    "checkpointed": lambda: features(lambda x: pooled(checkpoint(CONV, x, use_reentrant=False))),
    "frozen": lambda: features().requires_grad_(False),
    "sparse gradients": lambda: with_head(
        lambda table, x: pooled(x) + table(pooled(x).argmax(1)), nn.Embedding(8, 8, sparse=True)
    ),
    "view": viewing,
    "raises": lambda: features(lambda x: {}["odd key"]),
    "lazy": lambda: nn.Sequential(nn.LazyConv2d(8, 3), nn.Flatten()),
    "meta": lambda: features().to("meta"),
    "wrong channels": lambda: nn.Conv2d(1, 8, 3),
}
GIVEN = {
    "dict with a selected entry": {"output": "out"},
    "dict with a wrong entry": {"output": "nosuch"},
    "tuple": {"output": 1},
    "video": {"image_size": (3, 4, 12, 12)},
    "detector": {"batch": ([torch.randn(3, 12, 12), torch.randn(3, 10, 12)],)},
    "two inputs": {"batch": (torch.randn(4, 3, 12, 12), torch.tensor([0, 1, 2, 3]))},
    "keywords": {"batch": {"image": torch.randn(2, 3, 12, 12), "token": torch.tensor([0, 1])}},
    "view": {"image_size": 16},
}
# Words of the refusals: by all; by the audit, or the operators that lose the layout; by timing,
# which needs an optimizer; by training.
REFUSED = {
    "dict with a wrong entry": "aux",
    "classes": "output",
    "raises": "odd key",
    "lazy": "run one batch",
    "meta": "meta",
    "wrong channels": "to have 1 channels",
    "view": "reshape",
}
AUDITED = {
    "scripted": {"clone"},
    "traced by torch.fx": {"clone"},
    "checkpointed": {"copy_"},
}
TIMED = {"frozen": "only inference", "sparse gradients": "parse"}
NO_CLASSIFIER = r"outputs \[.*\], not \[N, classes\] for 4 classes"
CANNOT_TRAIN = {
    **dict.fromkeys(("classes", "traced by torch.fx"), NO_CLASSIFIER),
    **dict.fromkeys([name for name in MODELS if "dict" in name], "returned a dict;.*`logits`"),
    "tuple": "returned a tuple",
    "detector": "returned a list",
    "video": "to have 3 channels",
    **dict.fromkeys(("two inputs", "keywords"), "argument: 'token'"),
    "frozen": "nothing to train",
    "scripted": "spatial targets",
    "sparse gradients": "does not support sparse gradients",
}


def outcome_of(function, refused):
    """The result, or None where the function refuses in one line, which has the words `refused`."""
    if not isinstance(refused, str):
        return function()
    with pytest.raises(ConfigError, match=refused) as error:
        function()
    assert len(str(error.value).splitlines()) == 1
    return None


def model_and_arguments(name):
    torch.manual_seed(0)
    return MODELS[name](), {"image_size": 12, **GIVEN.get(name, {})}


@pytest.mark.parametrize("name", MODELS)
def test_it_is_audited(name):
    model, given = model_and_arguments(name)
    lost, size = (REFUSED | AUDITED).get(name, set()), given.pop("image_size")
    shape = (4, *size) if isinstance(size, tuple) else (4, 3, size, size)
    images = torch.randn(shape).to(memory_format=CHANNELS_LAST_BY_DIM[len(shape)])
    given = {"batch": images, **given}
    if report := outcome_of(lambda: convert(model) and audit(model, **given), lost):
        assert {call.name for call in report.of("lost")} == lost
        assert report.totals["kept"] and report.headline() in str(report)
    assert not getattr(model, "_forward_pre_hooks", None)


@pytest.mark.parametrize("name", MODELS)
def test_its_layouts_are_compared(name):
    model, given = model_and_arguments(name)
    agree = {"view": False}.get(name, REFUSED.get(name, True))
    state = {} if isinstance(agree, str) else model.state_dict()
    before = {key: value.clone() for key, value in state.items()}
    if report := outcome_of(lambda: check_parity(model, **given), agree):
        assert report.passed is agree, str(report)
        assert bool(report.first_divergence) is not agree
    for key, value in before.items():
        assert torch.equal(model.state_dict()[key], value), key


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_it_is_timed_and_trained(name, train, monkeypatch):
    model, given = model_and_arguments(name)
    timed, refused = (REFUSED | TIMED).get(name), (REFUSED | CANNOT_TRAIN).get(name)
    quick = {"batch_size": 2, "precision": "fp32", "time_limit_s": 0.0, "target_ci": 9.0, **given}
    if done := outcome_of(lambda: compare_layouts(model, **quick), timed):
        assert [one.layout for one in done.speeds] == ["contiguous", "channels_last"]
    if timed == "only inference":
        assert compare_layouts(model, **quick, mode="infer").speeds
    size = given["image_size"] if isinstance(given["image_size"], int) else 12
    words = f"""data=synthetic data.root=null data.image_size={size} data.synthetic_images=16
        data.synthetic_classes=4 batch_size=4 max_steps=2 log_to=[] channels_last=true"""
    monkeypatch.setitem(globals(), "chosen", lambda num_classes: MODELS[name]())
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        assert train(f"model={__name__}:chosen", *words.split()).exit_code == 0
    assert torch.is_grad_enabled()


def test_a_view_that_fails_in_channels_last_is_named_with_its_own_remedy_only(
    train, monkeypatch, capsys
):
    monkeypatch.setitem(globals(), "chosen", lambda num_classes: viewing())
    words = f"""model={__name__}:chosen data=synthetic data.root=null data.image_size=16
        data.synthetic_classes=4 batch_size=4 log_to=[] channels_last=true parity=true"""
    with pytest.raises(ConfigError) as refused:
        train(*words.split())
    line = r"tests\S+:\d+ `.*\.view\(.*` needs contiguous memory: use .reshape instead of .view"
    said = f"channels_last fails: {line}; channels_last=false trains"
    assert re.fullmatch(said, str(refused.value))
    assert "both layouts compared" not in capsys.readouterr().out
