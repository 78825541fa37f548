"""The state of a model that trains: memory, buffers, random numbers, what a trial must find before
the first epoch.
"""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from cl_train.errors import ConfigError
from cl_train.step.optim import make_dense
from cl_train.step.precision import EMA, Fp32Weights, resolve_precision
from cl_train.step.train_step import StepSettings, make_step, train_step
from tests.networks import small
from tests.step.test_train_step import make_batch

CPU = torch.device("cpu")
FP32 = resolve_precision("fp32", CPU)


class Then(nn.Module):
    """`network`, then `run` of this module, its images and its logits."""

    def __init__(self, network, run, **parts):
        super().__init__()
        self.network, self.run = network, run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.run(self, x, self.network(x))


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "shape", "part_of"),
    [
        (8, (3, 32), lambda big: big[:, ::2]),
        (3, (16, 3, 3, 24), lambda big: big[..., :8].permute(0, 3, 1, 2)),
    ],
)
def test_a_parameter_with_gaps_is_updated_and_nothing_between(index, shape, part_of):
    model, big = small(3), torch.randn(shape)
    before, plain = big.clone(), copy.deepcopy(model)
    model[index].weight = nn.Parameter(part_of(big))
    plain[index].weight = nn.Parameter(part_of(big).clone())
    for one in (model, plain):
        parts = make_step(one, StepSettings(FP32), CPU, 0.1)
        train_step(parts, [make_batch(parts)])
    assert torch.equal(big, before)
    assert model[index].weight.stride() == plain[index].weight.stride()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_elements_that_share_memory_are_refused_but_ties_stay():
    big, model = torch.randn(3, 32), small(3)
    model.tie = nn.Parameter(model[8].weight.data.t())
    make_dense(model)
    assert model.tie.data_ptr() == model[8].weight.data_ptr()
    for odd in ([torch.zeros(1).expand(2, 3)], [big, big[:, ::2]]):
        model = small(3)
        model.odd = nn.ParameterList(odd)
        with pytest.raises(ConfigError, match=r"odd\.\d: elements that train share memory.*clone"):
            make_step(model, StepSettings(FP32), CPU)


# --- buffers --------------------------------------------------------------------------------------


def test_the_average_has_tied_weights_once_and_follows_all_buffers():
    model = small(3)
    model.tied = model[8]
    model.register_buffer("seen", torch.zeros(2), persistent=False)
    weights, average = Fp32Weights(model, FP32), EMA(model, 0.75)
    before = model[8].weight.detach().clone()
    with torch.no_grad():
        model[8].weight += 4
        model.seen += 4
    average.update(weights.tensors())
    torch.testing.assert_close(average.module[8].weight, before + 1)
    assert average.module.seen.tolist() == [1, 1]


def drawing(num_classes):
    """Draws numbers of every generator, and counts in buffers that a state dict leaves out."""

    def run(module, images, logits):
        if module.training:
            module.count += images.mean()
            module.late = logits.detach().mean(0) if module.late is None else module.late * 0.9
            noise = random.random() + np.random.rand() + torch.rand(()) + random.gauss(0, 1)
            logits = logits * noise
        return logits + module.count + module.late

    model = Then(small(num_classes), run)
    model.register_buffer("count", torch.zeros(()), persistent=False)
    model.register_buffer("late", None, persistent=False)
    return model


def test_a_resumed_run_draws_the_next_numbers_and_has_every_buffer(train, tmp_path):
    words = (f"model={__name__}:drawing", "ema_decay=0.5")
    whole = train(*words)
    train(*words, "max_steps=4", folder=tmp_path / "parts")
    resumed = train(*words, "resume=auto", folder=tmp_path / "parts")
    assert resumed.losses == whole.losses
    for kind in ("val", "val_average"):
        numbers = [[r["loss"] for r in run.records(kind)] for run in (resumed, whole)]
        assert numbers[0] == numbers[1]
    saved = [run.checkpoint() for run in (resumed, whole)]
    assert saved[0]["buffers"]["model"]["count"] != 0
    for entry in ("model", "average", "buffers"):
        torch.testing.assert_close(*(content[entry] for content in saved), rtol=0, atol=0)
    evaluated = train(*words, "evaluate_only=true", f"resume={whole.folder}", folder=tmp_path / "e")
    assert evaluated.records("val")[0]["loss"] == whole.records("val")[-1]["loss"]


# --- what the trial finds -------------------------------------------------------------------------


class Uncopyable(nn.Identity):
    def __deepcopy__(self, memo):
        raise TypeError("cannot pickle a lock")


def uncopyable(num_classes):
    return nn.Sequential(small(num_classes), Uncopyable())


def half_layer(num_classes):
    layer = nn.Linear(num_classes, num_classes).half()
    return Then(small(num_classes), lambda m, x, y: m.last(y.half()).float(), last=layer)


def fewer_in_eval(num_classes):
    return Then(small(num_classes), lambda m, x, y: y if m.training else y[:, 1:])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("build", "word", "said"),
    [
        (half_layer, "ema_decay=0.9", r"the average of the model cannot be evaluated.*ema_decay=0"),
        (half_layer, "ema_decay=0", None),
        (fewer_in_eval, "evaluate_every=-1", None),
        (fewer_in_eval, "ema_decay=0", r"the model cannot be evaluated on 32 px.*3 classes"),
        (uncopyable, "ema_decay=0.9", r"cannot be copied for its average.*lock.*ema_decay=0"),
        (uncopyable, "ema_decay=0", None),
    ],
)
def test_what_would_fail_later_is_found_before_the_first_step(
    build, word, said, train, tmp_path, monkeypatch
):
    monkeypatch.setitem(globals(), "chosen", build)
    words = (f"model={__name__}:chosen", "max_steps=1", word)
    if said is None:
        assert train(*words).exit_code == 0
        return
    with pytest.raises(ConfigError, match=said):
        train(*words, folder=tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()
