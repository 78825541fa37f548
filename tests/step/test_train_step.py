"""The AMP step: autocast is used, one optimizer step per call, clipping sees unscaled gradients, an
overflow skips.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from timm.data.mixup import mixup_target
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import nn

from cl_train.config.schema import OPTIMIZERS, OptimConfig
from cl_train.data.device import Batch, DeviceFormat
from cl_train.models.sources import build_model
from cl_train.step.precision import BY_NAME, cast_model, resolve_precision
from cl_train.step.train_step import (
    CROSS_ENTROPY,
    Loss,
    StepSettings,
    labels_and_top5,
    loss_of,
    make_step,
    train_step,
)
from cl_train.training.build import TrainState
from tests.networks import small

CPU = torch.device("cpu")


def make_parts(
    name,
    *,
    model=None,
    layout=torch.channels_last,
    clip_norm=None,
    init_scale=1024.0,
    optimizer="sgd",
    loss=CROSS_ENTROPY,
):
    torch.manual_seed(0)
    precision = resolve_precision(name, CPU)
    model = cast_model((model or small(3)).to(memory_format=layout), precision)
    optim = OptimConfig(name=optimizer, weight_decay=0.0, clip_norm=clip_norm)
    parts = make_step(model, StepSettings(precision, optim, loss), CPU, 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale, enabled=precision.scales_loss)
    return replace(parts, scaler=scaler)


def make_batch(parts, images=8, seed=1):
    generator = torch.Generator().manual_seed(seed)
    is_channels_last = parts.wrapped_model[0].weight.stride()[1] == 1
    layout = torch.channels_last if is_channels_last else torch.contiguous_format
    pixels = torch.randn(images, 3, 32, 32, generator=generator)
    pixels = pixels.to(parts.settings.precision.input_dtype, memory_format=layout)
    return Batch(pixels, torch.randint(0, 3, (images,), generator=generator))


def state_of(parts):
    batch_format = DeviceFormat(CPU, parts.settings.precision.input_dtype, torch.contiguous_format)
    return TrainState(parts.wrapped_model, parts, batch_format, partial(train_step, parts))


def weights(parts):
    return parts.wrapped_model[3].weight.detach().clone()


DTYPES = {"fp16": torch.float16, "fp16_o2": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", BY_NAME)
def test_each_precision_trains_in_each_layout(name, layout):
    """The model computes in the precision, and a call is one step of the optimizer."""
    parts, seen, calls = make_parts(name, layout=layout), set(), []
    layer = parts.wrapped_model[3]
    layer.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    parts.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    batch = make_batch(parts)
    losses = [train_step(parts, [batch, batch]).loss.item() for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0] and len(calls) == 20
    assert seen == {parts.settings.precision.input_dtype} == {DTYPES.get(name, torch.float32)}
    expected = (72, 1, 24, 8) if layout == torch.channels_last else (72, 9, 3, 1)
    momentum = [state["momentum_buffer"] for state in parts.optimizer.state.values()]
    assert parts.wrapped_model[3].weight.stride() == expected
    assert [buffer.stride() for buffer in momentum if buffer.shape == (16, 8, 3, 3)] == [expected]


@pytest.mark.parametrize("name", ["fp32", "fp16", "fp16_o2"])
def test_clipping_sees_unscaled_gradients(name):
    """After a step from rest with lr 0.1 the change of all weights has the norm lr * clip_norm,
    whatever the scale.
    """
    changes = []
    for init_scale in (1.0, 1024.0):
        parts = make_parts(name, clip_norm=0.01, init_scale=init_scale)
        named = parts.weights.trainable()
        before = {key: value.detach().clone() for key, value in named.items()}
        train_step(parts, [make_batch(parts)])
        norms = [(named[key] - before[key]).norm() for key in named]
        changes.append(torch.stack(norms).norm().item())
    assert changes == pytest.approx([0.001, 0.001], rel=0.02)


@pytest.mark.parametrize(
    ("name", "optimizer", "value"),
    [
        *((name, "sgd", "inf") for name in ("fp16", "fp16_o2")),
        *((name, optimizer, "nan") for name in ("fp32", "bf16") for optimizer in OPTIMIZERS),
    ],
)
def test_a_gradient_that_is_not_finite_skips_the_step(name, optimizer, value):
    """And halves the loss scale, if there is one. The next step is taken."""
    parts = make_parts(name, optimizer=optimizer)
    train_step(parts, [make_batch(parts)])
    before, batch = weights(parts), make_batch(parts)
    batch.images[0, 0, 0, 0] = float(value)
    assert train_step(parts, [batch]).skipped.item() == 1
    assert torch.equal(weights(parts), before)
    assert parts.scaler.get_scale() == (512.0 if value == "inf" else 1.0)
    assert train_step(parts, [make_batch(parts)]).skipped.item() == 0
    assert not torch.equal(weights(parts), before)


# --- losses ---------------------------------------------------------------------------------------

LOGITS = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)) * 3
LABELS = torch.tensor([0, 1, 2, 3, 4, 4])


def mixed(smoothing=0.0):
    return mixup_target(LABELS, 5, lam=0.7, smoothing=smoothing)


@pytest.mark.parametrize("threshold", [None, 0.2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_binary_cross_entropy_is_timms(smoothing, threshold):
    ours = Loss("bce", label_smoothing=smoothing, bce_threshold=threshold)
    theirs = BinaryCrossEntropy(smoothing, target_threshold=threshold)
    torch.testing.assert_close(ours(LOGITS, LABELS), theirs(LOGITS, LABELS))
    # timm's MixUp smooths.
    torch.testing.assert_close(ours(LOGITS, mixed()), theirs(LOGITS, mixed(smoothing)))


WEIGHTS = (2.0, 1.0, 0.5, 1.0, 0.25)


def test_class_weights_multiply_the_loss_of_an_image():
    ours, weights = Loss(class_weights=WEIGHTS), torch.tensor(WEIGHTS)
    theirs = nn.functional.cross_entropy(LOGITS, LABELS, weights, reduction="sum") / 6
    parts = [ours(LOGITS[part], LABELS[part]) for part in (slice(3), slice(3, 6))]
    more = torch.cat([LOGITS, torch.full((6, 2), -1e9)], 1)  # outputs without a class
    for loss in (ours(LOGITS, LABELS), sum(parts) / 2, ours(more, LABELS)):
        torch.testing.assert_close(loss, theirs)
    bce = nn.functional.binary_cross_entropy_with_logits(LOGITS, mixed(), reduction="none").mean(1)
    loss = Loss("bce", class_weights=WEIGHTS)
    torch.testing.assert_close(loss(LOGITS, mixed()), (mixed() @ weights * bce).mean())


def test_cross_entropy_is_timms_and_float32_for_half_precision_logits():
    ours = Loss(label_smoothing=0.1)
    theirs = LabelSmoothingCrossEntropy(0.1)(LOGITS, LABELS)
    torch.testing.assert_close(ours(LOGITS, LABELS), theirs)
    torch.testing.assert_close(ours(LOGITS, mixed()), SoftTargetCrossEntropy()(LOGITS, mixed(0.1)))
    for loss in (ours, Loss("bce")):
        for targets in (LABELS, mixed()):
            assert loss(LOGITS.bfloat16(), targets).dtype == torch.float32


def test_the_label_of_a_mixed_image_is_the_larger_share_of_equal_ones_the_more_probable():
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]]).repeat(3, 1)
    targets = torch.zeros(3, 7)
    for row, (first, second, share) in enumerate([(0, 1, 0.3), (4, 2, 0.5), (6, 0, 0.7)]):
        targets[row, first], targets[row, second] = share, 1 - share
    labels, best = labels_and_top5(logits, targets)
    assert labels.tolist() == [1, 4, 6] and best.tolist() == [[6, 5, 4, 3, 2]] * 3


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("inception_v3", 299), ("googlenet", 64)])
def test_auxiliary_heads_count(name, size):
    torch.manual_seed(0)
    model = build_model(name, num_classes=5)
    targets, weight = torch.tensor([1, 2]), {"inception_v3": 0.4, "googlenet": 0.3}[name]
    output = model(torch.randn(2, 3, size, size))
    auxiliary = [value for field, value in output._asdict().items() if field != "logits"]
    assert auxiliary and all(value.shape == (2, 5) for value in auxiliary)
    cross_entropy = nn.functional.cross_entropy
    of_auxiliary = sum(cross_entropy(value, targets) for value in auxiliary)
    expected = cross_entropy(output.logits, targets) + weight * of_auxiliary
    torch.testing.assert_close(loss_of(output, targets), expected)
