"""The arithmetic of scaling: buckets, all-reduce, and what the backward pass hides."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from cl_train.comparison.scaling import Bucket, all_reduce_s, exposed_s, gradient_buckets, plan
from cl_train.config.benchmarks import PlanSettings
from cl_train.models.sources import build_model
from tests.faults.forkserver import ForkServer


def resnet50() -> nn.Module:
    with torch.device("meta"):
        return build_model("resnet50", num_classes=1000)


def test_buckets_hold_every_gradient_once_from_the_last_layer_on() -> None:
    buckets = gradient_buckets(resnet50())
    assert sum(bucket.bytes for bucket in buckets) == 4 * 25_557_032
    assert buckets[0].bytes == 4 * (2048 * 1000 + 1000), "the first bucket is small: here the classifier alone"
    assert buckets[-1].ready == 1.0 and [b.ready for b in buckets] == sorted(b.ready for b in buckets)


def test_the_ring_sends_twice_all_bytes_but_one_share() -> None:
    assert all_reduce_s(10**9, 2, 1e9, 0.0) == pytest.approx(1.0)
    assert all_reduce_s(10**9, 8, 1e9, 0.0) == pytest.approx(1.75)
    assert all_reduce_s(0, 256, 1e9, 1e-5) == pytest.approx(16e-5)


def test_only_what_the_backward_pass_does_not_hide_is_exposed() -> None:
    buckets = [Bucket(1, 0.5), Bucket(1, 1.0)]
    assert exposed_s(buckets, [0.1, 0.1], backward_s=1.0) == pytest.approx(0.1), "the last bucket never overlaps"
    assert exposed_s(buckets, [2.0, 0.1], backward_s=1.0) == pytest.approx(1.6)


def test_a_slow_link_and_a_slow_loader_cost_what_they_must() -> None:
    settings = PlanSettings(images_per_s=2800.0, gpus_per_node=8)
    one, eight = (plan(resnet50(), gpus, settings) for gpus in (1, 8))
    assert one.images_per_s == pytest.approx(2800) and one.exposed_ms == one.all_reduce_ms == 0
    assert 95 < eight.efficiency_pct < 100 and eight.global_batch_size == 2048
    slow_link = plan(resnet50(), 16, PlanSettings(images_per_s=2800.0, network_gb_per_s=0.5))
    assert slow_link.exposed_ms == pytest.approx(slow_link.all_reduce_ms - 1000 * 2 / 3 * 256 / 2800, rel=0.2)
    starved = plan(resnet50(), 8, PlanSettings(images_per_s=2800.0, loader_images_per_s=100, cores_per_gpu=4))
    assert starved.images_per_s == pytest.approx(8 * 400)
    assert starved.loader_cores_per_gpu == pytest.approx(28, rel=0.01)


@pytest.mark.slow
def test_the_command(fork_server: ForkServer, tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "scripts" / "plan.py"
    words = ["model=resnet18", "images_per_s=9000", "gpus=8,256", "json=true"]
    done = fork_server.call("forkserver:run_script", [str(script), words], tmp_path / "log")
    assert done.wait() == 0, done.output()
    assert [item["gpus"] for item in json.loads(done.output())] == [8, 256]
