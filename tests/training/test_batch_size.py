"""`batch_size=auto`: the search against made-up machines, and the real one on a small network."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from cl_train.config.schema import Config, ConfigError
from cl_train.config.validation import load
from cl_train.system.distributed import Dist
from cl_train.training import batch_size
from cl_train.training.batch_size import BatchSpeed, resolve_batch_size, search, smallest_of_the_fastest
from tests.conftest import Run

ALONE = Dist(0, 1, torch.device("cpu"))


class Machine:
    """1 GiB of weights, 1/16 GiB per image; speed grows to 1000 images/s; memory beyond `dies_at_gib` is an error."""

    def __init__(self, dies_at_gib: float = 1e9, half_speed_at: float = 16.0, step_s: float = 1.0) -> None:
        self.dies_at_gib = dies_at_gib
        self.half_speed_at = half_speed_at
        self.step_s = step_s
        self.asked: list[int] = []
        self.now = 0.0

    def __call__(self, size: int) -> BatchSpeed:
        self.asked.append(size)
        self.now += self.step_s * size
        peak = 1 + size / 16
        if peak > self.dies_at_gib:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return BatchSpeed(size, 1000 * size / (size + self.half_speed_at), peak)

    def search(self, limit_gib: float = 1e6, largest: int = 4096, time_limit_s: float = 1e9) -> list[BatchSpeed]:
        return search(self, largest=largest, limit_gib=limit_gib, time_limit_s=time_limit_s, clock=lambda: self.now)


def test_doubles_while_it_fits_and_never_tries_what_cannot_fit() -> None:
    """10.5 GiB hold 152 images: 128 fits, 256 is not tried."""
    machine = Machine()
    measured = machine.search(limit_gib=10.5)
    assert machine.asked == [item.batch_size for item in measured] == [8, 16, 32, 64, 128]


def test_memory_that_runs_out_unforeseen_ends_the_search() -> None:
    machine = Machine(dies_at_gib=3.5)
    measured = machine.search()
    assert machine.asked == [8, 16, 32, 64] and measured[-1].batch_size == 32


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    def broken(size: int) -> BatchSpeed:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        search(broken, largest=64, limit_gib=1.0, time_limit_s=1.0)


def test_the_smallest_of_equally_fast_sizes_is_chosen() -> None:
    """Speed half-way at 1 image: 64 images reach 98.5 % of the best, 32 only 97 %."""
    assert smallest_of_the_fastest(Machine(half_speed_at=1.0).search(largest=4096)) == 64
    assert smallest_of_the_fastest(Machine(half_speed_at=1000.0).search(largest=4096)) == 4096


def test_small_memory_goes_below_the_first_size_and_ends_with_a_reason() -> None:
    machine = Machine()
    assert machine.search(limit_gib=1.3)[-1].batch_size == 4
    assert machine.asked == [8, 4]
    with pytest.raises(ConfigError, match=r"not even 2 images fit into 1\.10 GiB"):
        Machine().search(limit_gib=1.1)


def test_no_more_than_the_images_there_are() -> None:
    machine = Machine()
    assert machine.search(largest=100)[-1].batch_size == 100 and machine.asked == [8, 16, 32, 64, 100]
    assert [item.batch_size for item in Machine().search(largest=5)] == [5]


def test_time_ends_the_search_before_it_is_spent() -> None:
    machine = Machine(step_s=1.0)
    machine.search(time_limit_s=100)
    assert machine.now <= 100 and machine.asked == [8, 16, 32]


@pytest.mark.slow
def test_the_real_search_keeps_within_the_memory_it_is_given(
    tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An injected limit: what is measured for the chosen size stays below it, and the generators stay as they were."""
    monkeypatch.setattr(batch_size, "STEPS", 1)
    monkeypatch.setattr(batch_size, "TIME_LIMIT_S", {"cpu": 1e6})
    cfg = tiny("batch_size=auto", "channels_last=auto", "precision=bf16", "augment.repeats=2")
    asked: list[list[BatchSpeed]] = []
    original = batch_size.search
    monkeypatch.setattr(batch_size, "search", lambda *a, **k: asked.append(original(*a, **k)) or asked[-1])
    state = torch.get_rng_state()
    free = resolve_batch_size(cfg, ALONE)
    limit_gib = asked[0][2].peak_memory_gib  # of 32 images
    monkeypatch.setattr(batch_size, "available_bytes", lambda device: int(limit_gib * 2**30))
    bounded = resolve_batch_size(cfg, ALONE)
    assert torch.equal(torch.get_rng_state(), state)
    assert asked[0][-1].batch_size == 96, "there are 96 training images"
    peaks = [item.peak_memory_gib for item in asked[0]]
    assert peaks == sorted(peaks) and peaks[-1] > 2 * peaks[0]
    assert 8 <= bounded.batch_size < 32 and asked[1][-1].peak_memory_gib <= 0.9 * limit_gib
    assert free.batch_size in [item.batch_size for item in asked[0]]
    assert replace(free, batch_size=0) == cfg, "nothing else of the settings changes"


def test_a_number_is_left_alone(tiny: Callable[..., Config]) -> None:
    cfg = tiny("batch_size=24")
    assert resolve_batch_size(cfg, ALONE) is cfg


@pytest.mark.slow
def test_a_run_with_auto_trains_and_writes_the_number_down(
    train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_size, "STEPS", 1)
    monkeypatch.setattr(batch_size, "LARGEST", {"cpu": 16})
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    build, cublas = batch_size.build_model, []

    def look(*arguments: Any, **words: Any) -> Any:
        cublas.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
        return build(*arguments, **words)

    monkeypatch.setattr(batch_size, "build_model", look)
    done = train("batch_size=auto", "epochs=1", "optim.reference_batch_size=32", "deterministic=true")
    assert cublas == [":4096:8"], "cuBLAS reads it at its first product, which the measurement calls"
    chosen = done.summary["global_batch_size"]
    assert chosen in (8, 16)
    assert f"batch_size: {chosen}\n" in (done.folder / "config.yaml").read_text()
    assert done.records("train")[0]["lr"] == pytest.approx(0.4 * chosen / 32)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"batch_size": "all"}, "batch_size=all: expected whole number >= 1 or auto"),
        ({"batch_size": 0}, "batch_size=0: expected whole number >= 1"),
        ({"batch_size": "auto", "resume": "auto"}, "batch_size=auto with resume"),
        ({"epochs": "auto"}, "epochs=auto: expected whole number >= 1$"),
    ],
)
def test_wrong_values_are_refused(words: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(words)
