"""A training step replayed as one CUDA graph: one launch by the host instead of about a thousand.

The recorded work is `train_step`, which never waits for the device: loss scale, overflow flag and the decision to
skip an update are tensors that the fused optimizer and GradScaler update in place. What changes between steps is in
tensors too: images and labels in static buffers, the learning rate in the optimizer's groups.

A replay repeats the decisions that the host made during the recording. A model whose forward pass makes decisions on
the host (a Python random number, a counter, the value of a tensor) must not be recorded. Warm-up, side stream and
eleven warm-up steps with DDP follow PyTorch's notes on CUDA graphs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from cl_train.data.batch import Batch
from cl_train.step.train_step import StepParts, StepResult, train_step

Work = Callable[[], torch.Tensor]

WARM_UP_STEPS = 3
WARM_UP_STEPS_DDP = 11  # DDP times some of its first iterations with CUDA events that cannot be recorded


class Recorder:
    """Records CUDA graphs on one side stream, to which DDP and the first backward pass must bind as well (`on_stream`).

    On a CPU nothing is recorded: a replay runs the work again.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Run the block on the stream of the recording, after all earlier work and before all later work."""
        if self.stream is None:
            yield
            return
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            yield
        current.wait_stream(self.stream)

    def run(self, work: Work) -> torch.Tensor:
        """Run `work` eagerly on the stream of the recording."""
        with self.on_stream():
            return work()

    def record(self, work: Work) -> Work:
        """Record `work` without running it, and return its replay, which overwrites its earlier result."""
        if self.stream is None:
            return work
        graph = torch.cuda.CUDAGraph()
        # thread_local: the threads of the loader and of NCCL call CUDA during the recording.
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            result = work()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


class GraphedCall:
    """Device work that runs eagerly for `warm_up` calls, is then recorded, and is replayed from then on.

    A recording contains addresses: if a tensor that it uses has moved (a checkpoint was loaded), a replay would write
    to freed memory, so the work is warmed up and recorded again.

    Args:
        tensors: every tensor that `work` uses and that outlives a call.
    """

    def __init__(
        self,
        work: Work,
        tensors: Callable[[], Iterable[torch.Tensor]],
        recorder: Recorder,
        *,
        warm_up: int = WARM_UP_STEPS,
    ) -> None:
        assert warm_up >= 1, "cuDNN, the optimizer and the allocator must run once before a recording"
        self._work, self._tensors, self._recorder = work, tensors, recorder
        self._warm_up = self._eager_calls_left = warm_up
        self._replay: Work | None = None
        self._addresses: list[int] = []

    @property
    def is_recorded(self) -> bool:
        return self._replay is not None

    def __call__(self) -> torch.Tensor:
        if self._replay is not None and self._addresses != self._current_addresses():
            self._replay, self._eager_calls_left = None, self._warm_up
        if self._eager_calls_left > 0:
            self._eager_calls_left -= 1
            return self._recorder.run(self._work)
        if self._replay is None:
            self._replay = self._recorder.record(self._work)
            self._addresses = self._current_addresses()
        return self._replay().clone()

    def _current_addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._tensors()]


class GraphedStep:
    """`train_step` as a `GraphedCall`. Batches of another shape are warmed up and recorded again, and the earlier graph
    is dropped: its memory would add up, and sizes that have passed do not come back (`data.size_schedule`).

    Copying the batch into static buffers costs twice the input's bytes of traffic, 0.2 % of a ResNet-50 step.
    """

    def __init__(self, parts: StepParts, recorder: Recorder, *, warm_up: int = WARM_UP_STEPS) -> None:
        self._parts, self._recorder, self._warm_up = parts, recorder, warm_up
        self._static: list[Batch] = []
        self._model_tensors = [*parts.model.parameters(), *parts.model.buffers()]  # once: finding them costs 0.5 ms
        make_capturable(parts.optimizer, parts.device)
        self._call: GraphedCall | None = None

    @property
    def is_recorded(self) -> bool:
        return self._call is not None and self._call.is_recorded

    def __call__(self, micro_batches: Sequence[Batch]) -> StepResult:
        """As `train_step`; the counts are float32, exact below 2**24 images."""
        if self._call is None or list(map(_layout, micro_batches)) != list(map(_layout, self._static)):
            self._static = [Batch(torch.empty_like(b.images), torch.empty_like(b.targets)) for b in micro_batches]
            self._call = None  # frees the earlier graph before the warm-up allocates
            self._call = GraphedCall(self._train, self._tensors, self._recorder, warm_up=self._warm_up)
        for static, batch in zip(self._static, micro_batches, strict=True):
            static.images.copy_(batch.images, non_blocking=True)
            static.targets.copy_(batch.targets, non_blocking=True)
        return StepResult(*self._call().unbind())

    def _train(self) -> torch.Tensor:
        sums = train_step(self._parts, self._static)
        return torch.stack([sums.loss.float(), sums.correct1.float(), sums.correct5.float(), sums.skipped])

    def _tensors(self) -> Iterable[torch.Tensor]:
        parts = self._parts
        yield from (tensor for batch in self._static for tensor in (batch.images, batch.targets))
        yield from self._model_tensors
        for group in parts.optimizer.param_groups:
            yield group["lr"]
            for parameter in group["params"]:
                yield parameter
                state = parts.optimizer.state.get(parameter, {})
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))
        if parts.scaler.is_enabled():  # private, but GradScaler updates them in place
            yield from (t for t in (parts.scaler._scale, parts.scaler._growth_tracker) if t is not None)


def make_capturable(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Learning rates become 0-d float32 tensors, which `optim.set_lr` fills in place."""
    for group in optimizer.param_groups:
        if not isinstance(group["lr"], torch.Tensor):
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=device)
        if "capturable" in group and device.type == "cuda":
            group["capturable"] = True  # AdamW requires it, although its fused kernel needs nothing else


def _layout(batch: Batch) -> list[object]:
    return [(t.shape, t.stride(), t.dtype) for t in (batch.images, batch.targets)]
