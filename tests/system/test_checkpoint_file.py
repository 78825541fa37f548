"""Checkpoint files and what is in them, without kills (those are in tests/faults)."""

import errno
import logging
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cl_train.config.schema import ConfigError
from cl_train.step.ema import WeightAverage
from cl_train.step.precision import MasterWeights, Precision, cast_model, trainable_parameters
from cl_train.system import checkpoint_file as checkpoint
from cl_train.system.checkpoint_file import CheckpointError, CheckpointStore, load, load_for_resume, save
from cl_train.training.run_state import (
    check_compatible,
    collect,
    copy_statistics,
    random_state,
    restore,
    restore_random_state,
    restore_statistics,
    tensor_bytes,
)

CPU = torch.device("cpu")


def small_state(value: float = 1.0) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((64, 3, 3, 3), float(value))},
        "progress": {"step": 3, "epoch": 0},
        "classes": ["a", "b"],
    }


def test_round_trip_keeps_values_and_plain_types(tmp_path: Path) -> None:
    state = {
        "t": torch.arange(6.0).reshape(2, 3),
        "n": None,
        "b": True,
        "f": 1.5,
        "s": "ü",
        "l": [1, {"x": b"y"}],
        3: "int key",
    }
    save(tmp_path / "a.pt", state)
    loaded = load(tmp_path / "a.pt")
    assert torch.equal(loaded.pop("t"), state.pop("t"))
    assert {key: loaded[key] for key in state} == state
    assert os.listdir(tmp_path) == ["a.pt"]


def test_torch_load_and_zipfile_read_the_file_without_this_package(tmp_path: Path) -> None:
    save(tmp_path / "a.pt", small_state())
    assert torch.equal(torch.load(tmp_path / "a.pt", weights_only=True)["model"]["w"], torch.ones(64, 3, 3, 3))
    assert zipfile.ZipFile(tmp_path / "a.pt").testzip() is None


def test_channels_last_tensors_are_stored_contiguous_also_ambiguous_ones(tmp_path: Path) -> None:
    weight = torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last)
    pointwise = torch.randn(8, 4, 1, 1).to(memory_format=torch.channels_last)
    assert pointwise.stride() != (4, 1, 1, 1)
    save(tmp_path / "a.pt", {"w": weight, "p": pointwise})
    loaded = load(tmp_path / "a.pt")
    assert loaded["w"].stride() == (36, 9, 3, 1) and torch.equal(loaded["w"], weight)
    assert loaded["p"].stride() == (4, 1, 1, 1) and torch.equal(loaded["p"], pointwise)


def test_both_layouts_give_the_same_bytes(tmp_path: Path) -> None:
    weight = torch.randn(8, 4, 3, 3)
    save(tmp_path / "a.pt", {"w": weight})
    save(tmp_path / "b.pt", {"w": weight.to(memory_format=torch.channels_last)})
    assert load(tmp_path / "a.pt").keys() == load(tmp_path / "b.pt").keys()
    contents = []
    for name in ("a.pt", "b.pt"):
        with zipfile.ZipFile(tmp_path / name) as file:
            contents.append([file.read(member) for member in file.namelist() if "/data/" in member])
    assert contents[0] == contents[1]


@pytest.mark.parametrize("value", [{1, 2}, object(), {"a": {1.5: 2}}, torch.nn.ReLU()])
def test_other_types_are_refused_before_anything_is_written(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TypeError, match=r"state\['x'\]"):
        save(tmp_path / "a.pt", {"x": value})
    assert os.listdir(tmp_path) == []


def test_load_names_the_reason(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        load(tmp_path / "none.pt")
    torch.save({"model": {}}, tmp_path / "foreign.pt")
    with pytest.raises(CheckpointError, match=r"SHA-256.*weights="):
        load(tmp_path / "foreign.pt")
    (tmp_path / "empty.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="truncated: 0 bytes"):
        load(tmp_path / "empty.pt")
    with pytest.raises(CheckpointError, match="Is a directory"):
        load(tmp_path)


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "FORMAT_VERSION", 99)
    save(tmp_path / "a.pt", small_state())
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="newer version"):
        load(tmp_path / "a.pt")


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.marker}",))


class EvilEval(Evil):
    def __reduce__(self) -> Any:
        return (eval, (f"open({str(self.marker)!r}, 'w')",))


class EvilGlobal(Evil):
    def __reduce__(self) -> Any:
        return (subprocess.Popen, (["touch", str(self.marker)],))


@pytest.mark.parametrize("kind", [Evil, EvilEval, EvilGlobal])
@pytest.mark.parametrize("place", ["top", "nested"])
def test_malicious_checkpoints_are_refused_even_with_a_right_digest(
    tmp_path: Path, kind: type[Evil], place: str
) -> None:
    marker = tmp_path / "marker"
    evil = kind(marker)
    state = {"model": evil} if place == "top" else {"model": {"w": torch.ones(2), "deep": [{"x": (evil,)}]}}
    checkpoint.write(tmp_path / "evil.pt", state)  # write() is what save() calls after its own check of types
    with pytest.raises(CheckpointError, match=r"refused by torch\.load"):
        load(tmp_path / "evil.pt")
    assert not marker.exists()


# --- the store --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
def test_store_keeps_the_last_ones_and_the_best(tmp_path: Path, background: bool) -> None:
    store = CheckpointStore(tmp_path / "c", keep=2, background=background)
    for step in (10, 20, 30, 100):
        store.save(small_state(step), step, best=step == 20)
    store.wait(final=True)
    assert sorted(os.listdir(tmp_path / "c")) == ["best.pt", "step-00000030.pt", "step-00000100.pt"]
    assert load(tmp_path / "c/best.pt")["model"]["w"][0, 0, 0, 0] == 20
    found = store.newest()
    assert found is not None
    path, state, skipped = found
    assert path.name == "step-00000100.pt" and state["model"]["w"].mean() == 100 and skipped == []


def test_the_snapshot_is_taken_before_save_returns(tmp_path: Path) -> None:
    weight = torch.zeros(500, 500)
    store = CheckpointStore(tmp_path, keep=1, background=True)
    store.save({"w": weight}, 1)
    weight.fill_(1.0)
    store.wait()
    assert load(tmp_path / "step-00000001.pt")["w"].sum() == 0


def test_best_twice_at_the_same_step_leaves_no_temporary_file(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1, background=False)
    store.save(small_state(), 1, best=True)
    checkpoint._link(tmp_path / "step-00000001.pt", tmp_path / "best.pt")
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "step-00000001.pt"]


def test_best_is_a_copy_where_hard_links_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    store = CheckpointStore(tmp_path, keep=1, background=False)
    store.save(small_state(5), 1, best=True)
    assert load(tmp_path / "best.pt")["model"]["w"].mean() == 5
    assert os.stat(tmp_path / "best.pt").st_nlink == 1


def test_newest_skips_damaged_files_names_them_and_puts_them_aside_at_the_next_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, keep=3, background=False)
    for step in (1, 2, 3):
        store.save(small_state(step), step)
    (tmp_path / "step-00000003.pt").write_bytes((tmp_path / "step-00000003.pt").read_bytes()[:-1])
    (tmp_path / "step-00000002.pt").write_bytes(b"")
    found = store.newest()
    assert found is not None
    path, state, skipped = found
    assert path.name == "step-00000001.pt" and state["model"]["w"].mean() == 1
    assert ["step-00000003.pt" in skipped[0], "step-00000002.pt" in skipped[1]] == [True, True]
    with caplog.at_level(logging.WARNING):
        store.save(small_state(9), 2)
    assert "superseded" in caplog.text
    found = store.newest()
    assert found is not None and found[0].name == "step-00000002.pt" and found[2] == []


def test_newest_of_nothing_and_of_ruins(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "c", keep=1, background=False)
    assert store.newest() is None
    store.save(small_state(), 1)
    (tmp_path / "c/step-00000001.pt").write_bytes(b"x" * 1000)
    with pytest.raises(CheckpointError, match=r"no checkpoint can be used:\n.*step-00000001"):
        store.newest()


def test_best_is_the_last_resort(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1, background=False)
    store.save(small_state(1), 1, best=True)
    store.save(small_state(2), 2)
    (tmp_path / "step-00000002.pt").write_bytes(b"")
    found = store.newest()
    assert found is not None and found[0].name == "best.pt" and len(found[2]) == 1


def test_leftovers_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".step-00000001.pt.tmp-77").write_bytes(b"half")
    (tmp_path / "mine.txt").write_text("kept")
    CheckpointStore(tmp_path, keep=1, background=False).save(small_state(), 2)
    assert sorted(os.listdir(tmp_path)) == ["mine.txt", "step-00000002.pt"]


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_keeps_the_previous_one_and_the_third_failure_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, background: bool
) -> None:
    store = CheckpointStore(tmp_path, keep=2, background=background)
    store.save(small_state(1), 1)
    store.wait()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for step in (2, 3):
            store.save(small_state(step), step)
            store.wait()
        assert os.listdir(tmp_path) == ["step-00000001.pt"]
        assert "No space left" in caplog.text and "training goes on" in caplog.text
    store.save(small_state(4), 4)
    store.wait(final=True)  # space came back: the count starts anew
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"3 checkpoints in a row.*step-00000004"):
        for step in (5, 6, 7):
            store.save(small_state(step), step)
            store.wait()
    monkeypatch.undo()
    found = store.newest()
    assert found is not None and found[0].name == "step-00000004.pt" and found[2] == []


def test_the_final_save_must_succeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    store = CheckpointStore(tmp_path, keep=1, background=False)
    store.save(small_state(), 1)
    with pytest.raises(CheckpointError, match="no earlier one"):
        store.wait(final=True)


def test_resume_targets(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run/checkpoints", keep=1, background=False)
    assert load_for_resume("auto", store) is None
    store.save(small_state(), 4)
    elsewhere = CheckpointStore(tmp_path / "other", keep=1, background=False)
    for target in (tmp_path / "run", tmp_path / "run/checkpoints", tmp_path / "run/checkpoints/step-00000004.pt"):
        found = load_for_resume(str(target), elsewhere)
        assert found is not None and found[0].name == "step-00000004.pt"
    with pytest.raises(ConfigError, match="no such file"):
        load_for_resume(str(tmp_path / "nope"), elsewhere)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="has no checkpoint"):
        load_for_resume(str(tmp_path / "empty"), elsewhere)


def test_save_in_a_missing_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        save(tmp_path / "missing/a.pt", small_state())


# --- a run's state ----------------------------------------------------------------------------------------------------


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


def saved(
    path: Path, model: Any, optimizer: Any, scaler: Any, masters: Any = None, average: Any = None
) -> dict[str, Any]:
    state = collect(
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        masters=masters,
        average=average,
        progress={"step": 3},
        facts={},
    )
    save(path, state)
    return load(path)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_restored_run_continues_bit_for_bit(tmp_path: Path, optimizer: str) -> None:
    model, built, scaler, _ = build(True, optimizer)
    steps(model, built, 3)
    state = saved(tmp_path / "a.pt", model, built, scaler)
    steps(model, built, 3, first=3)

    other, other_optimizer, other_scaler, _ = build(True, optimizer)
    steps(other, other_optimizer, 1, first=50)  # must be overwritten altogether
    assert restore(state, model=other, optimizer=other_optimizer, scaler=other_scaler) == {"step": 3}
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
    restore(state, model=other, optimizer=other_optimizer, scaler=other_scaler)
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
    restore(state, model=other, optimizer=plain, scaler=other_scaler)
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
    restore(state, model=other, optimizer=regrouped, scaler=other_scaler)
    for name, parameter in model.named_parameters():
        expected = optimizer.state[parameter]["momentum_buffer"]
        assert torch.equal(regrouped.state[by_name[name]]["momentum_buffer"], expected), name


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    model, optimizer, scaler, _ = build(False, "sgd")
    state = saved(tmp_path / "a.pt", model, optimizer, scaler)
    other, adamw, other_scaler, _ = build(False, "adamw")
    with pytest.raises(CheckpointError, match="written by SGD, this run uses AdamW"):
        restore(state, model=other, optimizer=adamw, scaler=other_scaler)


def test_another_head_is_refused(tmp_path: Path) -> None:
    model, optimizer, scaler, _ = build(False)
    state = saved(tmp_path / "a.pt", model, optimizer, scaler)
    other = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 7))
    with pytest.raises(CheckpointError, match="do not fit the model"):
        restore(state, model=other, optimizer=torch.optim.SGD(other.parameters(), lr=1.0), scaler=scaler)


def test_fp32_to_master_weights_and_back_keeps_fp32_values(tmp_path: Path) -> None:
    model, optimizer, scaler, _ = build(False)
    steps(model, optimizer, 2)
    state = saved(tmp_path / "a.pt", model, optimizer, scaler)
    half, half_optimizer, half_scaler, masters = build(True, half=True)
    restore(state, model=half, optimizer=half_optimizer, scaler=half_scaler, masters=masters)
    assert half[0].weight.dtype == torch.float16
    assert torch.equal(half[0].weight, model[0].weight.half())
    assert torch.equal(masters.masters["0.weight"], model[0].weight)
    assert half_scaler.get_scale() == 65536.0  # the checkpoint had none
    back_state = saved(tmp_path / "b.pt", half, half_optimizer, half_scaler, masters)
    back, back_optimizer, back_scaler, _ = build(False)
    restore(back_state, model=back, optimizer=back_optimizer, scaler=back_scaler)
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
    restore(state, model=model, optimizer=optimizer, scaler=fresh)
    assert fresh.get_scale() == 4.0


def test_moving_average_comes_back_or_starts_from_the_weights(tmp_path: Path) -> None:
    model, optimizer, scaler, _ = build(False)
    average = WeightAverage(model, 0.9)
    steps(model, optimizer, 2)
    average.update(model)
    with_average = saved(tmp_path / "a.pt", model, optimizer, scaler, average=average)
    without = saved(tmp_path / "b.pt", model, optimizer, scaler)
    other, other_optimizer, other_scaler, _ = build(True)
    other_average = WeightAverage(other, 0.9)
    restore(with_average, model=other, optimizer=other_optimizer, scaler=other_scaler, average=other_average)
    for name, tensor in average.module.state_dict().items():
        assert torch.equal(tensor, other_average.module.state_dict()[name]), name
    assert other_average.module[0].weight.stride() == (27, 1, 9, 3)
    restore(without, model=other, optimizer=other_optimizer, scaler=other_scaler, average=other_average)
    assert torch.equal(other_average.module[0].weight, model[0].weight)


def test_random_numbers_continue(tmp_path: Path) -> None:
    torch.manual_seed(5)
    torch.rand(3)
    save(tmp_path / "a.pt", {"rng": [random_state(CPU)]})
    expected = torch.rand(4)
    torch.manual_seed(99)
    restore_random_state(load(tmp_path / "a.pt")["rng"][0], CPU)
    assert torch.equal(torch.rand(4), expected)


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
        ({"classes": ["b", "a"]}, "in another order"),
        ({"data_fingerprint": "f2"}, "other training images"),
        ({"global_batch_size": 32}, "another global batch"),
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
        "setting optim.lr was 0.1, now 0.2",
    ]


def test_a_program_that_ends_by_an_exception_finishes_the_write_first(tmp_path: Path) -> None:
    script = (
        "import sys, torch; from cl_train.system.checkpoint_file import CheckpointStore\n"
        "CheckpointStore(sys.argv[1], 1, True).save({'w': torch.ones(4_000_000)}, 1)\n"
        "raise SystemExit(1)"
    )
    result = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, timeout=60)
    assert result.returncode == 1
    assert load(tmp_path / "step-00000001.pt")["w"].sum() == 4_000_000


def test_statistics_come_back_after_nan_activations() -> None:
    model, _, _, _ = build(True)
    average = WeightAverage(model, 0.9)
    model(torch.randn(4, 3, 8, 8))
    good = copy_statistics(model, average.module)
    expected = [buffer.clone() for buffer in model.buffers()]
    model(torch.full((4, 3, 8, 8), float("nan")))
    average.update(model)
    assert not all(buffer.isfinite().all() for buffer in [*model.buffers(), *average.module.buffers()])
    restore_statistics(good, model, average.module)
    for buffer, value in zip(model.buffers(), expected, strict=True):
        assert torch.equal(buffer, value)
    assert all(buffer.isfinite().all() for buffer in average.module.buffers())


def test_tensor_bytes_count_what_a_checkpoint_takes(tmp_path: Path) -> None:
    state = {"w": torch.zeros(1000), "deep": [{"x": torch.zeros(10, 10, dtype=torch.float16)}], "n": 3}
    assert tensor_bytes(state) == 4200
    save(tmp_path / "a.pt", state)
    assert 4200 < (tmp_path / "a.pt").stat().st_size < 4200 + 4096
