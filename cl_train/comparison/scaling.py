"""How a run scales to more GPUs, from a model of its steps; docs/clusters.md derives the terms and states their error.

No step is run: the speed of one GPU, the links and the loader are given.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed
from torch import nn

from cl_train.config.benchmarks import PlanSettings

BACKWARD = 2 / 3  # of the compute time of a step: one part forward, two parts backward
BUCKET_BYTES = [2**20, 25 * 2**20]  # of DDP: the first bucket, and all others
EVALUATION_SPEEDUP = 3.0  # forward alone, against a training step
IMAGENET = {"train": 1_281_167, "val": 50_000}


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together."""

    bytes: int
    ready: float  # when its last gradient exists, as a share of the backward pass


@dataclass(frozen=True)
class Plan:
    """What `gpus` GPUs need, and how fast they train."""

    gpus: int
    global_batch_size: int
    all_reduce_ms: float
    exposed_ms: float  # the part of it that the backward pass does not hide
    step_ms: float
    images_per_s: float
    efficiency_pct: float  # of gpus x the speed of one
    loader_cores_per_gpu: float
    storage_mb_per_s: float  # of all nodes
    epoch_s: float
    evaluation_s: float
    checkpoint_mib: float  # weights and momentum, written by rank 0


def gradient_buckets(model: nn.Module) -> list[Bucket]:
    """DDP's buckets, in the order of their reduction; a gradient is assumed to take the same time for every tensor."""
    parameters: list[torch.Tensor] = [item for item in model.parameters() if item.requires_grad]
    parameters.reverse()
    indices, _ = torch.distributed._compute_bucket_assignment_by_size(parameters, BUCKET_BYTES)
    done, buckets = 0, []
    for bucket in indices:
        done += len(bucket)
        buckets.append(Bucket(sum(parameters[index].nbytes for index in bucket), done / len(parameters)))
    return buckets


def all_reduce_s(size_bytes: int, ranks: int, bytes_per_s: float, latency_s: float) -> float:
    """Ring all-reduce: every rank sends 2 (n - 1) / n of the bytes; latency in a tree, as NCCL does for many ranks."""
    return 2 * (ranks - 1) / ranks * size_bytes / bytes_per_s + 2 * math.ceil(math.log2(ranks)) * latency_s


def exposed_s(buckets: list[Bucket], times_s: list[float], backward_s: float) -> float:
    """The time after the backward pass until the last bucket is reduced; buckets are reduced one after the other."""
    end = 0.0
    for bucket, time_s in zip(buckets, times_s, strict=True):
        end = max(end, bucket.ready * backward_s) + time_s
    return end - backward_s


def plan(model: nn.Module, gpus: int, settings: PlanSettings) -> Plan:
    """The steps of `gpus` GPUs, from the settings and the gradients of `model`, which may be on the meta device."""
    batch = settings.batch_size
    compute_s = batch / settings.images_per_s
    buckets, exposed, reduction = gradient_buckets(model), 0.0, [0.0]
    if gpus > 1:
        gb_per_s = settings.node_gb_per_s if gpus <= settings.gpus_per_node else settings.network_gb_per_s
        reduction = [all_reduce_s(item.bytes, gpus, gb_per_s * 1e9, settings.latency_us / 1e6) for item in buckets]
        exposed = exposed_s(buckets, reduction, BACKWARD * compute_s)
    step_s = max(compute_s + exposed, batch / (settings.loader_images_per_s * settings.cores_per_gpu))
    images_per_s = gpus * batch / step_s
    return Plan(
        gpus=gpus,
        global_batch_size=gpus * batch,
        all_reduce_ms=1000 * sum(reduction),
        exposed_ms=1000 * exposed,
        step_ms=1000 * step_s,
        images_per_s=images_per_s,
        efficiency_pct=100 * images_per_s / (gpus * settings.images_per_s),
        loader_cores_per_gpu=batch / (compute_s + exposed) / settings.loader_images_per_s,
        storage_mb_per_s=images_per_s * settings.image_kb / 1000,
        epoch_s=IMAGENET["train"] / images_per_s,
        evaluation_s=math.ceil(IMAGENET["val"] / gpus / batch) * batch / (EVALUATION_SPEEDUP * settings.images_per_s),
        checkpoint_mib=2 * sum(parameter.numel() for parameter in model.parameters()) * 4 / 2**20,
    )


def table(plans: list[Plan]) -> str:
    """A column per number of GPUs."""
    rows: dict[str, list[Any]] = {}
    for item in plans:
        for name, value in asdict(item).items():
            rows.setdefault(name, []).append(f"{value:,.1f}" if isinstance(value, float) else f"{value:,}")
    return "\n".join(f"{name:<22}" + "".join(f"{value:>12}" for value in values) for name, values in rows.items())
