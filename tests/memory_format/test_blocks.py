"""Blocks of vision models: audit and guard find the layout lost where plain torch's strides say so,
at its line, and nowhere else.
"""

import inspect
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cl_train
from cl_train.errors import LayoutLost
from cl_train.measure.audit import audit
from tests.memory_format.test_audit import Call, converted, images, with_gradient

C, S = 8, 8  # channels, and the height and width of the images: equal, so that sizes tell nothing
linear, norm = nn.Linear(C, C), nn.LayerNorm(C)
BIAS = torch.rand(1, 2, S * S, S * S).to(memory_format=torch.channels_last)
POSITIONS = torch.rand(1, S * S, S * S, 3)
mix, table = nn.Linear(S * S, S * S), torch.randperm(S * S)
by_head = nn.Linear(3, 2)


def tokens(x):
    return x.flatten(2).transpose(1, 2)


def image(t):
    return t.transpose(1, 2).unflatten(2, (S, S))


def heads(t):
    return t.unflatten(2, (2, C // 2)).transpose(1, 2)


def merged(t):
    return t.transpose(1, 2).flatten(2)


def attended(q, k, v):
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v


def positioned(scores):
    positions = by_head(POSITIONS.expand(len(scores), -1, -1, -1)).permute(0, 3, 1, 2)
    weights = scores.softmax(-1) + positions.softmax(-1)
    weights /= weights.sum(-1).unsqueeze(-1)
    return weights


def partition(x):
    """Windows of 4 x 4 pixels, [windows, tokens, channels]."""
    parts = x.permute(0, 2, 3, 1).unflatten(2, (S // 4, 4)).unflatten(1, (S // 4, 4))
    return parts.transpose(2, 3).reshape(-1, 16, C)


def windows_of_planes(x):
    parts = x.unflatten(3, (2, 4)).unflatten(2, (2, 4)).transpose(3, 4).contiguous()
    return parts.transpose(3, 4).flatten(4).flatten(2, 3)


def reverse(t):
    parts = t.unflatten(0, (-1, S // 4, S // 4)).unflatten(3, (4, 4))
    return parts.transpose(2, 3).reshape(-1, S, S, C).permute(0, 3, 1, 2)


def grid(x):
    line = torch.linspace(-1, 1, S)
    return torch.stack(torch.meshgrid(line, line, indexing="xy"), -1).expand(len(x), -1, -1, -1)


KEPT = {
    "tokens": lambda x: image(linear(norm(tokens(x))).relu()),
    "attention of heads": lambda x: image(merged(attended(*[heads(linear(tokens(x)))] * 3))),
    "flash attention": lambda x: image(
        merged(F.scaled_dot_product_attention(*[heads(linear(tokens(x)))] * 3))
    ),
    "non-local": lambda x: (
        torch.bmm(torch.bmm(tokens(x), x.flatten(2)).softmax(-1), tokens(x))
        .transpose(1, 2)
        .unflatten(2, (S, S))
    ),
    "shifted windows": lambda x: reverse(linear(partition(x.roll((1, 1), (2, 3))))).roll(
        (-1, -1), (2, 3)
    ),
    "channels mixed by einsum": lambda x: torch.einsum("nchw,cd->nhwd", x, linear.weight).permute(
        0, 3, 1, 2
    ),
    "layer norm of a permuted image": lambda x: norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
    "squeeze and excitation": lambda x: x * linear(x.mean((2, 3))).sigmoid()[:, :, None, None],
    "chunks and cat": lambda x: torch.cat([part.relu() for part in x.chunk(2, 1)], 1),
    "stack of scales": lambda x: (
        torch.stack([tokens(x), 2 * tokens(x)]).sum(0).mT.unflatten(2, (S, S))
    ),
    "transposed and back": lambda x: x.transpose(2, 3).relu().transpose(2, 3),
    "pixels chosen": lambda x: image(tokens(x)[:, table]),
    "pixel shuffle and back": lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2),
    "group norm": lambda x: F.group_norm(x, 2),
    "own function": with_gradient(lambda gradient: 2 * gradient),
    "gated attention map": lambda x: image(
        merged(
            (torch.rand(1, 2, 1, 1) * (heads(tokens(x)) @ heads(tokens(x)).mT) + BIAS).div_(9)
            @ heads(tokens(x))
        )
    ),
    "attention map with a table of positions": lambda x: image(
        merged(positioned(heads(tokens(x)) @ heads(tokens(x)).mT) @ heads(tokens(x)))
    ),
}

LOST = {
    "tokens copied": lambda x: tokens(x).transpose(1, 2).contiguous().view(x.shape),
    "product of channels": lambda x: torch.bmm(
        linear.weight.expand(len(x), -1, -1), x.flatten(2)
    ).view(x.shape),
    "values before weights": lambda x: torch.bmm(
        x.flatten(2), torch.eye(S * S).expand(2, -1, -1)
    ).view(x.shape),
    "softmax of pixels": lambda x: x.reshape(len(x), C, -1).softmax(-1).view(x.shape),
    "triplet attention": lambda x: x.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3),
    "tokens mixed": lambda x: mix(x.flatten(2)).unflatten(2, (S, S)),
    "windows of planes": windows_of_planes,
    "channel shuffle": lambda x: x.unflatten(1, (2, C // 2)).transpose(1, 2).flatten(1, 2),
    "cat with new channels": lambda x: torch.cat([x[:, 1:], torch.zeros(len(x), 1, S, S)], 1),
    "gather": lambda x: x.flatten(2).gather(2, table.expand(len(x), C, -1)).unflatten(2, (S, S)),
    "grid sample": lambda x: F.grid_sample(x.contiguous(), grid(x), align_corners=False),
    "rolled": lambda x: x.flatten(2).roll(1, 2).unflatten(2, (S, S)),
    "Fourier transform": lambda x: torch.fft.irfft2(torch.fft.rfft2(x), s=(S, S)),
    "instance norm": lambda x: F.instance_norm(x),
    "unfold and fold": lambda x: F.fold(F.unfold(x, 3, padding=1), (S, S), 3, padding=1),
    "unbound and stacked": lambda x: torch.stack([plane * 2 for plane in x.unbind(1)], 1),
}


def mixer(x):
    """Its sum with the channels_last image makes the loss good."""
    t = tokens(x)
    return image(norm(t + mix(t.mT).mT))


def patches_unfolded_by_planes(x):
    """As MobileViT does it: dimensions that merge channels with rows, and are split again."""
    n = len(x)
    rows = x.reshape(n * C * 4, 2, 4, 2).transpose(1, 2).reshape(n, C, 16, 4)
    mixed = norm(linear(rows.transpose(1, 3).reshape(n * 4, 16, C))).view(n, 4, 16, C)
    return mixed.transpose(1, 3).reshape(n * C * 4, 4, 2, 2).transpose(1, 2).reshape(n, C, S, S)


def is_channels_last(x):
    return x.is_contiguous(memory_format=torch.channels_last)


def model_of(block):
    return converted(nn.Sequential(nn.Conv2d(3, C, 3), Call(block), nn.Conv2d(C, C, 3)))


@pytest.mark.parametrize("name", KEPT)
def test_a_block_that_keeps_the_layout_gives_no_alarm(name):
    assert is_channels_last(KEPT[name](images(2, C, S, S)))
    x = images(2, 3, S + 2, S + 2)
    report = audit(model_of(KEPT[name]), x)
    assert report.losses() == [] and report.of("restored", "forward") == []
    with cl_train.layout_guard():
        model_of(KEPT[name])(x).square().sum().backward()
        with torch.inference_mode():
            model_of(KEPT[name])(x)
    assert not nn.modules.module._global_forward_hooks


@pytest.mark.parametrize("name", LOST)
def test_a_block_that_loses_the_layout_is_named_at_its_line(name):
    assert not is_channels_last(LOST[name](images(2, C, S, S)))
    x = images(2, 3, S + 2, S + 2)
    report = audit(model_of(LOST[name]), x, backward=False)
    assert report.totals["lost"]
    lines = {int(call.source.rpartition(":")[2]) for call in report.of("lost")}
    lambdas, first = inspect.getsourcelines(LOST[name])
    assert lines <= set(range(first, first + len(lambdas))), lines
    restored = [call for call in report.of("restored") if call.module == "2"]
    assert len(restored) == 1 and Path(__file__).name in restored[0].cause
    place = f"{Path(__file__).name}:{min(lines)} "
    with pytest.raises(LayoutLost, match=place), cl_train.layout_guard():
        model_of(LOST[name])(x)
    with torch.inference_mode(), pytest.raises(LayoutLost), cl_train.layout_guard():
        model_of(LOST[name])(x)


@pytest.mark.parametrize(("block", "copies"), [(mixer, 1), (patches_unfolded_by_planes, 2)])
def test_a_block_whose_copies_lose_the_layout_has_no_other_loss(block, copies):
    report = audit(model_of(block), images(2, 3, S + 2, S + 2))
    found = sorted(row["operator"] for row in report.losses())
    assert found == ["clone (backward)"] * copies + ["clone (forward)"] * copies
