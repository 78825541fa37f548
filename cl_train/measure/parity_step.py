"""One step of a copy of a model in eval and in training mode, for the checks of parity."""

import math
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cl_train.measure.kernels import as_real, computes
from cl_train.measure.timed_step import Workload, model_in_layout, noise, place_batch
from cl_train.memory_format.convert import Layout
from cl_train.memory_format.layout import CHANNELS_LAST_BY_DIM, classify, uncompiled
from cl_train.memory_format.model_call import call_model, output_tensors
from cl_train.memory_format.operator_recorder import OriginRecorder, schema_of
from cl_train.step.backup import random_state_restored
from cl_train.step.precision import BATCH_NORMS, Precision, autocast, kernel_selection
from cl_train.system.tensors import map_tensors, tensors_in

# The names are "result 0 in eval mode", "result 0", "gradient of NAME", "buffer NAME".
Results = dict[str, torch.Tensor]
Roots = list[tuple[torch.Tensor, torch.Tensor | None]]  # where backward begins, with gradients


@dataclass
class ParityStep:
    """A copy of a model in one layout, with its batch; each run draws the same random numbers.

    Constant parameters hold seeded values instead: behind a scale of zero every gradient is zero,
    right or wrong. BatchNorm's statistics are those of the last batch.
    """

    model: nn.Module
    batch: Any
    precision: Precision
    workload: Workload
    modes: Sequence[bool]  # values of `training`
    seed: int
    is_reference: bool = False  # contiguous, also where the model's own code converts
    is_compiled: bool = False
    dtype: torch.dtype | None = None  # of weights and inputs, without autocast

    @classmethod
    def of(
        cls,
        model: nn.Module,
        workload: Workload,
        modes: Sequence[bool],
        layout: Layout,
        seed: int,
        dtype: torch.dtype | None = None,
    ) -> "ParityStep":
        """Makes the step. `dtype`: used instead of the workload's precision; the inputs then have
        gradients, too.
        """
        precision = workload.precision if dtype is None else Precision("fp32")
        copied = model_in_layout(model, layout, precision, workload.device)
        _give_values(copied, seed)
        if dtype is not None:
            with warnings.catch_warnings(action="ignore"):  # complex parameters keep their dtype
                copied.to(dtype)
        input_dtype = dtype or precision.input_dtype
        batch = place_batch(workload.batch, workload.device, input_dtype, layout.memory_format)
        if dtype is not None or not any(one.requires_grad for one in copied.parameters()):
            batch = map_tensors(leaf, batch)
        step = cls(copied, batch, precision, workload, modes, seed, dtype=dtype)
        return replace(step, is_reference=not layout.is_channels_last)

    def call(self, batch: Any) -> Any:
        return call_model(self.model, batch)

    def results(self, output: Any, is_training: bool) -> list[torch.Tensor]:
        """Returns the tensors to compare; the chosen entry may exist only in training."""
        key = self.workload.output if is_training is self.modes[-1] else None
        return output_tensors(output, key)

    def roots(self, output: Any, results: list[torch.Tensor]) -> Roots:
        """Returns a loss for any output: fixed random weights give each element its gradient."""
        if self.workload.loss is not None:
            with autocast(self.precision, self.workload.device):
                return [(self.workload.loss(output), None)]
        total = torch.zeros((), dtype=torch.float64)
        for result in results:
            values = as_real(result).double()
            weights = torch.empty_like(values).copy_(noise(tuple(values.shape)))
            total = total + (values * weights).sum().cpu() / math.sqrt(values.numel() or 1)
        return [(total, None)]

    def run(self, recorder: OriginRecorder | None = None) -> Results:
        computed: Results = {}
        with nullcontext() if recorder is None else recorder.watching(), self._state():
            for is_training in self.modes:
                mode = "" if is_training else " in eval mode"
                self.model.train(is_training)
                # A model that works in place takes no leaf; a compiled one warns of other tensors.
                batch = self.batch if self.is_compiled else map_tensors(_not_leaf, self.batch)
                gradients = torch.set_grad_enabled(is_training)
                with gradients, autocast(self.precision, self.workload.device):
                    output = self.call(batch)
                results = self.results(output, is_training)
                computed |= {f"result {n}{mode}": one for n, one in enumerate(results)}
                roots = self.roots(output, results) if is_training else []
                if roots := [root for root in roots if root[0].requires_grad]:
                    outputs, given = zip(*roots, strict=True)
                    torch.autograd.backward(outputs, given)
        model = uncompiled(self.model)
        inputs = ((f"input {n}", one) for n, one in enumerate(tensors_in(self.batch)))
        for name, one in (*inputs, *model.named_parameters()):
            if one.grad is not None:
                computed[f"gradient of {name}"] = one.grad
        floating = ((n, one) for n, one in model.named_buffers() if one.is_floating_point())
        computed |= {f"buffer {name}": one for name, one in floating}
        return {name: one.detach().to_dense() for name, one in computed.items()}

    @contextmanager
    def _state(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(kernel_selection(tf32=self.precision.tf32, autotune=False))
            stack.enter_context(random_state_restored(self.workload.device))
            if not self.is_compiled:  # nothing is compiled below a mode that sees its operators
                stack.enter_context(EqualRandomness(self.seed))
            if self.is_reference:
                stack.enter_context(ContiguousResults())
            yield


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _not_leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.requires_grad else tensor


def _give_values(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, BATCH_NORMS) and module.momentum is not None:
            module.momentum = 1.0
    for name, parameter in model.named_parameters():
        is_plain = parameter.is_floating_point() and parameter.layout == torch.strided
        if not is_plain or parameter.numel() < 2 or 0 in parameter.stride():
            continue
        if bool(parameter.amin() != parameter.amax()):
            continue
        values = torch.rand(parameter.shape, generator=generator)
        fan_in = parameter[0].numel()
        if fan_in > 1:  # a weight, such as the last convolution of a branch
            values = (2 * values - 1) * math.sqrt(3 / fan_in)
        elif name.rpartition(".")[2] == "bias":
            values = 0.2 * values - 0.1
        else:
            values += 0.5
        parameter.data.copy_(values)


class ContiguousResults(TorchDispatchMode):
    """Makes the results of operators contiguous, unless the code asks for another format.

    Behind a permuted LayerNorm, as in ConvNeXt, results are channels_last in every layout: code
    that is wrong for channels_last would be compared with itself.
    """

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if kwargs.get("memory_format") in CHANNELS_LAST_BY_DIM.values() or not computes(function):
            return result
        given = {id(tensor) for tensor in tensors_in((args, kwargs))}

        def contiguous(tensor: torch.Tensor) -> torch.Tensor:
            is_own = id(tensor) in given or classify(tensor) != "channels_last"
            return tensor if is_own else tensor.contiguous()

        return map_tensors(contiguous, result)


class EqualRandomness(TorchDispatchMode):
    """Makes random operators draw the same values for every memory format, dtype and device.

    `torch.rand_like(x)` fills memory in storage order; so the model receives what contiguous
    float64 copies on the CPU draw, seeded by the number of the call. Fused attention, whose kernels
    draw their own numbers, is only seeded.
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
        if "attention" in func.name():  # it has no number, as torch chooses it by the strides
            torch.manual_seed(self.seed)
            return func(*args, **kwargs)
        self.seed += 1
        drawn_args = [_plain(value) for value in args]
        of_layout = {"memory_format", "pin_memory", "layout"}
        drawn_kwargs = {key: _plain(value) for key, value in kwargs.items() if key not in of_layout}
        result = func(*args, **kwargs)  # right in layout, dtype and device; the values are others

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
