"""Each training image at most once per epoch, each validation image exactly once, wherever a run is resumed."""

import random
from pathlib import Path

import numpy as np
import tiny
import torch
from bench import Bench
from outcome import Outcome

from cl_train.config.schema import AugmentConfig, DataConfig
from cl_train.data.build import build_data
from cl_train.data.device import DeviceFormat
from cl_train.data.order import permutation, rank_share
from cl_train.system.distributed import Dist

CPU = torch.device("cpu")


def images_seen_per_epoch(bench: Bench, count: int) -> Outcome:
    """World size x number of images x batch x resume point, and once with the real loader and its validation split.

    The rule: an epoch is floor(N / global batch) full batches, all images distinct, the rest dropped; another seed or
    epoch is another order; evaluation counts N images.
    """
    folder = bench.new_folder()
    rng = random.Random(bench.seed)
    with Outcome("which images an epoch sees", bench.seed) as outcome:
        for _ in range(count):
            world, images, batch = rng.choice((1, 2, 3, 4)), rng.choice((97, 100, 101)), rng.choice((1, 7, 16))
            with outcome.attempt():
                check_epoch(world, images, batch, rng.randrange(2**32), rng.randrange(90), rng)
        with outcome.attempt():
            check_loader(folder / "images")
    return outcome


def check_epoch(world: int, images: int, batch: int, seed: int, epoch: int, rng: random.Random) -> None:
    order = permutation(seed, epoch, images)
    steps = images // (batch * world)
    seen: list[int] = []
    resumed_at, other_world = rng.randrange(steps + 1), world
    if batch * world % 2 == 0:
        other_world = world * 2 if batch % 2 == 0 else max(1, world // 2)
    other_batch = batch * world // other_world
    for step in range(steps):
        w, b = (world, batch) if step < resumed_at else (other_world, other_batch)
        shares = [rank_share(order, step, b, rank, w) for rank in range(w)]
        seen += np.concatenate(shares).tolist()
    said = f"{len(seen)} images, {len(set(seen))} distinct, {steps} steps of {batch} x {world}"
    assert len(set(seen)) == len(seen) == steps * batch * world, said
    assert seen == order[: len(seen)].tolist(), "another order after resuming with another world size"
    assert sorted(order.tolist()) == list(range(images)), "not a permutation"
    is_other = images <= 20 or (order != permutation(seed, epoch + 1, images)).any()
    assert is_other, "two epochs have the same order"


def check_loader(folder: Path) -> None:
    root = tiny.write_images(folder)
    form = DeviceFormat(CPU, torch.float32, torch.contiguous_format)
    cfg = DataConfig(name="folder", root=str(root), image_size=8, workers=0)
    for world in (1, 2, 3, 4):
        labels = []
        for rank in range(world):
            data = build_data(cfg, AugmentConfig(), batch_size=4, seed=0, dist=Dist(rank, world, CPU))
            labels += [label for batch in data.validation(form) for label in batch.targets.tolist()]
            data.close()
        assert sorted(labels) == [0] * 5 + [1] * 5 + [2] * 5, f"evaluation with {world} ranks: {len(labels)} of 15"
