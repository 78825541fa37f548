"""What a checkpoint of a run contains, and what it is restored into."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cl_train.config.schema import ConfigError
from cl_train.step.precision import BY_NAME, EMA, Fp32Weights, cast_model
from cl_train.system.checkpoints import CheckpointError, load, snapshot, write
from cl_train.training.state import TrainState, check_compatible, collect, restore
from tests.train_states import train_state


def build(channels_last: bool = False, optimizer: str = "sgd", half: bool = False, classes: int = 5) -> TrainState:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, classes)
    )
    precision = BY_NAME["fp16_o2" if half else "fp32"]
    cast_model(model, precision)
    if channels_last:
        model.to(memory_format=torch.channels_last)
    weights = Fp32Weights(model, precision)
    parameters = weights.trainable().values()
    sgd, adamw = torch.optim.SGD, torch.optim.AdamW
    built = sgd(parameters, 0.1, 0.9, fused=True) if optimizer == "sgd" else adamw(parameters, 0.01, fused=True)
    return train_state(model, built, torch.amp.GradScaler("cpu", enabled=half), weights)


def saved(path: Path, state: TrainState, steps: int = 2) -> dict[str, Any]:
    for step in range(steps):
        images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        state.model(images).square().mean().backward()
        state.parts.optimizer.step()
        state.parts.optimizer.zero_grad()
    write(path, snapshot(collect(state, {"step": steps}, {})))
    return load(path)


def moments(state: TrainState) -> dict[str, dict[str, torch.Tensor]]:
    return {name: state.parts.optimizer.state[weight] for name, weight in state.parts.weights.trainable().items()}


def assert_equal(ours: TrainState, theirs: TrainState) -> None:
    for name, tensor in ours.model.state_dict().items():
        assert torch.equal(tensor, theirs.model.state_dict()[name]), name
    for name, values in moments(ours).items():
        for key, value in values.items():
            assert torch.equal(value, moments(theirs)[name][key]), (name, key)


@pytest.mark.parametrize("to_channels_last", [True, False])
def test_the_models_layout_wins_for_weights_and_moments(tmp_path: Path, to_channels_last: bool) -> None:
    state, other = build(not to_channels_last, "adamw"), build(to_channels_last, "adamw")
    saved(tmp_path / "b.pt", other, steps=1)  # what it has must be overwritten altogether
    content = saved(tmp_path / "a.pt", state)
    assert content["optimizer"]["state"].keys() == dict(state.model.named_parameters()).keys()
    restore(content, other)
    assert_equal(state, other)
    expected = (27, 1, 9, 3) if to_channels_last else (27, 9, 3, 1)
    assert other.model[0].weight.stride() == moments(other)["0.weight"]["exp_avg"].stride() == expected


def test_hyperparameters_and_parameter_groups_stay_the_runs_own(tmp_path: Path) -> None:
    state, other = build(), build()
    content = saved(tmp_path / "a.pt", state)
    plain = torch.optim.SGD(other.model.parameters(), lr=0.5, momentum=0.8, foreach=True)
    restore(content, train_state(other.model, plain, other.parts.scaler))
    assert [plain.param_groups[0][key] for key in ("lr", "momentum", "fused", "foreach")] == [0.5, 0.8, None, True]
    by_name = dict(other.model.named_parameters())
    groups = [
        {"params": [value for name, value in by_name.items() if name.endswith(end)], "weight_decay": decay}
        for end, decay in (("weight", 0.1), ("bias", 0.0))
    ]
    sgd = torch.optim.SGD(groups, lr=0.1, momentum=0.9, fused=True)
    regrouped = train_state(other.model, sgd, other.parts.scaler)
    restore(content, regrouped)
    assert_equal(state, regrouped)


def test_fp32_to_master_weights_and_an_average_and_back_keeps_fp32_values(tmp_path: Path) -> None:
    state, half, back = build(), build(True, half=True), build()
    average = EMA(half.model, 0.9)
    restore(saved(tmp_path / "a.pt", state), replace(half, average=average))
    assert torch.equal(average.module[0].weight.float(), state.model[0].weight), "it starts from the weights"
    assert average.module[0].weight.stride() == (27, 1, 9, 3)
    assert torch.equal(half.model[0].weight, state.model[0].weight.half())
    assert torch.equal(half.parts.weights.trainable()["0.weight"], state.model[0].weight)
    assert half.parts.scaler.get_scale() == 65536.0  # the checkpoint had none
    restore(saved(tmp_path / "b.pt", half, steps=0), back)
    assert_equal(state, back)


FACTS: dict[str, Any] = {
    "model": "resnet18", "num_classes": 2, "classes": ["a", "b"], "data_fingerprint": "f1", "global_batch_size": 64,
    "precision": "fp32", "memory_format": "contiguous", "world_size": 1, "versions": {"torch": "2.15"},
    "config": {"optim": {"lr": 0.1}, "resume": None},
}  # fmt: skip


def test_another_run_is_refused_with_what_differs_and_other_settings_are_noted(tmp_path: Path) -> None:
    for change, message in (
        ({"model": "resnet50"}, "model was 'resnet18', now 'resnet50'"),
        ({"num_classes": 3, "classes": ["a", "b", "c"]}, r"num_classes was 2, now 3[\s\S]*\['c'\]"),
        ({"classes": ["b", "a"]}, "another order"),
        ({"data_fingerprint": "f2"}, "data_fingerprint"),
        ({"global_batch_size": 32}, "global_batch_size was 64, now 32"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_compatible(FACTS, FACTS | change)
    assert check_compatible(FACTS, FACTS) == []
    change = {"memory_format": "channels_last", "world_size": 2, "config": {"optim": {"lr": 0.2}, "resume": "auto"}}
    assert check_compatible(FACTS, FACTS | change) == [
        "memory_format was 'contiguous', now 'channels_last'",
        "world_size was 1, now 2",
        "optim.lr was 0.1, now 0.2",
    ]
    content = saved(tmp_path / "a.pt", build())
    for other, problem in (
        (build(optimizer="adamw"), "written by SGD, this run uses AdamW"),
        (build(classes=7), "do not fit the model"),
    ):
        with pytest.raises(CheckpointError, match=problem):
            restore(content, other)
