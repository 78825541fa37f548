"""One step of a copy of a model in eval and in training mode, for the checks of parity; and its
record: what its modules read and return, its results, gradients and buffers.
"""

import math
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cl_train.measure.kernels import computes
from cl_train.measure.timed_step import Workload, model_in_layout, noise, place_batch
from cl_train.memory_format.convert import Layout
from cl_train.memory_format.layout import CHANNELS_LAST_BY_DIM, classify
from cl_train.memory_format.model_call import call_model, output_tensors
from cl_train.memory_format.operator_recorder import OriginRecorder, schema_of
from cl_train.step.backup import random_state_restored
from cl_train.step.precision import BATCH_NORMS, Precision, autocast, kernel_selection
from cl_train.system.tensors import map_tensors, tensors_in

# Recorded per tensor, to bound memory; of larger ones a sample, and their borders.
MOST_ELEMENTS = 2**16

# Tensors of a step by name, in the order of computation. Kinds: "forward" ("input of X", "output of
# X"), "results" ("result 0", "loss"), "gradients", "buffers"; "eval forward", "eval results".
Samples = list[tuple[str, torch.Tensor]]
Record = dict[str, Samples]


@dataclass
class ParityStep:
    """A copy of a model in one layout, with its batch; each run draws the same random numbers.

    Parameters that the initialisation makes constant hold seeded values instead: behind a scale of
    zero every gradient is zero, right or wrong. BatchNorm's statistics are those of the last batch.
    """

    model: nn.Module
    batch: Any
    precision: Precision
    workload: Workload
    modes: Sequence[bool]  # values of `training`
    seed: int
    is_reference: bool  # contiguous, also where the model's own code converts

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
        """`dtype`: of weights and inputs, without autocast, instead of the workload's precision."""
        precision = workload.precision if dtype is None else Precision("fp32")
        copied = model_in_layout(model, layout, precision, workload.device)
        _give_values(copied, seed)
        if dtype is not None:
            with warnings.catch_warnings(action="ignore"):  # complex parameters keep their dtype
                copied.to(dtype)
        input_dtype = dtype or precision.input_dtype
        batch = place_batch(workload.batch, workload.device, input_dtype, layout.memory_format)
        is_reference = not layout.is_channels_last
        return cls(copied, batch, precision, workload, modes, seed, is_reference)

    @contextmanager
    def running(self) -> Iterator[None]:
        device = self.workload.device
        with ExitStack() as stack:
            stack.enter_context(kernel_selection(tf32=self.precision.tf32, autotune=False))
            stack.enter_context(random_state_restored(device))
            stack.enter_context(EqualRandomness(self.seed))
            if self.is_reference:
                stack.enter_context(ContiguousResults())
            yield

    def forward(self, is_training: bool) -> Any:
        self.model.train(is_training)
        gradients = nullcontext() if is_training else torch.no_grad()
        # A model that works in place takes no leaf of autograd.
        batch = map_tensors(lambda one: one.clone() if one.requires_grad else one, self.batch)
        with gradients, autocast(self.precision, self.workload.device):
            return call_model(self.model, batch)

    def results(self, output: Any, is_training: bool) -> list[torch.Tensor]:
        """The entry of the output may exist in training only."""
        key = self.workload.output if is_training is self.modes[-1] else None
        return output_tensors(output, key)

    def loss(self, output: Any) -> torch.Tensor:
        if self.workload.loss is None:
            return _weighted_sum(self.results(output, True))
        with autocast(self.precision, self.workload.device):
            return self.workload.loss(output)

    def run(self, recorder: OriginRecorder | None = None) -> bool:
        """Both modes, watched by `recorder`; whether there was a backward pass."""
        has_gradient = False
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            self.batch = map_tensors(_with_gradient, self.batch)
        with nullcontext() if recorder is None else recorder.watching(), self.running():
            for is_training in self.modes:
                output = self.forward(is_training)
                if is_training and (loss := self.loss(output)).requires_grad:
                    loss.backward()
                    has_gradient = True
        return has_gradient

    def record(self) -> Record:
        """What the step computes, sampled."""
        record: Record = {}
        with self.running():
            self.batch = map_tensors(_with_gradient, self.batch)
            for is_training in self.modes:
                with _watched(self.model) as forward:
                    output = self.forward(is_training)
                results = enumerate(self.results(output, is_training))
                named = [(f"result {n}", sample(result)) for n, result in results]
                if not is_training:
                    record |= {"eval forward": forward, "eval results": named}
                    continue
                loss = self.loss(output)
                named.append(("loss", sample(loss)))
                if loss.requires_grad:
                    loss.backward()
                # In front: a difference in both modes is reported in training.
                trained = {
                    "forward": forward,
                    "results": named,
                    "gradients": self._gradients(forward),
                }
                record = trained | {"buffers": self._buffers()} | record
        return record

    def _gradients(self, forward: Samples) -> Samples:
        """Those of the modules that ran last first; then that of the input."""
        position = {name.partition(" of ")[2]: index for index, (name, _) in enumerate(forward)}
        parameters = sorted(
            self.model.named_parameters(),
            key=lambda item: -position.get(item[0].rpartition(".")[0], -1),
        )
        inputs = [("the input", tensor) for tensor in tensors_in(self.batch)]
        named = [(name, tensor.grad) for name, tensor in (*parameters, *inputs)]
        return [(f"gradient of {name}", sample(grad)) for name, grad in named if grad is not None]

    def _buffers(self) -> Samples:
        named = [*self.model.named_buffers()]
        return [(f"buffer {name}", sample(one)) for name, one in named if one.is_floating_point()]


def _with_gradient(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.requires_grad_(tensor.is_floating_point())


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


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Elements in logical order, float64 on the CPU: all, or of more than `MOST_ELEMENTS` evenly
    spaced ones with the borders of images. Waits for the device.
    """
    tensor = _real(tensor.detach())
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.reshape(-1)
    step = math.ceil(tensor.numel() / MOST_ELEMENTS)
    parts = [flat]
    if step > 1:
        while math.gcd(step, tensor.numel()) > 1:  # else it sees the same columns in every image
            step += 1
        parts = [flat[::step]]
        if tensor.dim() >= 4:
            borders = (tensor.select(dim, end) for dim in (-2, -1) for end in (0, -1))
            parts += [border.reshape(-1)[: MOST_ELEMENTS // 4] for border in borders]
    return torch.cat(parts).to("cpu", torch.float64, copy=True)


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


class ContiguousResults(TorchDispatchMode):
    """What operators compute is contiguous, unless the code asks for another format: a reference.

    Behind a permuted LayerNorm, as in ConvNeXt, results are channels_last in every layout, and code
    that is wrong for it would be compared with itself.
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
        if "attention" in func.name():  # has no number: torch chooses it by the strides
            torch.manual_seed(self.seed)
            return func(*args, **kwargs)
        self.seed += 1
        torch.manual_seed(self.seed)
        drawn_args = [_plain(value) for value in args]
        of_layout = {"memory_format", "pin_memory", "layout"}
        drawn_kwargs = {key: _plain(value) for key, value in kwargs.items() if key not in of_layout}
        result = func(*args, **kwargs)  # has the right layout, dtype and device, but other values

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
