"""Two processes on gloo: gradients share memory and strides with DDP's buckets, in channels_last, graphed or not."""

import json
import warnings
from pathlib import Path

import pytest
import torch

from cl_train.config.validation import load
from cl_train.data.device import Batch
from cl_train.step.precision import resolve_precision
from cl_train.step.train_step import loss_of
from cl_train.system.distributed import Dist, processes
from cl_train.training.build import build_train_state
from tests.processes import LIMIT_S
from tests.ranks import fork_two_ranks

CASES: tuple[dict[str, object], ...] = ({}, {"ddp_static_graph": True}, {"cuda_graph": True})  # the last: recorded


@pytest.mark.slow
def test_gradients_have_the_strides_of_weights_and_buckets(tmp_path: Path) -> None:
    ranks = fork_two_ranks(tmp_path, main)
    assert not any("Grad strides do not match bucket view strides" in rank.output() for rank in ranks)
    losses = json.loads(ranks[0].output().splitlines()[-1])
    assert losses == pytest.approx(losses[:1] * len(CASES), rel=1e-5)


def loss_after_looking(words: dict[str, object], dist: Dist) -> float:
    """Six steps, then one more backward pass whose gradients are looked at before they are dropped."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        settings = {"model": "tests.networks:small", "precision": "fp32", "channels_last": True, "device": "cpu"}
        cfg = load({**settings, "data": {"name": "synthetic"}, **words})
        state = build_train_state(cfg, resolve_precision("fp32", dist.device), 3, dist, lr=0.1)
        for step in range(6):
            images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(10 * step + dist.rank))
            batch = Batch(images.to(memory_format=torch.channels_last), torch.arange(4) % 3)
            loss = state.train_step([batch]).loss
        loss_of(state.parts.model(batch.images), batch.targets).backward()
    assert not [item for item in caught if "strides" in str(item.message)]
    gradients = [(parameter.grad, parameter) for parameter in state.model.parameters()]
    assert len({gradient.untyped_storage().data_ptr() for gradient, _ in gradients}) == 1, "views of the one bucket"
    assert all(gradient.stride() == parameter.stride() for gradient, parameter in gradients)
    assert sum(g.dim() == 4 and g.is_contiguous(memory_format=torch.channels_last) for g, _ in gradients) == 2
    torch.distributed.all_reduce(loss)
    return loss.item() / 2


def main() -> None:
    with processes("cpu", timeout_s=LIMIT_S) as dist:
        losses = [loss_after_looking(words, dist) for words in CASES]
        if dist.is_main:
            print(json.dumps(losses))
