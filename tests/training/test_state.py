"""What a checkpoint of a run contains, and what it is restored into."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cl_train.config.schema import ConfigError
from cl_train.step.precision import EMA, MasterWeights, Precision, cast_model, trainable_parameters
from cl_train.system.checkpoints import CheckpointError, load, snapshot, write
from cl_train.training.state import (
    check_compatible,
    collect,
    restore,
)
from tests.train_states import train_state

CPU = torch.device("cpu")


def build(channels_last: bool, optimizer: str = "sgd", half: bool = False) -> Any:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)
    )
    if half:
        cast_model(model, Precision("fp16_o2", master_weights=True))
    if channels_last:
        model.to(memory_format=torch.channels_last)
    masters = MasterWeights(model) if half else None
    parameters = trainable_parameters(model, masters)
    if optimizer == "sgd":
        built: torch.optim.Optimizer = torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9, fused=True)
    else:
        built = torch.optim.AdamW(parameters.values(), lr=0.01, fused=True)
    return model, built, torch.amp.GradScaler("cpu", enabled=half), masters


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, first: int = 0) -> None:
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(4, 3, 8, 8, generator=generator)
        model(images).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def saved(path: Path, model: Any, optimizer: Any, scaler: Any, masters: Any = None, ema: Any = None) -> dict[str, Any]:
    state = collect(train_state(model, optimizer, scaler, masters, ema), {"step": 3}, {})
    write(path, snapshot(state))
    return load(path)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_restored_run_continues_bit_for_bit(tmp_path: Path, optimizer: str) -> None:
    model, built, scaler, _ = build(True, optimizer)
    steps(model, built, 3)
    state = saved(tmp_path / "a.pt", model, built, scaler)
    steps(model, built, 3, first=3)

    other, other_optimizer, other_scaler, _ = build(True, optimizer)
    steps(other, other_optimizer, 1, first=50)  # must be overwritten altogether
    assert restore(state, train_state(other, other_optimizer, other_scaler)) == {"step": 3}
    steps(other, other_optimizer, 3, first=3)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    ours, theirs = built.state_dict()["state"], other_optimizer.state_dict()["state"]
    assert ours.keys() == theirs.keys() and len(ours) == 6
    for index in ours:
        for key in ours[index]:
            assert torch.equal(ours[index][key], theirs[index][key]), (index, key)


def test_optimizer_moments_are_in_the_checkpoint_and_come_back(tmp_path: Path) -> None:
    model, optimizer, scaler, _ = build(False)
    steps(model, optimizer, 2)
    state = saved(tmp_path / "a.pt", model, optimizer, scaler)
    assert set(state["optimizer"]["state"]) == {name for name, _ in model.named_parameters()}
    assert state["optimizer"]["state"]["0.weight"]["momentum_buffer"].abs().sum() > 0


@pytest.mark.parametrize("to_channels_last", [True, False])
def test_the_model_s_layout_wins_for_weights_and_moments(tmp_path: Path, to_channels_last: bool) -> None:
    model, optimizer, scaler, _ = build(not to_channels_last)
    steps(model, optimizer, 2)
    state = saved(tmp_path / "a.pt", model, optimizer, scaler)
    other, other_optimizer, other_scaler, _ = build(to_channels_last)
    restore(state, train_state(other, other_optimizer, other_scaler))
    weight = other[0].weight
    expected = (27, 1, 9, 3) if to_channels_last else (27, 9, 3, 1)
    assert weight.stride() == expected
    moment = other_optimizer.state[weight]["momentum_buffer"]
    assert moment.stride() == expected
    assert torch.equal(moment, optimizer.state[model[0].weight]["momentum_buffer"])


def test_hyperparameters_stay_the_run_s_own(tmp_path: Path) -> None:
    model, optimizer, scaler, _ = build(False)
    steps(model, optimizer, 1)
    state = saved(tmp_path / "a.pt", model, optimizer, scaler)
    other, _, other_scaler, _ = build(False)
    plain = torch.optim.SGD(other.parameters(), lr=0.5, momentum=0.8, foreach=True)
    restore(state, train_state(other, plain, other_scaler))
    assert [plain.param_groups[0][key] for key in ("lr", "momentum", "fused", "foreach")] == [0.5, 0.8, None, True]


def test_parameter_groups_may_differ(tmp_path: Path) -> None:
    model, optimizer, scaler, _ = build(False)
    steps(model, optimizer, 2)
    state = saved(tmp_path / "a.pt", model, optimizer, scaler)
    other, _, other_scaler, _ = build(False)
    by_name = dict(other.named_parameters())
    groups = [
        {"params": [value for name, value in by_name.items() if name.endswith("weight")], "weight_decay": 0.1},
        {"params": [value for name, value in by_name.items() if name.endswith("bias")], "weight_decay": 0.0},
    ]
    regrouped = torch.optim.SGD(groups, lr=0.1, momentum=0.9, fused=True)
    restore(state, train_state(other, regrouped, other_scaler))
    for name, parameter in model.named_parameters():
        expected = optimizer.state[parameter]["momentum_buffer"]
        assert torch.equal(regrouped.state[by_name[name]]["momentum_buffer"], expected), name


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    model, optimizer, scaler, _ = build(False, "sgd")
    state = saved(tmp_path / "a.pt", model, optimizer, scaler)
    other, adamw, other_scaler, _ = build(False, "adamw")
    with pytest.raises(CheckpointError, match="written by SGD, this run uses AdamW"):
        restore(state, train_state(other, adamw, other_scaler))


def test_another_head_is_refused(tmp_path: Path) -> None:
    model, optimizer, scaler, _ = build(False)
    state = saved(tmp_path / "a.pt", model, optimizer, scaler)
    other = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 7))
    with pytest.raises(CheckpointError, match="do not fit the model"):
        restore(state, train_state(other, torch.optim.SGD(other.parameters(), lr=1.0), scaler))


def test_fp32_to_master_weights_and_back_keeps_fp32_values(tmp_path: Path) -> None:
    model, optimizer, scaler, _ = build(False)
    steps(model, optimizer, 2)
    state = saved(tmp_path / "a.pt", model, optimizer, scaler)
    half, half_optimizer, half_scaler, masters = build(True, half=True)
    restore(state, train_state(half, half_optimizer, half_scaler, masters=masters))
    assert half[0].weight.dtype == torch.float16
    assert torch.equal(half[0].weight, model[0].weight.half())
    assert torch.equal(masters.by_name["0.weight"], model[0].weight)
    assert half_scaler.get_scale() == 65536.0  # the checkpoint had none
    back_state = saved(tmp_path / "b.pt", half, half_optimizer, half_scaler, masters)
    back, back_optimizer, back_scaler, _ = build(False)
    restore(back_state, train_state(back, back_optimizer, back_scaler))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[name]), name
    for ours, theirs in zip(model.parameters(), back.parameters(), strict=True):
        assert torch.equal(optimizer.state[ours]["momentum_buffer"], back_optimizer.state[theirs]["momentum_buffer"])


def test_loss_scale_comes_back(tmp_path: Path) -> None:
    model, optimizer, _, _ = build(False)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    scaler.update(4.0)
    state = saved(tmp_path / "a.pt", model, optimizer, scaler)
    fresh = torch.amp.GradScaler("cpu")
    restore(state, train_state(model, optimizer, fresh))
    assert fresh.get_scale() == 4.0


def test_moving_average_comes_back_or_starts_from_the_weights(tmp_path: Path) -> None:
    model, optimizer, scaler, _ = build(False)
    average = EMA(model, 0.9)
    steps(model, optimizer, 2)
    average.update(model)
    with_average = saved(tmp_path / "a.pt", model, optimizer, scaler, ema=average)
    without = saved(tmp_path / "b.pt", model, optimizer, scaler)
    other, other_optimizer, other_scaler, _ = build(True)
    other_average = EMA(other, 0.9)
    restore(with_average, train_state(other, other_optimizer, other_scaler, ema=other_average))
    for name, tensor in average.module.state_dict().items():
        assert torch.equal(tensor, other_average.module.state_dict()[name]), name
    assert other_average.module[0].weight.stride() == (27, 1, 9, 3)
    restore(without, train_state(other, other_optimizer, other_scaler, ema=other_average))
    assert torch.equal(other_average.module[0].weight, model[0].weight)


FACTS: dict[str, Any] = {
    "model": "resnet18", "num_classes": 2, "classes": ["a", "b"], "data_fingerprint": "f1", "global_batch_size": 64,
    "precision": "fp32", "memory_format": "contiguous", "world_size": 1, "versions": {"torch": "2.15"},
    "config": {"optim": {"lr": 0.1}, "resume": None},
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "resnet50"}, "model was 'resnet18', now 'resnet50'"),
        ({"num_classes": 3, "classes": ["a", "b", "c"]}, r"num_classes was 2, now 3[\s\S]*\['c'\]"),
        ({"classes": ["b", "a"]}, "another order"),
        ({"data_fingerprint": "f2"}, "data_fingerprint"),
        ({"global_batch_size": 32}, "global_batch_size was 64, now 32"),
    ],
)
def test_another_run_s_checkpoint_is_refused_with_the_differing_keys(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_compatible(FACTS, FACTS | change)


def test_layout_precision_world_size_and_settings_may_change_with_a_note() -> None:
    assert check_compatible(FACTS, FACTS) == []
    change = {"memory_format": "channels_last", "world_size": 2, "config": {"optim": {"lr": 0.2}, "resume": "auto"}}
    assert check_compatible(FACTS, FACTS | change) == [
        "memory_format was 'contiguous', now 'channels_last'",
        "world_size was 1, now 2",
        "optim.lr was 0.1, now 0.2",
    ]
