"""Each recipe of conf/experiment/ against the learning rates and image sizes of its source, and in two real steps."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import timm.scheduler
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR, StepLR

from cl_train.config.command_line import check_command_line, group_choices
from cl_train.config.schema import Config
from cl_train.training.loop import train
from cl_train.training.state import Plan, Progress
from tests.conftest import Run

RECIPES = [name for name in group_choices("experiment") if name not in ("smoke", "main_amp")]
IMAGENET_IMAGES = 1_281_167
RAMPS = {16: (11, 13), 24: (17, 20), 32: (23, 27), 40: (29, 34), 56: (41, 48), 88: (65, 76)}  # FFCV's start and end
# peak learning rate and global batch of each source
PEAKS = {
    "resnet50_90ep": (0.1, 256),
    "resnet50_torchvision_v2": (0.5, 1024),
    "mobilenet_v3_large_torchvision_v1": (0.064, 1024),
    "mobilenet_v3_large_torchvision_v2": (0.5, 1024),
    "convnext_tiny_torchvision": (1e-3, 1024),
    "efficientnet_b0_timm_ra": (0.048, 768),
    "resnet50_timm_a1": (5e-3, 2048),
    "resnet50_timm_a2": (5e-3, 2048),
    "resnet50_timm_a3": (8e-3, 2048),
    "vit_small_deit3": (4e-3, 2048),
    **{f"resnet18_ffcv_{epochs}ep": (0.5, 1024) for epochs in RAMPS},
    **{f"resnet50_ffcv_{epochs}ep": (1.7, 4096) for epochs in RAMPS},
}


def recipe(name: str) -> Config:
    (cfg,) = check_command_line([f"experiment={name}", "data.root=/datasets/imagenet"])
    return cfg


def source_lrs(name: str, epochs: int) -> Iterator[float]:
    """The learning rate at the start of each epoch, from the schedulers that the source uses."""
    peak, _ = PEAKS[name]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    if "ffcv" in name:  # train_imagenet.py: get_cyclic_lr
        yield from np.interp(range(epochs), [0, 2, epochs], [1e-4 * peak, peak, 0])
        return
    if "timm" in name or "deit" in name:
        minimum, first = (1e-5, 1e-6) if "deit" in name else (0.0, 1e-6 if "timm_ra" in name else 1e-5)
        options = {"decay_epochs": 2.4, "decay_rate": 0.97, "min_lr": minimum, "warmup_lr": first, "warmup_epochs": 5}
        curve = "step" if "timm_ra" in name else "cosine"
        ours, _ = timm.scheduler.create_scheduler_v2(optimizer, curve, num_epochs=epochs, **options)
        for epoch in range(epochs):
            ours.step(epoch)
            yield optimizer.param_groups[0]["lr"]
        return
    scheduler: torch.optim.lr_scheduler.LRScheduler
    if name == "resnet50_90ep":
        scheduler = StepLR(optimizer, 30, 0.1)
    elif name == "mobilenet_v3_large_torchvision_v1":
        scheduler = StepLR(optimizer, 2, 0.973)
    else:
        parts = [LinearLR(optimizer, 0.01, total_iters=5), CosineAnnealingLR(optimizer, epochs - 5)]
        scheduler = SequentialLR(optimizer, parts, milestones=[5])
    for _ in range(epochs):
        yield optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("name", RECIPES)
def test_the_schedule_is_that_of_the_source(name: str) -> None:
    cfg = recipe(name)
    plan = Plan.of(cfg, IMAGENET_IMAGES, (cfg.global_batch_size or 8 * cfg.batch_size) // cfg.batch_size)
    assert plan.global_batch_size == PEAKS[name][1]
    assert (cfg.augment.crop_scale_min, cfg.augment.flip) == (0.08, 0.5)
    if name in ("resnet50_torchvision_v2", "mobilenet_v3_large_torchvision_v2", "convnext_tiny_torchvision"):
        # train.py: adjust = world_size * batch_size * model_ema_steps / epochs
        assert cfg.ema_decay == pytest.approx(1 - (1 - 0.99998) * 1024 * cfg.ema_every / cfg.epochs, abs=1e-7)
    expected = list(source_lrs(name, cfg.epochs))
    found = [plan.lr_at(Progress(epoch=epoch)) for epoch in range(cfg.epochs)]
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-9 * PEAKS[name][0])
    within = plan.lr_at(Progress(epoch=7, step_in_epoch=plan.steps_per_epoch // 2))
    if "ffcv" not in name:
        assert within == pytest.approx(expected[7], rel=1e-4)
        return
    assert within == pytest.approx((expected[7] + expected[8]) / 2, rel=1e-2), "linear within an epoch"
    sizes = np.interp(range(cfg.epochs), RAMPS[cfg.epochs], [160, 192])  # train_imagenet.py: get_resolution
    assert plan.image_sizes == tuple(32 * np.round(sizes / 32))


SMALL = "data=folder data.image_size=32 data.workers=0 device=cpu precision=fp32 batch_size=8 log_every=1 max_steps=2"
SMALL += " data.size_schedule=[] data.val_size=null data.val_resize=null checkpoint.every_epochs=0 log_to=[]"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RECIPES if "ffcv" not in name or "88ep" in name])
def test_two_steps_of_each_recipe(name: str, image_folder: Path, tmp_path: Path) -> None:
    words = [f"experiment={name}", f"data.root={image_folder}", "global_batch_size=null", *SMALL.split()]
    (cfg,) = check_command_line(words)
    assert train(cfg, tmp_path).exit_code == 0
    done = Run(tmp_path, 0)
    assert done.summary["status"] == "completed" and done.summary["model"] == recipe(name).model
    assert len(done.losses) == 2 and all(map(math.isfinite, done.losses))
    assert done.records("val")[0]["images"] == 21
    assert bool(done.records("val_average")) == (cfg.ema_decay > 0)
