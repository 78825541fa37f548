"""A copy of a model in one memory format, with its batch and optimizer, and the step that is timed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from cl_train.config.schema import ConfigError, OptimConfig
from cl_train.data.device import Batch
from cl_train.memory_format.convert import convert
from cl_train.memory_format.layout import images_in
from cl_train.memory_format.model_call import call_model, mean_square, output_tensors
from cl_train.models.sources import copy_model
from cl_train.step.cuda_graph import WARM_UP_STEPS, GraphedCall, Recorder, make_capturable
from cl_train.step.optim import build_optimizer
from cl_train.step.precision import MasterWeights, Precision, autocast, cast_model
from cl_train.step.train_step import StepParts, train_step, update_weights
from cl_train.system.machine import peak_memory_of_step_gib, step_times_s

LossFunction = Callable[[Any], torch.Tensor]

LEARNING_RATE = 1e-4  # costs as much as any other rate; random labels barely change the weights at this one


@dataclass(frozen=True)
class Layout:
    """A memory format for the input and, with `conversion` (see `memory_format.convert`), for the model."""

    name: str
    memory_format: torch.memory_format
    conversion: str = "full"
    select: tuple[str, ...] = ()


CONTIGUOUS = Layout("contiguous", torch.contiguous_format)
CHANNELS_LAST = Layout("channels_last", torch.channels_last)
CHANNELS_LAST_CONV = Layout("channels_last_conv", torch.channels_last, "conv")
LAYOUTS = {layout.name: layout for layout in (CONTIGUOUS, CHANNELS_LAST, CHANNELS_LAST_CONV)}


@dataclass(frozen=True)
class Workload:
    """The input, the loss and the settings of one step; `batch`, `loss` and `output` as in `paired.compare_layouts`."""

    batch_size: int
    input_shape: tuple[int, ...]  # of one image (C, H, W) or video (C, T, H, W)
    precision: Precision
    device: torch.device
    mode: str = "train"  # or "infer"
    compile: bool = False
    compile_mode: str = "default"
    cuda_graph: bool = False
    optim: OptimConfig = field(default_factory=OptimConfig)
    batch: Any = None
    loss: LossFunction | None = None
    output: str | None = None


class TimedModel:
    """`step` does what training (or inference) does per step; the original model is unchanged."""

    def __init__(self, model: nn.Module, layout: Layout, workload: Workload) -> None:
        self.layout, self.workload, precision = layout, workload, workload.precision
        self.model = model_in_layout(model, layout, precision, workload.device)
        batch = noise((workload.batch_size, *workload.input_shape)) if workload.batch is None else workload.batch
        self.inputs = place_batch(batch, workload.device, precision.input_dtype, layout.memory_format)
        self._batch = self._labelled_batch()
        self.model.train(workload.mode == "train")
        self._parts: StepParts | None = None
        if workload.mode == "train":
            masters = MasterWeights(self.model, precision)
            parameters = masters.trainable()
            if not parameters:
                raise ConfigError("no parameter of the model requires a gradient: measure mode=infer")
            optimizer = build_optimizer(workload.optim, self.model, parameters, LEARNING_RATE)
            if workload.cuda_graph:
                make_capturable(optimizer, workload.device)
            scaler = torch.amp.GradScaler(workload.device.type, enabled=precision.scales_loss)
            self._parts = StepParts(self.model, masters, optimizer, scaler, precision, workload.device)
        if workload.compile:
            self.model.compile(mode=workload.compile_mode)
        self.step: Callable[[], object] = self.eager_step
        if workload.cuda_graph:
            self.step = GraphedCall(self.eager_step, Recorder(workload.device))

    def _labelled_batch(self) -> Batch | None:
        """The batch for the training step of classifiers; None for other kinds of models or losses."""
        workload = self.workload
        if workload.loss is not None or workload.output is not None or not isinstance(self.inputs, torch.Tensor):
            return None
        self.model.eval()
        with torch.no_grad(), autocast(workload.precision, workload.device):
            output = self.model(self.inputs[:1])
        logits = getattr(output, "logits", output)
        if not isinstance(logits, torch.Tensor) or logits.dim() != 2 or not logits.is_floating_point():
            output_tensors(output)  # refuses an output without tensors
            return None
        generator = torch.Generator().manual_seed(0)
        targets = torch.randint(logits.shape[1], (len(self.inputs),), generator=generator)
        return Batch(self.inputs, targets.to(workload.device))

    def forward(self) -> Any:
        """The model's output for the batch."""
        with autocast(self.workload.precision, self.workload.device):
            return call_model(self.model, self.inputs)

    def eager_step(self) -> None:
        """One step, not replayed; the host does not wait for the device."""
        workload = self.workload
        if self._parts is None:
            with torch.inference_mode():
                self.forward()
        elif self._batch is not None:
            train_step(self._parts, [self._batch])
        else:
            with autocast(workload.precision, workload.device):
                output = self.forward()
                loss = workload.loss(output) if workload.loss else mean_square(output_tensors(output, workload.output))
            self._parts.scaler.scale(loss).backward()
            update_weights(self._parts)

    def block_times_s(self, steps: int) -> list[float]:
        """Seconds of each of `steps` steps. Waits for the device at the end."""
        return step_times_s(self.step, steps, self.workload.device)

    def warm_up(self) -> float:
        """Select kernels, compile, create the optimizer's state, record the graph; returns seconds per step."""
        self.block_times_s(2 + (WARM_UP_STEPS if self.workload.cuda_graph else 0))
        return self.block_times_s(1)[0]

    def peak_memory_gib(self, timed: list["TimedModel"]) -> float:
        """Memory of a process with only this layout in an eager step: the peak less what the others of `timed` hold."""
        other_bytes = sum(other.held_bytes() for other in timed if other is not self)
        return peak_memory_of_step_gib(self.eager_step, self.held_bytes(), other_bytes, self.workload.device)

    def held_bytes(self) -> int:
        """Weights, buffers, optimizer state and batch, each storage once."""
        optimizer = self._parts.optimizer if self._parts else None
        state = [optimizer.param_groups, list(optimizer.state.values())] if optimizer else []
        leaves = tree_leaves([list(self.model.parameters()), list(self.model.buffers()), self.inputs, state])
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided]
        return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


def model_in_layout(model: nn.Module, layout: Layout, precision: Precision, device: torch.device) -> nn.Module:
    """A copy on `device`, in the dtypes of `precision`, first contiguous, then converted to `layout`."""
    copied = cast_model(copy_model(model, device), precision)
    convert(copied, memory_format=torch.contiguous_format)
    if layout.memory_format != torch.contiguous_format:
        convert(copied, layout.conversion, layout.select, layout.memory_format)
    return copied


def noise(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Normal noise of `shape`, float32 on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def place_batch(batch: Any, device: torch.device, dtype: torch.dtype | None, memory_format: torch.memory_format) -> Any:
    """A copy of `batch` on `device`: floating tensors in `dtype`, those with 4 or 5 dimensions in `memory_format`."""

    def place(value: torch.Tensor) -> torch.Tensor:
        return value.detach().to(device, dtype if value.is_floating_point() else None, copy=True)

    return images_in(memory_format, tree_map_only(torch.Tensor, place, batch))
