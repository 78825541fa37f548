"""`batch_size=auto`: what is measured, what is chosen, and that it keeps within its memory."""

import os
from dataclasses import replace
from functools import partial
from unittest.mock import Mock, patch

import pytest
import torch

from cl_train.errors import ConfigError
from cl_train.system.distributed import Dist
from cl_train.training import batch_size
from cl_train.training.batch_size import BatchSpeed, resolve_batch_size, search

ALONE = Dist(0, 1, torch.device("cpu"))


def search_for(dies_at=10**6, half_speed_at=16, **changed):
    """The choice, the sizes tried, and those that fit, where the weights take 1 GiB, an image 1/16
    GiB, and the speed grows to 1000 images/s.
    """
    asked = []

    def measure(size):
        asked.append(size)
        if size >= dies_at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return BatchSpeed(size, 1000 * size / (size + half_speed_at), 1 + size / 16)

    limits = {"largest": 4096, "limit_gib": 1e6, "time_limit_s": 1e9} | changed
    with patch.object(batch_size, "perf_counter", lambda: sum(asked)):
        chosen, measured = search(measure, **limits)
    return chosen, asked, [item.batch_size for item in measured]


def test_the_size_doubles_while_it_fits_and_the_smallest_of_the_fastest_is_chosen():
    for limits, asked, fit in (
        ({"limit_gib": 10.5}, [8, 16, 32, 64, 128], 5),  # 152 images fit: 256 is not tried
        ({"dies_at": 40}, [8, 16, 32, 64], 3),  # unforeseen
        ({"largest": 100}, [8, 16, 32, 64, 100], 5),
        ({"largest": 5}, [5], 1),
        ({"time_limit_s": 115}, [8, 16, 32], 3),  # ends before the time is spent: 56 s
    ):
        assert search_for(**limits)[1:] == (asked, asked[:fit])
    assert search_for(limit_gib=1.3)[1:] == ([8, 4], [4])
    # Speed half-way at 1 image: 64 images reach 98.5 % of the best, 32 only 97 %.
    assert search_for(half_speed_at=1)[0] == 64 and search_for(half_speed_at=1000)[0] == 4096
    with pytest.raises(ConfigError, match=r"not even 2 images fit into 1\.10 GiB"):
        search_for(limit_gib=1.1)
    with pytest.raises(RuntimeError, match="shapes"):
        search(Mock(side_effect=RuntimeError("shapes do not match")), 64, 1.0, 1.0)


@pytest.mark.slow
def test_the_search_keeps_within_its_memory(tiny, monkeypatch):
    """An injected limit: what is measured for the chosen size stays below it, and the generators
    stay as they were.
    """
    monkeypatch.setattr(batch_size, "STEPS_PER_SIZE", 1)
    monkeypatch.setattr(batch_size, "SEARCH_LIMIT_S", {"cpu": 1e6})
    cfg = tiny("batch_size=auto", "channels_last=auto", "precision=bf16", "augment.repeats=2")
    results = []
    monkeypatch.setattr(batch_size, "search", lambda *a: results.append(search(*a)) or results[-1])
    state = torch.get_rng_state()
    free = resolve_batch_size(cfg, ALONE)
    limit_gib = results[0][1][2].peak_memory_gib  # of 32 images
    monkeypatch.setattr(batch_size, "available_bytes", lambda device: int(limit_gib * 2**30))
    bounded = resolve_batch_size(cfg, ALONE)
    assert torch.equal(torch.get_rng_state(), state)
    (_, measured), (_, fitting) = results
    assert measured[-1].batch_size == 96, "there are 96 training images"
    peaks = [item.peak_memory_gib for item in measured]
    assert peaks == sorted(peaks) and peaks[-1] > 2 * peaks[0]
    assert 8 <= bounded.batch_size < 32 and fitting[-1].peak_memory_gib <= 0.9 * limit_gib
    assert free.batch_size in [item.batch_size for item in measured]
    assert replace(free, batch_size=0) == cfg, "nothing else of the settings changes"
    assert resolve_batch_size(free, ALONE) is free, "a number is left alone"


@pytest.mark.slow
def test_a_run_with_auto_writes_the_number_down(train, monkeypatch):
    monkeypatch.setattr(batch_size, "STEPS_PER_SIZE", 1)
    monkeypatch.setattr(batch_size, "LARGEST", {"cpu": 16})
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    original, cublas = batch_size.model_of, []
    read = partial(os.environ.get, "CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(batch_size, "model_of", lambda *a: cublas.append(read()) or original(*a))
    words = "batch_size=auto epochs=1 optim.reference_batch_size=32 deterministic=true"
    done = train(*words.split())
    # cuBLAS reads it at its first product, which the measurement calls.
    assert cublas[0] == ":4096:8"
    assert (chosen := done.summary["global_batch_size"]) in (8, 16)
    assert f"batch_size: {chosen}\n" in (done.folder / "config.yaml").read_text()
    assert done.records("train")[0]["lr"] == pytest.approx(0.4 * chosen / 32)
