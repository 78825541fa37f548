"""One step of a copy of a model, recorded: what each module received and returned, and all gradients.

Random operators draw equal numbers in every recorded step.
"""

import math
import random
import warnings
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from cl_train.comparison.timed_model import Layout, LossFunction, model_in_layout, noise, place_batch
from cl_train.memory_format.model_call import call_model, output_tensors, random_state_restored
from cl_train.step.precision import Precision, autocast, kernel_selection

MOST_ELEMENTS = 2**16  # recorded per tensor, to bound memory; a wrong layout changes nearly every element


@dataclass(frozen=True)
class Task:
    """The settings that all runs of a parity check share."""

    model: nn.Module
    batch: Any
    device: torch.device
    loss: LossFunction | None
    output: str | None
    seed: int
    modes: tuple[str, ...] = ("infer", "train")


# Samples of the tensors of a step with their names, in the order in which they were computed: "forward" ("input of X",
# "output of X"), "results" ("result 0", the user's own "loss"), "gradients" ("gradient of P", last layer first) and
# "statistics" ("statistics of X"); the first two also of a pass in eval mode, as "eval forward" and "eval results".
Record = dict[str, list[tuple[str, torch.Tensor]]]


def run_step(task: Task, layout: Layout, precision: Precision, dtype: torch.dtype | None = None) -> Record:
    """A fresh copy in eval mode (forward), then in training mode (forward, loss, backward), as `task.modes` says.

    Random numbers are equal in all runs.

    Args:
        dtype: cast the floating weights and inputs to this dtype, without autocast (the float64 reference).
    """
    model = model_in_layout(task.model, layout, precision, task.device)
    if dtype is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on complex parameters, which keep their dtype
            model.to(dtype)
    batch = place_batch(task.batch, task.device, dtype or precision.input_dtype, layout.memory_format)
    record: Record = {}
    with (
        random_state_restored(task.device),
        kernel_selection(tf32=precision.tf32 and dtype is None, autotune=False),
        EqualRandomness(task.seed),
    ):
        cast = autocast(precision if dtype is None else Precision("fp32"), task.device)
        if "infer" in task.modes:
            with cast, torch.no_grad():
                record |= _eval_pass(model, batch, None if "train" in task.modes else task.output)
        if "train" in task.modes:
            record = _training_pass(model, batch, task, cast) | record  # a difference of both is reported there
    return record


def _eval_pass(model: nn.Module, batch: Any, key: str | None) -> Record:
    model.eval()
    forward = list[tuple[str, torch.Tensor]]()
    with _watched(model, forward, []):
        results = output_tensors(call_model(model, batch), key)
    return {"eval forward": forward, "eval results": _named(results)}


def _training_pass(model: nn.Module, batch: Any, task: Task, cast: AbstractContextManager[object]) -> Record:
    model.train()
    forward, called = list[tuple[str, torch.Tensor]](), list[str]()
    with _watched(model, forward, called), cast:
        output = call_model(model, batch)
        results = output_tensors(output, task.output)
        loss = task.loss(output) if task.loss is not None else _weighted_sum(results)
    if loss.requires_grad:
        loss.backward()
    gradients = [(name, parameter.grad) for name, parameter in _in_backward_order(model, called)]
    return {
        "forward": forward,
        "results": _named(results) + ([("loss", sample(loss))] if task.loss is not None else []),
        "gradients": [(f"gradient of {name}", sample(grad)) for name, grad in gradients if grad is not None],
        "statistics": _statistics(model),
    }


def _named(results: list[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return [(f"result {index}", sample(tensor)) for index, tensor in enumerate(results)]


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Up to `MOST_ELEMENTS` evenly spaced elements in logical order, float64 on the CPU. Waits for the device."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    step = math.ceil(tensor.numel() / MOST_ELEMENTS) | 1 if tensor.numel() > MOST_ELEMENTS else 1  # odd: no alias
    return tensor.reshape(-1)[::step].to("cpu", torch.float64, copy=True)


def _weighted_sum(results: list[torch.Tensor]) -> torch.Tensor:
    """A loss for outputs of any shape: fixed random weights, so that the gradients of the elements differ."""
    total = torch.zeros((), dtype=torch.float64)
    for tensor in results:
        values = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()
        weights = torch.empty_like(values).copy_(noise(tuple(values.shape)))
        total = total + (values * weights).sum().cpu() / math.sqrt(values.numel() or 1)
    return total


@contextmanager
def _watched(model: nn.Module, forward: list[tuple[str, torch.Tensor]], called: list[str]) -> Iterator[None]:
    """Record inputs and outputs as modules run, before a later in-place operator overwrites them."""
    seen: dict[int, tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = {}

    def note(what: str, values: Any) -> None:
        for value in tree_leaves(values):
            if not isinstance(value, torch.Tensor):
                continue
            known = seen.get(id(value))
            if known is None or known[0]() is not value or known[1] != value._version:
                known = seen[id(value)] = (weakref.ref(value), value._version, sample(value))
            forward.append((what, known[2]))

    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        called.append(name)
        note(f"input of {name}", (args, kwargs))

    def after(name: str, module: nn.Module, args: Any, output: Any) -> None:
        note(f"output of {name}", output)

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule) and name:
                continue  # its modules are called from TorchScript, which does not run hooks
            named = name or "the model"
            hooks.callback(module.register_forward_pre_hook(partial(before, named), with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(partial(after, named)).remove)
        yield


def _in_backward_order(model: nn.Module, called: list[str]) -> list[tuple[str, nn.Parameter]]:
    """The parameters; those of the module that ran last come first."""
    position = {name: index for index, name in enumerate(called)}
    return sorted(model.named_parameters(), key=lambda item: -position.get(item[0].rpartition(".")[0], -1))


def _statistics(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Running means and standard deviations, one vector per BatchNorm: the unit of a mean's error is the spread."""
    return [
        (f"statistics of {name}", torch.cat([sample(module.running_mean), sample(module.running_var).sqrt()]))
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        and module.running_mean is not None
        and module.running_var is not None
    ]


# --- random numbers ---------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")


class EqualRandomness(TorchDispatchMode):
    """While active, random operators draw the same logical values for every memory format, dtype and device.

    `torch.rand_like(x)` fills memory in storage order, so the same seed gives a channels_last tensor and a contiguous
    one different logical values. Here every random operator of the forward and backward pass is computed on contiguous
    float64 copies of its arguments on the CPU, seeded by the number of the call, and the results are copied into the
    tensors that the model receives. Fused attention with dropout is seeded only: its kernels generate their own random
    numbers. The generators of Python and numpy are seeded once, at the start.
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
