"""The step that is timed: a copy of a model in one layout, and the step that training would run."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cl_train.config.schema import AugmentConfig
from cl_train.data.device import Batch, MixLabels
from cl_train.data.transforms import label_mix
from cl_train.errors import ConfigError
from cl_train.memory_format.convert import CONTIGUOUS, Layout, convert
from cl_train.memory_format.layout import classify, images_in, named_tensors, refuse_lazy
from cl_train.memory_format.model_call import call_model, mean_square, output_tensors
from cl_train.models.facts import ModelFacts, facts_of
from cl_train.models.sources import copy_model, usual_image_size
from cl_train.step.backup import random_state_restored
from cl_train.step.cuda_graph import Recorder, make_capturable, use_tensor_rates
from cl_train.step.precision import Precision, autocast, cast_model, kernel_selection
from cl_train.step.train_step import (
    StepParts,
    StepSettings,
    compiled,
    make_step,
    train_step,
    update_weights,
)
from cl_train.step.utilisation import utilisation
from cl_train.system.distributed import Dist
from cl_train.system.machine import keep_freed_memory, peak_memory_of_step_gib, step_times_s
from cl_train.system.tensors import map_tensors, tensors_in

LossFunction = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class Workload:
    """The input, the loss and the settings of one step; `compare_layouts` explains them."""

    batch_size: int  # images per micro-step
    input_shape: tuple[int, ...]  # one image (C, H, W) or video (C, T, H, W)
    settings: StepSettings
    device: torch.device
    mode: str = "train"  # or "infer"
    batch: Any = None
    loss: LossFunction | None = None
    output: str | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size={self.batch_size}: a step needs an image at least")

    @property
    def precision(self) -> Precision:
        return self.settings.precision

    @property
    def images_per_step(self) -> int:
        micro_steps = self.settings.accumulate_steps if self.mode == "train" else 1
        return self.batch_size * micro_steps

    def loss_of(self, output: Any) -> torch.Tensor:
        """Returns the loss of a model that is no classifier of images."""
        if self.loss is not None:
            return self.loss(output)
        return mean_square(output_tensors(output, self.output))


class TimedStep:
    """A copy of the model whose `step` is that of training or inference.

    Raises ConfigError: torch is known to crash on this model in this layout.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        workload: Workload,
        facts: ModelFacts | None = None,  # of the same model and workload, if known
    ) -> None:
        settings, device = workload.settings, workload.device
        self.layout, self.workload = layout, workload
        self.model = model_in_layout(model, layout, settings.precision, device)
        batch = workload.batch
        if batch is None:
            batch = noise((workload.batch_size, *workload.input_shape))
        dtype = settings.precision.input_dtype
        self.inputs = place_batch(batch, device, dtype, layout.memory_format)

        is_trained = workload.mode == "train"
        self.facts = facts or facts_of(self.model, self.inputs, training=is_trained)
        self._called = self.model  # compiled, if the settings say so
        self.parts: StepParts | None = None
        self.targets: torch.Tensor | None = None  # labels of a classifier
        self._mix: MixLabels | None = None
        if is_trained:
            self._prepare_training()
        else:
            self.model.eval()
            if settings.compile:
                self._called = compiled(self.model)

        # Share in channels_last of the bytes that convolutions of a contiguous eager model return.
        self.by_itself_pct: float | None = None
        self.peak_gib: float | None = None  # memory of an eager step, without other models
        self._steps = 0
        self.step: Callable[[], object] = self.eager_step
        self._recorder = Recorder(device) if settings.cuda_graph else None

    def _prepare_training(self) -> None:
        settings, device = self.workload.settings, self.workload.device
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            why = "no parameter of the model requires a gradient"
            raise ConfigError(f"{why}: only inference can be measured")
        has_own_loss = self.workload.loss is not None or self.workload.output is not None
        classes = None if has_own_loss else self.facts.classes
        if classes is not None and isinstance(self.inputs, torch.Tensor):
            generator = torch.Generator().manual_seed(0)
            labels = torch.randint(classes, (len(self.inputs),), generator=generator)
            self.targets = labels.to(device)
            mixing = AugmentConfig(mixup=settings.mixup, cutmix=settings.cutmix)
            self._mix = label_mix(mixing, classes, 0, Dist(0, 1, device))

        self.model.train()
        if self.layout.is_channels_last and device.type == "cpu":
            self.facts.refuse_crash()
        self.parts = make_step(self.model, settings, device)
        if settings.cuda_graph:
            use_tensor_rates(self.parts.optimizer, device)
        self._called = self.parts.wrapped_model

    def forward(self) -> Any:
        with autocast(self.workload.precision, self.workload.device):
            return call_model(self._called, self.inputs)

    def eager_step(self) -> None:
        parts, workload = self.parts, self.workload
        if parts is None:
            with torch.inference_mode():
                self.forward()
            return
        if self.targets is not None:
            train_step(parts, self._micro_batches(self.targets))
        else:
            for _ in range(workload.settings.accumulate_steps):
                with autocast(workload.precision, workload.device):
                    loss = workload.loss_of(self.forward())
                parts.scaler.scale(loss).backward()
            update_weights(parts)
        self._count_step(parts)

    def _micro_batches(self, targets: torch.Tensor) -> list[Batch]:
        batches = [Batch(self.inputs, targets)] * self.workload.settings.accumulate_steps
        if self._mix is None:
            return batches
        mixed = (self._mix(self.inputs, targets, self._steps, n) for n in range(len(batches)))
        return [Batch(*pair) for pair in mixed]

    def _count_step(self, parts: StepParts) -> None:
        self._steps += 1
        parts.update_average(self._steps)

    def first_step(self) -> None:
        """Runs a step: it selects kernels, compiles, creates the optimizer's state and counts
        `by_itself_pct`.
        """
        images = _ConvolvedImages()
        is_counted = not (self.layout.is_channels_last or self.workload.settings.compile)
        with images if is_counted else nullcontext():
            self.warm_up()
        self.by_itself_pct = images.channels_last_pct if is_counted else None

    def warm_up(self) -> None:
        with self._on_recorders_stream():
            self.eager_step()

    def record(self) -> None:
        """Records the step as a CUDA graph, if the workload asks for it.

        Call it after the eager steps of all layouts, which cannot use the memory of graphs.
        """
        if self._recorder is None:
            return
        parts, targets = self.parts, self.targets
        if parts is not None:
            make_capturable(parts.optimizer)
        if parts is None or targets is None:
            self.step = self._recorder.record(self.eager_step)
            return
        static = self._micro_batches(targets)
        replay = self._recorder.record(partial(train_step, parts, static))

        def step() -> None:
            for static_batch, batch in zip(static, self._micro_batches(targets), strict=True):
                static_batch.images.copy_(batch.images)
                static_batch.targets.copy_(batch.targets)
            replay()
            self._count_step(parts)

        self.step = step

    def block_times_s(self, steps: int) -> list[float]:
        """Returns the seconds of each of `steps` steps."""
        return step_times_s(self.step, steps, self.workload.device)

    def utilisation(self, images_per_s: float) -> dict[str, Any] | None:
        """Returns `step.utilisation`; None: the FLOPs are unknown."""
        gflop, workload = self.facts.gflop, self.workload
        step_gflop = gflop if self.parts is None else self.facts.step_gflop
        if gflop is None or step_gflop is None:
            return None
        return utilisation(gflop, step_gflop, images_per_s, workload.precision, workload.device)

    def block_and_host_times_s(self, steps: int) -> tuple[list[float], list[float]]:
        """Returns the seconds of each step, and those until the host had launched each step."""
        launched_at = [time.perf_counter()]

        def launch() -> None:
            self.step()
            launched_at.append(time.perf_counter())

        times_s = step_times_s(launch, steps, self.workload.device)
        return times_s, [later - earlier for earlier, later in pairwise(launched_at)]

    def peak_step(self) -> None:
        device = self.workload.device
        with self._on_recorders_stream():
            self.peak_gib = peak_memory_of_step_gib(self.eager_step, self.held_bytes(), device)

    def _on_recorders_stream(self) -> AbstractContextManager[None]:
        return nullcontext() if self._recorder is None else self._recorder.on_stream()

    def held_bytes(self) -> int:
        """Returns bytes of weights, buffers, optimizer state, average, batch; each storage once."""
        state: list[Any] = [self.inputs, *self.model.parameters(), *self.model.buffers()]
        if self.parts is not None:
            optimizer, average = self.parts.optimizer, self.parts.average
            state += [optimizer.param_groups, list(optimizer.state.values())]
            state += [] if average is None else list(average.module.state_dict().values())
        storages = [t.untyped_storage() for t in tensors_in(state) if t.layout == torch.strided]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class _ConvolvedImages(TorchDispatchMode):
    """Counts the bytes that convolutions compute, by layout; their channels are dimension 1."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes: Counter[str] = Counter()

    @property
    def channels_last_pct(self) -> float:
        found = self._bytes
        return 100 * found["channels_last"] / max(found["channels_last"] + found["contiguous"], 1)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        results = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.convolution.default:
            self._bytes[classify(results)] += results.nbytes
        return results


def model_in_layout(
    model: nn.Module, layout: Layout, precision: Precision, device: torch.device
) -> nn.Module:
    """Returns a copy on `device` in the dtypes of `precision` and in `layout`, else contiguous."""
    copied = cast_model(copy_model(model, device), precision)
    convert(copied, CONTIGUOUS)
    if layout.is_channels_last:
        convert(copied, layout)
    return copied


def device_of(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """Returns `device`, by default the model's. Raises ConfigError: no model, or a lazy one."""
    refuse_lazy(model)
    if device is None:
        device = next((tensor.device for tensor in named_tensors(model).values()), "cpu")
    return torch.device(device)


def image_shape(size: int | Iterable[int]) -> tuple[int, ...]:
    """Returns (3, H, W) for an RGB image of `size` pixels; a shape stays as it is."""
    return (3, size, size) if isinstance(size, int) else tuple(size)


def input_shape(model: str, image_size: int | None, frames: int) -> tuple[int, ...]:
    """Returns (3, H, W) for an RGB image, or (3, T, H, W) for a video of `frames`. image_size=None:
    the model's usual size.
    """
    size = image_size or (112 if frames else usual_image_size(model))
    return (3, frames, size, size) if frames else (3, size, size)


def noise(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Returns normal noise, float32 on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def place_batch(
    batch: Any, device: torch.device, dtype: torch.dtype | None, memory_format: torch.memory_format
) -> Any:
    """Returns a copy on `device`, with floating tensors in `dtype` (None: as they are), and those
    of 4 and 5 dimensions in `memory_format`.
    """

    def place(value: torch.Tensor) -> torch.Tensor:
        return value.detach().to(device, dtype if value.is_floating_point() else None, copy=True)

    return images_in(memory_format, map_tensors(place, batch))


@contextmanager
def measurement_state(settings: StepSettings, device: torch.device) -> Iterator[None]:
    """Selects kernels and keeps memory as training does; restores switches and generators."""
    if settings.compile:
        torch.compiler.reset()  # else the model runs eagerly once the recompile limit is reached
    keep_freed_memory(device)
    autotune = not torch.are_deterministic_algorithms_enabled()
    kernels = kernel_selection(tf32=settings.precision.tf32, autotune=autotune)
    with random_state_restored(device), kernels:
        yield
