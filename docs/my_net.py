"""A ConvNeXt with squeeze-and-excitation and attention, written as many are."""

import itertools

import torch.nn.functional as F
from torch import nn


class LayerNorm(nn.LayerNorm):
    def forward(self, x):
        x = super().forward(x.permute(0, 2, 3, 1))
        return x.permute(0, 3, 1, 2).contiguous()


class SqueezeExcite(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate = nn.Sequential(
            nn.Linear(width, width // 4), nn.ReLU(), nn.Linear(width // 4, width)
        )

    def forward(self, x):
        mean = x.mean((2, 3))
        return x * self.gate(mean).sigmoid()[:, :, None, None]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        depthwise = nn.Conv2d(width, width, 5, padding=2, groups=width)
        expand, project = nn.Conv2d(width, 4 * width, 1), nn.Conv2d(4 * width, width, 1)
        self.body = nn.Sequential(
            depthwise, LayerNorm(width), expand, nn.GELU(), SqueezeExcite(4 * width), project
        )

    def forward(self, x):
        return x + self.body(x)


class Attention(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads, self.norm = heads, LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        n, c, h, w = x.shape
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(tokens).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        tokens = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        tokens = self.out(tokens).transpose(1, 2)
        return x + tokens.reshape(n, c, h, w).contiguous()


class Net(nn.Module):
    def __init__(self, num_classes, widths=(32, 64, 128)):
        super().__init__()
        layers = [nn.Conv2d(3, widths[0], 4, 4)]
        for width, following in itertools.pairwise((*widths, None)):
            layers += [Block(width), Block(width)]
            if following:
                layers += [LayerNorm(width), nn.Conv2d(width, following, 2, 2)]
        self.features = nn.Sequential(*layers, Attention(widths[-1]))
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)))


def build(num_classes):
    return Net(num_classes)
