"""Each recipe of conf/experiment/ against the settings, learning rates and image sizes of its
source, and in two real steps.
"""

import json
import math
from contextlib import suppress
from dataclasses import asdict

import numpy as np
import pytest
import timm.scheduler
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR, StepLR

from cl_train.config.command_line import check_command_line, group_choices
from cl_train.config.validation import flatten
from cl_train.training.loop import train
from cl_train.training.parts import plan_of
from cl_train.training.plan import Progress
from tests.conftest import Run

NAMES = [name for name in group_choices("experiment") if name != "smoke"]
IMAGENET_IMAGES = 1_281_167
MAIN_AMP_STEPS = IMAGENET_IMAGES // 200
# Epochs of FFCV's recipes, and the start and the end of the growth of their images.
RAMPS = {16: (11, 13), 24: (17, 20), 32: (23, 27), 40: (29, 34), 56: (41, 48), 88: (65, 76)}


def settings(words):
    """Of `key=value key=value`, with values in JSON or as texts."""
    values = {}
    for word in words.split():
        key, _, value = word.partition("=")
        values[key] = value
        with suppress(ValueError):
            values[key] = json.loads(value)
    return values


# What a source does that says nothing of it.
OFF = settings(
    """
    loss=cross_entropy bce_threshold=null label_smoothing=0 drop_path=null
    ema_decay=0 ema_every=1 evaluate_flip=false data.image_size=224
    data.size_schedule=[] data.val_size=224 data.val_resize=256 data.interpolation=bilinear
    data.val_interpolation=bilinear augment.crop_scale_min=0.08 augment.flip=0.5
    augment.policy=none augment.erase=0 augment.mixup=0 augment.cutmix=0
    augment.repeats=1 optim.name=sgd optim.momentum=0.9 optim.nesterov=false optim.eps=null
    optim.decay_norm_and_bias=true optim.clip_norm=null schedule.warmup_epochs=0
    """
)
_SGD_V1 = "optim.lr=0.1 batch=256 optim.weight_decay=1e-4 epochs=90"
# The decay of the EMA is that of train.py: 1 - (1 - 0.99998) * 1024 * 32 / 600
_TORCHVISION_V2 = """
    epochs=600 batch=1024 label_smoothing=0.1 ema_decay=0.9989077 ema_every=32 data.image_size=176
    data.val_resize=232 augment.policy=trivialaugment augment.erase=0.1 augment.mixup=0.2
    augment.cutmix=1 augment.repeats=4 optim.lr=0.5 optim.weight_decay=2e-5
    optim.decay_norm_and_bias=false schedule.warmup_epochs=5
"""
# bce_threshold is of commands like the paper's, not of the paper: docs/recipes.md
_RSB = """
    batch=2048 loss=bce bce_threshold=0.2 data.interpolation=bicubic data.val_interpolation=bicubic
    data.val_resize=235 augment.policy=rand-m7-mstd0.5-inc1
    augment.mixup=0.1 augment.cutmix=1 augment.repeats=3 optim.name=lamb optim.lr=5e-3
    optim.weight_decay=0.02 optim.decay_norm_and_bias=false schedule.warmup_epochs=5
"""
# ratio=224/256 of the validation crop
_FFCV = f"""
    label_smoothing=0.1 evaluate_flip=true data.val_size=256 data.val_resize={256 * 256 // 224}
    optim.decay_norm_and_bias=false schedule.warmup_epochs=2
"""
_FFCV_OF_DEPTH = {
    18: "batch=1024 optim.lr=0.5 optim.weight_decay=5e-5",
    50: "batch=4096 optim.lr=1.7 optim.weight_decay=1e-4",
}
# Each recipe, with the lengths that were published if there are several.
RECIPES = [
    f"{name} epochs={epochs}" if epochs else name
    for name in NAMES
    for epochs in (RAMPS if "ffcv" in name else (None,))
]
_SCRIPT = "pytorch/vision, references/classification/README.md"
_PAPER = "arXiv 2110.00476, table 2; timm 0387e605, train.py"
_TIMM = "timm aa4b5850, hfdocs/source/training_script.mdx; ff94ffce, train.py"
# The source of each recipe, and what it sets; the rest is `OFF`. "batch": the learning rate's.
SOURCES = {
    "main_amp": (
        "NVIDIA/apex 6424da3b, examples/imagenet/main_amp.py",
        f"{_SGD_V1} schedule.warmup_epochs=5",
    ),
    "resnet50_90ep": (_SCRIPT, _SGD_V1),
    "resnet50_torchvision_v2": ("pytorch/vision issue 3995", _TORCHVISION_V2),
    "mobilenet_v3_large_torchvision_v2": ("pytorch/vision issue 3995", _TORCHVISION_V2),
    "convnext_tiny_torchvision": (
        "pytorch/vision pull 5197",
        f"""{_TORCHVISION_V2} optim.name=adamw optim.lr=1e-3 optim.weight_decay=0.05
        data.val_resize=236""",
    ),
    "mobilenet_v3_large_torchvision_v1": (
        _SCRIPT,
        """epochs=600 batch=1024 augment.policy=autoaugment augment.erase=0.2 optim.name=rmsprop
        optim.lr=0.064 optim.eps=0.0316 optim.weight_decay=1e-5""",
    ),
    "efficientnet_b0_timm_ra": (
        _TIMM,
        """epochs=450 batch=768 ema_decay=0.9999 data.val_interpolation=bicubic
        augment.policy=rand-m9-mstd0.5 augment.erase=0.2
        optim.name=rmsproptf optim.lr=0.048 optim.eps=0.001 optim.weight_decay=1e-5
        optim.decay_norm_and_bias=false schedule.warmup_epochs=3""",
    ),
    "resnet50_timm_a1": (
        _PAPER,
        f"""{_RSB} epochs=600 label_smoothing=0.1 drop_path=0.05 augment.mixup=0.2
        optim.weight_decay=0.01""",
    ),
    "resnet50_timm_a2": (_PAPER, f"{_RSB} epochs=300 drop_path=0.05"),
    "resnet50_timm_a3": (
        _PAPER,
        f"""{_RSB} epochs=100 data.image_size=160 augment.policy=rand-m6-mstd0.5-inc1
        augment.repeats=1 optim.lr=8e-3""",
    ),
    **{
        f"resnet{depth}_ffcv epochs={epochs}": (
            f"libffcv/ffcv-imagenet 4dd291a1, rn{depth}_configs/rn{depth}_{epochs}_epochs.yaml",
            f"""{_FFCV} {of_depth} epochs={epochs}
            data.size_schedule=[[0,160],[{start},160],[{end},192]]""",
        )
        for depth, of_depth in _FFCV_OF_DEPTH.items()
        for epochs, (start, end) in RAMPS.items()
    },
}


def settings_of(cfg):
    """The settings that `SOURCES` states; those that mean the same have one value."""
    plain = dict(flatten(asdict(cfg)))
    size = cfg.data.val_size or cfg.data.image_size
    stated = {key: plain[key] for key in (*OFF, "epochs", "optim.lr", "optim.weight_decay")}
    stated |= {"data.val_size": size, "data.val_resize": cfg.data.val_resize or size * 8 // 7}
    stated["batch"] = cfg.optim.reference_batch_size or cfg.global_batch_size
    return stated


@pytest.mark.parametrize("name", RECIPES)
def test_the_settings_are_those_of_the_source(name):
    assert settings_of(recipe(name)) == OFF | settings(SOURCES[name][1])


def recipe(name):
    (cfg,) = check_command_line(f"experiment={name} data.root=/datasets/imagenet".split())
    return cfg


def source_lrs(name, epochs):
    """The learning rate at the start of each epoch, from the schedulers that the source uses."""
    values = settings(SOURCES[name][1])
    peak = values["optim.lr"]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    if "ffcv" in name:  # train_imagenet.py: get_cyclic_lr
        yield from np.interp(range(epochs), [0, 2, epochs], [1e-4 * peak, peak, 0])
        return
    if "timm" in name:
        minimum, first = (1e-6, 1e-4)  # the defaults of timm's script in September 2021
        if "timm_ra" in name:
            minimum, first = 0.0, 1e-6
        scheduled, _ = timm.scheduler.create_scheduler_v2(
            optimizer,
            "step" if "timm_ra" in name else "cosine",
            num_epochs=epochs,
            decay_epochs=2.4,
            decay_rate=0.97,
            min_lr=minimum,
            warmup_lr=first,
            warmup_epochs=values["schedule.warmup_epochs"],
        )
        for epoch in range(epochs):
            scheduled.step(epoch)
            yield optimizer.param_groups[0]["lr"]
        return
    if name == "main_amp":  # adjust_learning_rate
        for epoch in range(epochs):
            lr = peak * 0.1 ** (epoch // 30 + (epoch >= 80))
            yield lr * (1 + epoch * MAIN_AMP_STEPS) / (5 * MAIN_AMP_STEPS) if epoch < 5 else lr
        return
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
def test_the_schedule_is_that_of_the_source(name):
    cfg, values = recipe(name), settings(SOURCES[name][1])
    batch, scale = values["batch"], 1.0
    ranks = (cfg.global_batch_size or 8 * cfg.batch_size) // cfg.batch_size
    if name == "main_amp":  # one GPU; its learning rate grows with the batch
        ranks, batch, scale = 1, cfg.batch_size, cfg.batch_size / batch
    plan = plan_of(cfg, IMAGENET_IMAGES, ranks)
    assert plan.global_batch_size == batch
    expected = [scale * lr for lr in source_lrs(name, cfg.epochs)]
    rates = [plan.lr_at(Progress(epoch=epoch)) for epoch in range(cfg.epochs)]
    assert rates == pytest.approx(expected, rel=2e-4, abs=1e-6 * scale * values["optim.lr"])
    within = plan.lr_at(Progress(epoch=7, step_in_epoch=plan.steps_per_epoch // 2))
    if name == "main_amp":
        assert plan.steps_per_epoch == MAIN_AMP_STEPS
    if "ffcv" not in name:
        assert within == pytest.approx(expected[7], rel=1e-4)
        return
    # Linear within an epoch.
    assert within == pytest.approx((expected[7] + expected[8]) / 2, rel=1e-2)
    # train_imagenet.py: get_resolution
    sizes = np.interp(range(cfg.epochs), RAMPS[cfg.epochs], [160, 192])
    assert plan.image_sizes == tuple(32 * np.round(sizes / 32))


SMALL = "data=folder data.image_size=32 data.workers=0 device=cpu precision=fp32 batch_size=8"
SMALL += " log_every=1 max_steps=2 data.size_schedule=[] data.val_size=null data.val_resize=null"
SMALL += " checkpoint.every_epochs=0 log_to=[] compile=false"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_steps_of_each_recipe(name, image_folder, tmp_path):
    words = f"experiment={name} data.root={image_folder} global_batch_size=null {SMALL}"
    (cfg,) = check_command_line(words.split())
    assert train(cfg, tmp_path).exit_code == 0
    done = Run(tmp_path, 0)
    assert done.summary["status"] == "completed" and done.summary["model"] == recipe(name).model
    assert len(done.losses) == 2 and all(map(math.isfinite, done.losses))
    assert done.records("val")[0]["images"] == 21
    assert bool(done.records("val_average")) == (cfg.ema_decay > 0)
