"""timm's own training step, for a comparison at equal settings; needs timm.

What `train.py --amp --channels-last --torchcompile` of timm does per step, with timm's parts: its model, its optimizer
factory, its NativeScaler. Its logging is left out, which costs timm's loop more than it costs ours.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def timm_step(name: str, images: torch.Tensor, targets: torch.Tensor, *, compile: bool) -> Callable[[], object]:
    """A function that trains timm's model `name` for one step on `images` (float32, as timm's loader gives them)."""
    import timm
    from timm.optim import create_optimizer_v2
    from timm.utils import NativeScaler

    device = images.device
    layout = torch.channels_last if images.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
    model = timm.create_model(name, num_classes=1000).to(device).to(memory_format=layout).train()
    optimizer = create_optimizer_v2(model, opt="sgd", lr=1e-4, momentum=0.9, weight_decay=1e-4)
    scaler = NativeScaler(device=device.type) if device.type != "cuda" else NativeScaler()
    loss_of = nn.CrossEntropyLoss().to(device)
    trained = torch.compile(model) if compile else model

    def step() -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.float16 if device.type == "cuda" else torch.bfloat16):
            output = trained(images)
            loss = loss_of(output, targets)
        scaler(loss, optimizer, parameters=model.parameters())
        optimizer.zero_grad()
        return loss.detach()

    return step
