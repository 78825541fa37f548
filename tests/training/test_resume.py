"""What a checkpoint of a run contains, and what it is restored into."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from cl_train.config.command_line import check_command_line
from cl_train.errors import ConfigError
from cl_train.step.precision import EMA
from cl_train.system.checkpoints import CheckpointError, load, snapshot, write
from cl_train.training.checkpointing import check_compatible, collect, restore
from tests.networks import small, versioned
from tests.step.test_train_step import make_batch, make_parts, state_of


def build(channels_last=False, precision="fp32", **words):
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return state_of(make_parts(precision, layout=layout, **words))


def with_average(state, average=None):
    average = average or EMA(state.model, 0.9)
    return replace(state, parts=replace(state.parts, average=average))


def saved(path, state, steps=2):
    for seed in range(steps):
        state.train_step([make_batch(state.parts, seed=seed)])
    write(path, snapshot(collect(state, {"step": steps}, {})))
    return load(path)


def moments(state):
    named = state.parts.weights.trainable().items()
    return {name: dict(state.parts.optimizer.state[weight]) for name, weight in named}


def assert_equal(ours, theirs):
    both = [[dict(state.model.state_dict()), moments(state)] for state in (ours, theirs)]
    torch.testing.assert_close(*both, rtol=0, atol=0, check_stride=False)


@pytest.mark.parametrize("to_channels_last", [True, False])
def test_the_models_layout_wins_for_weights_and_moments(tmp_path, to_channels_last):
    state = build(not to_channels_last, optimizer="adamw")
    other = build(to_channels_last, optimizer="adamw")
    saved(tmp_path / "b.pt", other, steps=1)  # what it has must be overwritten altogether
    content = saved(tmp_path / "a.pt", state)
    assert content["optimizer"]["state"].keys() == dict(state.model.named_parameters()).keys()
    restore(content, other)
    assert_equal(state, other)
    expected = (72, 1, 24, 8) if to_channels_last else (72, 9, 3, 1)
    average = moments(other)["3.weight"]["exp_avg"]
    assert other.model[3].weight.stride() == average.stride() == expected


def test_hyperparameters_and_parameter_groups_stay_the_runs_own(tmp_path):
    state, other = build(), build()
    named = dict(other.model.named_parameters())
    weights = [named[name] for name in named if name.endswith("weight")]
    biases = [named[name] for name in named if name.endswith("bias")]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    sgd = torch.optim.SGD(groups, lr=0.5, momentum=0.8, foreach=True)
    regrouped = state_of(replace(other.parts, optimizer=sgd))
    restore(saved(tmp_path / "a.pt", state), regrouped)
    assert_equal(state, regrouped)
    for group, decay in zip(sgd.param_groups, (0.1, 0.0), strict=True):
        found = [group[key] for key in ("lr", "momentum", "fused", "foreach", "weight_decay")]
        assert found == [0.5, 0.8, None, True, decay]


def test_fp32_to_fp16_o2_and_an_average_and_back_keeps_fp32_values(tmp_path):
    state, half, back = build(), build(True, "fp16_o2"), build()
    average = EMA(half.model, 0.9)
    restore(saved(tmp_path / "a.pt", state), with_average(half, average))
    weight = state.model[3].weight
    assert torch.equal(average.module[3].weight, weight), "it starts from the weights"
    assert average.module[3].weight.stride() == (72, 1, 24, 8)
    assert torch.equal(half.model[3].weight, weight.half())
    assert torch.equal(half.parts.weights.trainable()["3.weight"], weight)
    assert half.parts.scaler.get_scale() == 1024.0  # the checkpoint had none
    restore(saved(tmp_path / "b.pt", half, steps=0), back)
    assert_equal(state, back)


def test_versions_of_modules_stay(tmp_path):
    state, other = (with_average(build(model=versioned(3))) for _ in range(2))
    content = saved(tmp_path / "a.pt", state)
    for entry in ("model", "average"):
        versioned(3).load_state_dict(content[entry])
    restore(content, other)
    assert_equal(state, other)


FACTS = {
    "model": "resnet18", "num_classes": 2, "classes": ["a", "b"], "data_fingerprint": "f1",
    "global_batch_size": 64,
    "precision": "fp32", "memory_format": "contiguous", "world_size": 1,
    "versions": {"torch": "2.15"},
    "config": {"optim": {"lr": 0.1}, "resume": None},
}  # fmt: skip


def test_another_run_is_refused_with_what_differs_and_other_settings_are_noted(tmp_path):
    for change, message in (
        ({"model": "resnet50"}, "model: resnet18 -> resnet50"),
        ({"num_classes": 3, "classes": ["a", "b", "c"]}, r"num_classes: 2 -> 3\n.*classes: c\n"),
        ({"classes": ["b", "a"]}, "another order"),
        ({"data_fingerprint": "f2"}, "^resume: other images: .*"),
        ({"global_batch_size": 32}, "global_batch_size: 64 -> 32"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_compatible(FACTS, FACTS | change)
    assert check_compatible(FACTS, FACTS) == {}
    change = {"memory_format": "channels_last", "world_size": 2}
    change["config"] = {"optim": {"lr": 0.2}, "resume": "auto"}
    assert list(check_compatible(FACTS, FACTS | change).values()) == [
        "memory_format: contiguous -> channels_last",
        "world_size: 1 -> 2",
        "optim.lr: 0.1 -> 0.2",
    ]
    content = saved(tmp_path / "a.pt", build())
    deeper = nn.Sequential(*small(3), nn.Linear(3, 3))
    for other, problem in (
        (build(optimizer="adamw"), "written by SGD, this run uses AdamW"),
        (build(model=deeper), r"missing \['9.weight', '9.bias'\]"),
    ):
        with pytest.raises(CheckpointError, match=problem):
            restore(content, other)


def test_the_refusal_names_the_command_that_continues_the_run(train, tiny):
    done = train("max_steps=1")
    with pytest.raises(ConfigError, match=r"global_batch_size: \d+ -> 2\n") as refused:
        train(f"resume={done.folder}", "batch_size=2")
    command = re.search(r"config=.*(?= continues)", str(refused.value)).group()
    (cfg,) = check_command_line(command.split())
    assert cfg.batch_size == tiny().batch_size and cfg.resume == str(done.folder)


def test_the_best_score_of_an_older_version_is_read(train):
    done = train("max_steps=3")
    content = done.checkpoint()
    del content["progress"]["best_score"]
    content["progress"]["best_top1"] = 200.0  # its name before 0.3
    torch.save(content, done.folder / "checkpoints" / "step-00000003.pt")
    resumed = train("resume=auto", folder=done.folder)
    assert resumed.checkpoint()["progress"]["best_score"] == 200
    assert resumed.checkpoint("best.pt")["progress"]["step"] == 3, "no evaluation was better"


def test_a_resume_past_the_end_trains_and_evaluates_nothing(train):
    done = train("checkpoint.every_steps=5", "checkpoint.keep=4")
    source = f"resume={done.folder}/checkpoints/step-00000005.pt"
    for end in ("epochs=1", "max_steps=4"):
        past = train(source, end)
        assert f"already past {end} (epoch 1, step 5): nothing is trained\n" in past.log
        assert "nothing trained now; completed after 5 steps." in past.log
        assert not past.records("val") and past.saved_step("step-00000005.pt") == 5
