"""One step of a model, recorded: what its modules read and return, its results and gradients."""

import math
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cl_train.measure.timed_step import Workload, model_in_layout, noise, place_batch
from cl_train.memory_format.convert import Layout
from cl_train.memory_format.model_call import call_model, output_tensors
from cl_train.memory_format.operator_recorder import schema_of
from cl_train.models.facts import refuse_known_crash
from cl_train.step.backup import random_state_restored
from cl_train.step.precision import Precision, autocast, kernel_selection
from cl_train.system.tensors import tensors_in

# Recorded per tensor, to bound memory; a wrong layout changes nearly every element.
MOST_ELEMENTS = 2**16

# Tensors of a step by name, in the order of computation. Kinds: "forward" ("input of X", "output of
# X"), "results" ("result 0", "loss"), "gradients", "statistics"; "eval forward", "eval results".
Samples = list[tuple[str, torch.Tensor]]
Record = dict[str, Samples]


def recorded_step(
    model: nn.Module,
    workload: Workload,
    modes: Sequence[bool],
    seed: int,
    layout: Layout,
    dtype: torch.dtype | None = None,
) -> Record:
    """Returns what a copy of `model` in `layout` computes, in `modes`: values of `training`.

    Random numbers are equal in all steps. With `dtype` the weights and inputs have it, and there is
    no autocast. Raises ConfigError: torch is known to crash on the step.
    """
    device = workload.device
    precision = workload.precision if dtype is None else Precision("fp32")
    model = model_in_layout(model, layout, precision, device)
    if dtype is not None:
        with warnings.catch_warnings(action="ignore"):  # complex parameters keep their dtype
            model.to(dtype)
    input_dtype = dtype or precision.input_dtype
    batch = place_batch(workload.batch, device, input_dtype, layout.memory_format)

    def forward() -> Any:
        with autocast(precision, device):
            return call_model(model, batch)

    if layout.is_channels_last and True in modes:
        refuse_known_crash(model, batch)
    record: Record = {}
    kernels = kernel_selection(tf32=precision.tf32, autotune=False)
    with random_state_restored(device), kernels, EqualRandomness(seed):
        for is_training in modes:
            # The entry of the output may exist in training only.
            output_key = workload.output if is_training is modes[-1] else None
            gradients = nullcontext() if is_training else torch.no_grad()
            with autocast(precision, device), gradients, _watched(model.train(is_training)) as seen:
                output = call_model(model, batch)
                results = output_tensors(output, output_key)
                named = [(f"result {n}", sample(result)) for n, result in enumerate(results)]
                if not is_training:
                    record |= {"eval forward": seen, "eval results": named}
                    continue
                if workload.loss is None:
                    loss = _weighted_sum(results)
                else:
                    loss = workload.loss(output)
                    named.append(("loss", sample(loss)))
            # In front: a difference in both modes is reported in training.
            forward_record = {"forward": seen, "results": named}
            record = forward_record | _backward(model, loss, seen) | record
    return record


def _backward(model: nn.Module, loss: torch.Tensor, forward: Samples) -> Record:
    """The gradients, those of the modules that ran last first, and BatchNorm's statistics."""
    if loss.requires_grad:
        loss.backward()
    position = {name.partition(" of ")[2]: index for index, (name, _) in enumerate(forward)}
    parameters = sorted(
        model.named_parameters(), key=lambda item: -position.get(item[0].rpartition(".")[0], -1)
    )
    gradients = [
        (f"gradient of {name}", sample(parameter.grad))
        for name, parameter in parameters
        if parameter.grad is not None
    ]
    statistics: Samples = []
    for name, module in model.named_modules():
        mean, variance = (getattr(module, f"running_{what}", None) for what in ("mean", "var"))
        if isinstance(mean, torch.Tensor) and isinstance(variance, torch.Tensor):
            # The spread is the unit of both.
            values = torch.cat([sample(mean), sample(variance).sqrt()])
            statistics.append((f"statistics of {name}", values))
    return {"gradients": gradients, "statistics": statistics}


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Up to `MOST_ELEMENTS` evenly spaced elements in logical order, float64 on the CPU.

    Waits for the device.
    """
    tensor = _real(tensor.detach())
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    step = math.ceil(tensor.numel() / MOST_ELEMENTS) | 1  # odd: no alias
    return tensor.reshape(-1)[::step].to("cpu", torch.float64, copy=True)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _weighted_sum(results: list[torch.Tensor]) -> torch.Tensor:
    """A loss for outputs of any shape: fixed random weights give each element its own gradient."""
    total = torch.zeros((), dtype=torch.float64)
    for result in results:
        values = _real(result).double()
        weights = torch.empty_like(values).copy_(noise(tuple(values.shape)))
        total = total + (values * weights).sum().cpu() / math.sqrt(values.numel() or 1)
    return total


@contextmanager
def _watched(model: nn.Module) -> Iterator[Samples]:
    """Record inputs and outputs as modules run: a later operator may overwrite them in place."""
    forward: Samples = []

    def note(what: str, module: nn.Module, *values: Any) -> None:
        for value in tensors_in(values):
            values_now = sample(value)
            if forward and torch.equal(forward[-1][1], values_now):
                values_now = forward[-1][1]  # one copy for modules that pass a tensor on
            forward.append((what, values_now))

    def note_output(what: str, module: nn.Module, _: Any, output: Any) -> None:
        note(what, module, output)

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule) and name:
                continue  # its modules are called from TorchScript, which does not run hooks
            place = name or "the model"
            before = partial(note, f"input of {place}")
            after = partial(note_output, f"output of {place}")
            hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(after))
        yield forward


class EqualRandomness(TorchDispatchMode):
    """Random operators draw the same logical values for every memory format, dtype and device.

    `torch.rand_like(x)` fills memory in storage order. Here the model receives the results of
    random operators on contiguous float64 copies of their arguments on the CPU, seeded by the
    number of the call. Fused attention, whose kernels draw their own numbers, is only seeded.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        random.seed(seed)
        np.random.seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        self.seed += 1
        torch.manual_seed(self.seed)
        drawn_args = [_plain(value) for value in args]
        of_layout = {"memory_format", "pin_memory", "layout"}
        drawn_kwargs = {key: _plain(value) for key, value in kwargs.items() if key not in of_layout}
        result = func(*args, **kwargs)  # has the right layout, dtype and device, but other values
        if "attention" in func.name():
            return result

        torch.manual_seed(self.seed)
        drawn = func(*drawn_args, **drawn_kwargs)
        for index, argument in enumerate(schema_of(func).arguments[: len(args)]):
            if argument.alias_info is not None and argument.alias_info.is_write:
                args[index].copy_(drawn_args[index])
        for target, source in zip(tensors_in(result), tensors_in(drawn), strict=True):
            if not any(target is argument for argument in args):
                target.copy_(source)
        return result


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        dtype = torch.float64 if value.is_floating_point() else None
        return value.detach().to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return None if isinstance(value, torch.Generator) else value
