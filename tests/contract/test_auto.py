"""`channels_last=auto` trains in the layout that it finds faster, timed with the run's own step."""

import re
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn

from cl_train.errors import ConfigError
from cl_train.measure import auto, paired, parity_gate, timed_step
from cl_train.memory_format.convert import Layout
from cl_train.memory_format.layout import classify
from cl_train.step.train_step import make_step
from cl_train.system.run_folder import read_run
from cl_train.training import build, layout_choice

slow_layout = ""
seen = []


class Watched(nn.Conv2d):
    """Notes the layouts of its images."""

    def forward(self, images):
        if not images.is_meta:  # of shapes alone, for FLOPs
            seen.append(classify(images))
        return super().forward(images)


def watched(num_classes):
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))
    return nn.Sequential(Watched(3, 8, 3), nn.BatchNorm2d(8), *head)


def planted_times_s(step, steps, device):
    """Runs the steps; those whose images had the slow layout took three times as long."""
    times_s = []
    for _ in range(steps):
        step()
        times_s.append(0.03 if seen[-1] == slow_layout else 0.01)
    return times_s


WORDS = (f"model={__name__}:watched", "channels_last=auto", "epochs=1", "evaluate_every=-1")


@pytest.mark.parametrize(
    ("faster", "slower"), [("channels_last", "contiguous"), ("contiguous", "channels_last")]
)
def test_the_run_trains_in_the_faster_layout(faster, slower, train, quick_auto, monkeypatch):
    monkeypatch.setattr(paired, "TakenTime", Mock(return_value=Mock(seconds=lambda: 0.0)))
    monkeypatch.setattr(timed_step, "step_times_s", planted_times_s)
    monkeypatch.setitem(globals(), "slow_layout", slower)
    seen.clear()
    done = train(*WORDS)
    assert set(seen) == {"channels_last", "contiguous"}, "both were measured"
    assert done.summary["memory_format"] == faster
    assert seen[-done.summary["steps"] :] == [faster] * done.summary["steps"], "the run's batches"


def test_the_step_that_is_timed_is_the_step_that_trains(train, quick_auto, monkeypatch):
    made = {"timed": [], "trained": []}

    def recorded(user):
        def make(model, settings, *args, **options):
            parts = make_step(model, settings, *args, **options)
            optimizer = parts.optimizer
            made[user].append((settings, type(optimizer).__name__, len(optimizer.param_groups)))
            return parts

        return make

    monkeypatch.setattr(timed_step, "make_step", recorded("timed"))
    monkeypatch.setattr(build, "make_step", recorded("trained"))
    words = "optim=adamw optim.clip_norm=1 optim.layer_decay=0.5 accumulate_steps=2 batch_size=4"
    words += " ema_decay=0.9 ema_every=2 loss=bce augment.mixup=0.2 precision=bf16"
    train(*WORDS, *words.split())

    assert set(made["timed"]) == set(made["trained"]), "the trial step, too"
    settings, optimizer, groups = made["timed"][0]
    assert (optimizer, settings.accumulate_steps, settings.ema_every) == ("AdamW", 2, 2)
    assert (settings.mixup, settings.loss.name, settings.optim.clip_norm) == (0.2, "bce", 1.0)
    assert groups > 1 and settings.precision.name == "bf16"


def test_an_evaluation_alone_is_timed_as_one_and_in_its_conversion(train, monkeypatch, capsys):
    timed = []

    def chosen(model, workload, candidate, parity):
        timed.append((workload.mode, workload.input_shape, workload.settings.compile, candidate))
        return auto.Choice(candidate, "planted", 0.0, verdict="slower")

    monkeypatch.setattr(layout_choice, "choose_layout", chosen)
    monkeypatch.setattr(torch, "compile", Mock(side_effect=lambda model, **_: model))
    run = train(WORDS[0], "max_steps=1")
    words = [*WORDS[:2], "evaluate_only=true", f"weights={run.folder}", "data.val_size=48"]
    summary = train(*words, "compile=true", "conversion=conv").summary
    assert timed == [("infer", (3, 48, 48), False, Layout(torch.channels_last, "conv"))]
    assert summary["memory_format"] == "channels_last"
    tuned = train(WORDS[0], "max_steps=1", "channels_last=auto")
    assert len(timed) == 2
    again = train(WORDS[0], "evaluate_only=true", f"resume={tuned.folder}").summary
    assert again["memory_format"] == "channels_last" and len(timed) == 2, "that of its training"
    audited = re.findall(
        "why channels_last is slower: (cl-train audit model=.*)", capsys.readouterr().out
    )
    assert len(audited) == 2 and "batch_size=" in audited[0] and "conversion=conv" in audited[0]


class Wrong(nn.Module):
    """Computes something else in channels_last."""

    def forward(self, images):
        return images if images.is_contiguous() else 1.1 * images


def wrong(num_classes):
    return nn.Sequential(Wrong(), *watched(num_classes))


WRONG = (f"model={__name__}:wrong", "epochs=1", "evaluate_every=-1")


@pytest.fixture
def no_results_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_no_run_trains_in_a_layout_that_computes_something_else(train, no_results_kept, capsys):
    with pytest.raises(ConfigError, match=r"code \(forward\) of 0 \(Wrong\).*parity=false"):
        train(*WRONG, "channels_last=true")
    assert "both layouts compared" in capsys.readouterr().out
    unchecked = train(*WRONG, "channels_last=true", "parity=false")
    assert unchecked.summary["parity"] == "off"
    assert unchecked.summary["memory_format"] == "channels_last"
    assert train(*WRONG, "channels_last=false").summary["parity"] is None
    [problem] = read_run(unchecked.folder).problems
    assert "parity: off" in problem


def test_auto_does_not_choose_what_computes_something_else(train, no_results_kept, quick_auto):
    with patch.object(auto, "verdict_of", lambda ratio, **_: "faster"):
        for _ in range(2):  # the second time the choice is kept, and its parity
            done = train(*WRONG, "channels_last=auto")
            assert done.summary["memory_format"] == "contiguous"
            assert "of 0 (Wrong)" in (done.folder / "train.log").read_text()


def test_the_second_run_does_not_compare_again(train, no_results_kept, monkeypatch):
    compared = Mock(side_effect=parity_gate.parity_of)
    monkeypatch.setattr(parity_gate, "parity_of", compared)
    words = (f"model={__name__}:watched", "channels_last=true", "max_steps=1", "evaluate_every=-1")
    for word, count in (("seed=0", 1), ("seed=1", 1), ("batch_size=3", 2), ("parity=true", 3)):
        assert train(*words, word).summary["parity"] == "passed"
        assert compared.call_count == count
    images = [call.args[1].batch_size for call in compared.call_args_list]
    assert images == [4, 3, 4], "an odd batch is compared with an odd one"
