"""A training step replayed as one CUDA graph: the host launches one thing where an eager step launches a thousand.

What is recorded is `step.train_step` itself. It never waits for the device: the loss scale, the overflow flag and the
decision to skip live in tensors that the fused optimizer and GradScaler read and write in place. What changes from step
to step lies in tensors too: images and labels in static buffers, the learning rate in the optimizer's groups.

A replay repeats what the host did while recording. A model whose forward decides on the host (a Python random number,
a counter, the value of a tensor) is not for this.

Source: PyTorch's notes on CUDA graphs; the order of warm-up, one side stream for it and the recording, and eleven
warm-up steps with DDP are theirs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from cl_train.data.batch import Batch
from cl_train.step.ema import WeightAverage
from cl_train.step.train_step import StepParts, StepSums, train_step

log = logging.getLogger(__name__)

Work = Callable[[], list[torch.Tensor]]
Replay = Callable[[], object]

WARM_UP_STEPS = 3
WARM_UP_STEPS_DDP = 11  # DDP times some of its first iterations with events that cannot be recorded
LAUNCH_BOUND = 0.7  # share of a step that the host spends on launching, above which a graph is worth its memory


class Recorder(Protocol):
    """How work is run before it is recorded, and how it is recorded; another one stands in for CUDA in tests."""

    def run(self, work: Work) -> list[torch.Tensor]:
        """Run `work` as it is, where it will be recorded."""
        ...

    def host_share(self, work: Work) -> tuple[list[torch.Tensor], float]:
        """Run `work` once; also the share of its time that the host needs to launch it. Waits for the device."""
        ...

    def record(self, work: Work) -> tuple[list[torch.Tensor], Replay]:
        """Record `work` without running it; returns its results, which each replay fills anew."""
        ...


class CudaRecorder:
    """CUDA graphs on one side stream: cuBLAS and autograd bind to the stream that they first run on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def run(self, work: Work) -> list[torch.Tensor]:
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            results = work()
        current.wait_stream(self.stream)
        return results

    def host_share(self, work: Work) -> tuple[list[torch.Tensor], float]:
        torch.cuda.synchronize(self.device)
        started_at = time.perf_counter()
        results = self.run(work)
        launched_at = time.perf_counter()
        torch.cuda.synchronize(self.device)
        return results, (launched_at - started_at) / (time.perf_counter() - started_at)

    def record(self, work: Work) -> tuple[list[torch.Tensor], Replay]:
        graph = torch.cuda.CUDAGraph()
        # thread_local: the loader's and NCCL's threads go on calling CUDA meanwhile.
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            results = work()
        return results, graph.replay


class HostRecorder:
    """Where there is no CUDA: the same course of warm-up, recording and replay, but a replay runs the work again."""

    def run(self, work: Work) -> list[torch.Tensor]:
        return work()

    def host_share(self, work: Work) -> tuple[list[torch.Tensor], float]:
        return work(), 1.0

    def record(self, work: Work) -> tuple[list[torch.Tensor], Replay]:
        results: list[torch.Tensor] = []

        def replay() -> None:
            results[:] = work()

        return results, replay


class GraphedCall:
    """Device work that runs as it is for `warm_up` calls, is recorded, and is replayed from then on.

    Args:
        work: launches work and never waits for it. What it returns is overwritten by the next replay, so calls give out
            copies.
        lives_on: every tensor that `work` uses and that outlives a call. A recording holds bare addresses: when one of
            these tensors has moved (a checkpoint was loaded), a replay would write into freed memory, so the work is
            warmed up and recorded anew.
        only_if_launch_bound: measure the last warm-up call, which waits for the device once, and stay eager where the
            device and not the host is what limits the step.
    """

    def __init__(
        self,
        work: Work,
        lives_on: Callable[[], Iterable[torch.Tensor]],
        recorder: Recorder,
        *,
        warm_up: int = WARM_UP_STEPS,
        only_if_launch_bound: bool = False,
    ) -> None:
        assert warm_up >= 1, "cuDNN, the optimizer and the allocator must have run once before a recording"
        self._work = work
        self._lives_on = lives_on
        self._recorder = recorder
        self._warm_up = warm_up
        self._only_if_launch_bound = only_if_launch_bound
        self._calls = 0
        self._recorded: tuple[list[torch.Tensor], Replay] | None = None
        self._addresses: list[int] = []

    @property
    def is_recorded(self) -> bool:
        return self._recorded is not None

    def __call__(self) -> list[torch.Tensor]:
        if self._recorded is not None and self._addresses != self._where():
            self._recorded, self._calls = None, 0
        if self._calls < self._warm_up:
            return self._run_as_it_is()
        if self._recorded is None:
            self._recorded = self._recorder.record(self._work)
            self._addresses = self._where()
        results, replay = self._recorded
        replay()
        return [result.clone() for result in results]

    def _run_as_it_is(self) -> list[torch.Tensor]:
        is_last = self._calls == self._warm_up - 1
        if not (is_last and self._only_if_launch_bound):
            self._calls += 1
            return self._recorder.run(self._work)
        results, share = self._recorder.host_share(self._work)
        if share >= LAUNCH_BOUND:
            self._calls += 1
            self._only_if_launch_bound = False
        else:  # `_calls` stays below `_warm_up`, so that this path is taken for good, without measuring again
            self._only_if_launch_bound = False
            self._warm_up = _NEVER
        log.info("the host needs %.0f %% of a step to launch it: %s", 100 * share, _decision(share))
        return results

    def _where(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._lives_on()]


_NEVER = 2**62


def _decision(share: float) -> str:
    return "replayed as a CUDA graph from here on" if share >= LAUNCH_BOUND else "a CUDA graph would not pay"


class GraphedStep:
    """`step.train_step` for batches of one shape, replayed as a CUDA graph. Batches of other shapes run as they are.

    The batches are copied into static buffers, which costs 2 x the input's bytes of traffic, 0.2 % of a ResNet-50 step:
    a prefetcher that wrote there directly would need a second recording to write one set while the other is read.
    """

    def __init__(
        self,
        parts: StepParts,
        recorder: Recorder,
        *,
        warm_up: int = WARM_UP_STEPS,
        only_if_launch_bound: bool = False,
    ) -> None:
        self._parts = parts
        self._slots: list[Batch] = []
        self._of_model = [*parts.model.parameters(), *parts.model.buffers()]  # found once: a walk costs 0.5 ms
        put_lr_on_device(parts.optimizer, parts.device)
        for group in parts.optimizer.param_groups:
            if "capturable" in group and parts.device.type == "cuda":
                group["capturable"] = True  # AdamW asks for it, though its fused kernel needs nothing more
        self._call = GraphedCall(
            self._train, self._lives_on, recorder, warm_up=warm_up, only_if_launch_bound=only_if_launch_bound
        )

    @property
    def is_recorded(self) -> bool:
        return self._call.is_recorded

    def __call__(self, micro_batches: Sequence[Batch]) -> StepSums:
        """As `train_step`; the counts are float32 here, exact below 2**24 images."""
        if not self._slots:
            self._slots = [Batch(torch.empty_like(b.images), torch.empty_like(b.targets)) for b in micro_batches]
        if [_form(batch) for batch in micro_batches] != [_form(slot) for slot in self._slots]:
            return train_step(self._parts, micro_batches)
        for slot, batch in zip(self._slots, micro_batches, strict=True):
            slot.images.copy_(batch.images, non_blocking=True)
            slot.targets.copy_(batch.targets, non_blocking=True)
        (row,) = self._call()
        return StepSums(*row.unbind())

    def _train(self) -> list[torch.Tensor]:
        sums = train_step(self._parts, self._slots)
        return [torch.stack([sums.loss.float(), sums.correct1.float(), sums.correct5.float(), sums.skipped])]

    def _lives_on(self) -> Iterable[torch.Tensor]:
        parts = self._parts
        yield from (tensor for slot in self._slots for tensor in (slot.images, slot.targets))
        yield from self._of_model
        for group in parts.optimizer.param_groups:
            yield group["lr"]
            for parameter in group["params"]:
                yield parameter
                state = parts.optimizer.state.get(parameter, {})
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))
        if parts.scaler.is_enabled():  # private, but GradScaler writes them in place, and checkpoints hold its state
            yield from (t for t in (parts.scaler._scale, parts.scaler._growth_tracker) if t is not None)


def graphed_average(
    average: WeightAverage, parts: StepParts, recorder: Recorder, *, warm_up: int = WARM_UP_STEPS
) -> GraphedCall:
    """`average.update` of the bare model's weights as a graph of its own, as it may be due less often than a step."""
    model = bare(parts.model)
    tensors = [*model.parameters(), *model.buffers(), *average.module.parameters(), *average.module.buffers()]
    tensors += parts.masters.masters.values() if parts.masters is not None else []

    def update() -> list[torch.Tensor]:
        average.update(model, parts.masters)
        return []

    return GraphedCall(update, lambda: tensors, recorder, warm_up=warm_up)


def bare(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside DDP's wrapper."""
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


def put_lr_on_device(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Learning rates as float32 0-d tensors, a tensor per group, which `optim.set_lr` fills in place."""
    for group in optimizer.param_groups:
        if not isinstance(group["lr"], torch.Tensor):
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=device)


def _form(batch: Batch) -> list[object]:
    return [(t.shape, t.stride(), t.dtype) for t in (batch.images, batch.targets)]
