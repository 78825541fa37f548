"""The same random numbers for every memory format, dtype and device, to compare models with random operators.

`torch.rand_like(x)` fills memory in storage order, so the same seed gives a channels_last tensor and a contiguous one
different logical values. Here every random operator of the forward and backward pass is computed on contiguous float64
copies of its arguments on the CPU, seeded by the number of the call, and the results are copied into the tensors that
the model receives.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CPU = torch.device("cpu")


class EqualRandomness(TorchDispatchMode):
    """While active, random operators draw the same logical values in the same order of calls.

    Fused attention with dropout is seeded only: its kernels generate their own random numbers. The generators of Python
    and numpy are seeded once, at the start.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        random.seed(seed)
        np.random.seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        self.seed += 1
        torch.manual_seed(self.seed)
        if "attention" in func.name():
            return func(*args, **kwargs)
        drawn_args, drawn_kwargs = tree_map(_plain, args), tree_map(_plain, kwargs)
        for name in ("memory_format", "pin_memory", "layout"):
            drawn_kwargs.pop(name, None)
        result = func(*args, **kwargs)  # has the right layout, dtype and device; its values are replaced below
        torch.manual_seed(self.seed)
        drawn = func(*drawn_args, **drawn_kwargs)
        for index, argument in enumerate(func._schema.arguments[: len(args)]):
            if argument.alias_info is not None and argument.alias_info.is_write:
                args[index].copy_(drawn_args[index])
        for target, source in zip(tree_leaves(result), tree_leaves(drawn), strict=True):
            if isinstance(target, torch.Tensor) and all(target is not argument for argument in args):
                target.copy_(source)
        return result


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        dtype = torch.float64 if value.is_floating_point() else None
        return value.detach().to(CPU, dtype, copy=True, memory_format=torch.contiguous_format)
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    if isinstance(value, torch.device):
        return CPU
    return None if isinstance(value, torch.Generator) else value
