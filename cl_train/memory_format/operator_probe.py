"""One operator of torch in channels_last: in eager mode, as fake tensors and decompositions predict
it, and compiled. Imports torch alone: with a call of `show` this file is a program for an issue.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

# By the number of dimensions of a tensor
CHANNELS_LAST_BY_DIM = {4: torch.channels_last, 5: torch.channels_last_3d}


def image_of(expression: str, device: str | torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Noise x [N,C,H,W] or v [N,C,D,H,W], all above 1, so that no probe is ambiguous."""
    shape = (2, 8, 4, 6, 6) if _argument(expression) == "v" else (2, 8, 8, 8)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return values.to(device, dtype, memory_format=CHANNELS_LAST_BY_DIM[len(shape)]).requires_grad_()


def _argument(expression: str) -> str:
    return "v" if "(v" in expression or "[v" in expression else "x"


def probe_function(expression: str, image: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """`expression` as a function of an image or a video like `image`."""
    ones = partial(torch.ones, dtype=image.dtype, device=image.device)

    def weight(*shape: int) -> torch.Tensor:
        return ones(*shape).to(memory_format=CHANNELS_LAST_BY_DIM[len(shape)])

    names = {"F": F, "torch": torch, "ones": ones, "weight": weight}
    function: Callable[[torch.Tensor], torch.Tensor]
    function = eval(f"lambda {_argument(expression)}: {expression}", names)
    return function


def differentiated(
    function: Callable[[torch.Tensor], torch.Tensor], image: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output, and the gradient of `image` for a channels_last gradient of the output."""
    output = function(image)
    if not output.requires_grad:
        return output, None
    gradient = torch.linspace(-1, 1, output.numel(), device=image.device).to(output.dtype)
    gradient = gradient.reshape(output.shape)
    if output.dim() > 3:
        gradient = gradient.to(memory_format=CHANNELS_LAST_BY_DIM[output.dim()])
    # not .backward(), which gives a leaf's gradient the strides of the leaf
    return output, torch.autograd.grad(output, image, gradient)[0]


def fake(function: Callable[..., Any], image: torch.Tensor) -> Any:
    """Runs on fake tensors, which have strides and no values: what a compiler plans with."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    faked = mode.from_tensor(image)
    with mode:
        return differentiated(function, faked)


def decompose(function: Callable[..., Any], image: torch.Tensor) -> Any:
    """Each operator is replaced by its decomposition into core operators, if it has one."""
    table = torch.export.default_decompositions()

    class Decomposed(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            if func not in table:
                return func(*args, **(kwargs or {}))
            with self:
                return table[func](*args, **(kwargs or {}))

    with Decomposed():
        return differentiated(function, image)


def compile(function: Callable[..., Any], image: torch.Tensor) -> Any:
    """Runs compiled by inductor, which needs a compiler."""
    torch.compiler.reset()
    return differentiated(torch.compile(function, dynamic=False), image)


AGAINST = {"fake": fake, "decompose": decompose, "compile": compile}


def show(expression: str, device: str, dtype: torch.dtype, *ways: str) -> None:
    """Print the strides of the output and the gradient, in eager mode and as in AGAINST."""
    print("torch", torch.__version__)
    image = image_of(expression, device, dtype)
    function = probe_function(expression, image)
    eager = differentiated(function, image)
    for way in ("eager", *ways):
        results = AGAINST[way](function, image) if way != "eager" else eager
        for direction, expected, other in zip(("forward", "backward"), eager, results, strict=True):
            if expected is None or other is None:
                continue
            print(f"{direction} {way}: strides {other.stride()}")
            if type(other) is torch.Tensor:  # a fake one has no values
                deviation = (expected.double() - other.double()).abs().max().item()
                print(f"{direction} {way}: values differ by {deviation:.2g}")
