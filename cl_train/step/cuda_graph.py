"""A training step replayed as one CUDA graph: one launch by the host instead of about a thousand.

A model whose forward pass decides on the host (by a Python random number, a counter, the value of a
tensor) must not be recorded: a replay repeats the decision.
"""

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any, TypeVar

import torch

from cl_train.data.device import Batch
from cl_train.errors import RecordingError as RecordingError
from cl_train.step.train_step import StepParts, StepResult, train_step

T = TypeVar("T")

log = logging.getLogger(__name__)

WARM_UP_STEPS = 3
WARM_UP_STEPS_DDP = 11  # DDP times some of its first steps with events that cannot be recorded

# Before 2.15, a recording that failed leaves torch's allocator recording.
CAN_GO_ON_AFTER_FAILURE = torch.__version__ >= "2.15"  # compares versions

_recorded = weakref.WeakKeyDictionary[torch.cuda.CUDAGraph, torch.device]()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the device's one stream: the allocator reuses memory on the same stream only."""
    return torch.cuda.Stream(device)


class Recorder:
    """Records CUDA graphs on a side stream, to which DDP and the first backward pass must bind.
    On a CPU a replay runs the work again.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = _stream(device) if device.type == "cuda" else None

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Runs the block on the stream of the recording, between all earlier and all later work."""
        if self.stream is None:
            yield
            return
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            yield
        current.wait_stream(self.stream)

    def run(self, work: Callable[[], T]) -> T:
        with self.on_stream():
            return work()

    def record(self, work: Callable[[], T]) -> Callable[[], T]:
        """Records `work` without running it; returns a function that replays it and overwrites the
        result each time. Raises RecordingError: it cannot be recorded.
        """
        if self.stream is None:
            return work
        graph = torch.cuda.CUDAGraph()
        # Graphs of a device share one memory pool: none leaves results in it for another one.
        # thread_local: the threads of the loader and of NCCL call CUDA during the recording.
        pool = next((other.pool() for other, of in _recorded.items() if of == self.device), None)
        recording = torch.cuda.graph(graph, pool, self.stream, capture_error_mode="thread_local")
        try:
            # The stream again: before 2.15, a recording that failed leaves it the current one.
            with torch.cuda.stream(self.stream), recording:
                result = work()
        except RuntimeError as error:
            # torch believes that the generator still records, and dropout would raise.
            generator = torch.cuda.default_generators[self.stream.device_index]
            generator.graphsafe_set_state(generator.clone_state())
            cause: BaseException = error
            while cause.__context__ is not None:  # the last error only says that there was one
                cause = cause.__context__
            reason = (str(cause).splitlines() or [type(cause).__name__])[0]
            raise RecordingError(f"it cannot be recorded as a CUDA graph: {reason}") from error
        _recorded[graph] = self.device

        def replay() -> T:
            graph.replay()
            return result

        return replay


class GraphedStep:
    """`train_step`, eager for `warm_up` calls, then recorded and replayed; batches of another shape
    are recorded anew. The copy of a batch into static buffers costs 0.2 % of a ResNet-50 step.

    parts: its tensors must stay, as a recording contains addresses. fall_back: go on with eager
    steps, where torch can, if the step cannot be recorded.
    """

    def __init__(
        self,
        parts: StepParts,
        recorder: Recorder,
        *,
        warm_up: int = WARM_UP_STEPS,
        fall_back: bool = False,
    ) -> None:
        assert warm_up >= 1, "cuDNN, the optimizer and the allocator must have run once"
        self._parts = parts
        self._recorder = recorder
        self._warm_up = warm_up
        self._fall_back = fall_back
        use_tensor_rates(parts.optimizer, parts.device)
        self._static: list[Batch] = []
        self._layouts: list[Any] = []
        self._eager_calls_left = warm_up
        self.replay: Callable[[], torch.Tensor] | None = None
        self._is_eager = False  # after a recording that failed

    @property
    def is_warming_up(self) -> bool:
        return self.replay is None and not self._is_eager

    def __call__(self, micro_batches: Sequence[Batch]) -> StepResult:
        """Runs one step; the counts of its result are float32, exact below 2**24 images."""
        if self._is_eager:
            return self._recorder.run(partial(train_step, self._parts, micro_batches))
        tensors = [t for batch in micro_batches for t in (batch.images, batch.targets)]
        layouts = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
        if layouts != self._layouts:
            self.replay = None  # frees the earlier graph before the warm-up allocates
            self._layouts, self._eager_calls_left = layouts, self._warm_up
            empty = torch.empty_like
            self._static = [Batch(empty(b.images), empty(b.targets)) for b in micro_batches]
        for static, batch in zip(self._static, micro_batches, strict=True):
            static.images.copy_(batch.images, non_blocking=True)
            static.targets.copy_(batch.targets, non_blocking=True)
        if self._eager_calls_left > 0:
            self._eager_calls_left -= 1
            result = self._recorder.run(self._train)
        else:
            make_capturable(self._parts.optimizer)
            try:
                self.replay = self.replay or self._recorder.record(self._train)
            except RecordingError as error:
                self._go_on_eagerly(error)
                return self(micro_batches)
            result = self.replay()
        return StepResult(*result.clone().unbind())

    def _go_on_eagerly(self, error: RecordingError) -> None:
        """Cleans up: a failed recording leaves gradients in its memory and GradScaler in mid-step.
        Raises RecordingError: the steps must not, or cannot, go on.
        """
        if not (self._fall_back and CAN_GO_ON_AFTER_FAILURE):
            raise RecordingError(f"{error}; use cuda_graph=false") from error
        log.warning("cuda_graph=auto: %s; the steps run eagerly", error)
        self._parts.wrapped_model.zero_grad(set_to_none=True)
        self._parts.optimizer.zero_grad(set_to_none=True)
        scaler = self._parts.scaler
        if scaler.is_enabled():
            # The present scale, by which the scaler forgets the step.
            scaler.update(scaler.scale(torch.ones((), device=self._parts.device)))
            # Else the next step would multiply the scale by it.
            vars(self._parts.optimizer).pop("grad_scale", None)
        self._static, self._is_eager = [], True

    def _train(self) -> torch.Tensor:
        result = train_step(self._parts, self._static)
        return torch.stack([value.float() for value in vars(result).values()])

    def release(self, kind: type[BaseException] | None, *_: object) -> None:
        """Frees every graph, before the process group ends: NCCL waits for their kernels. After an
        exception it does not wait for the device: a rank may be dead. For `ExitStack.push`.
        """
        if kind is None and self._recorder.stream is not None:
            torch.cuda.synchronize(self._parts.device)
        self.replay = None
        for graph in _recorded:
            with suppress(RuntimeError):  # after an error of the device
                graph.reset()
        _recorded.clear()


def use_tensor_rates(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Makes learning rates 0-d float32 tensors, which `optim.set_lr` fills in place."""
    for group in optimizer.param_groups:
        if not isinstance(group["lr"], torch.Tensor):
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=device)


def make_capturable(optimizer: torch.optim.Optimizer) -> None:
    """Call it before a recording, which AdamW refuses otherwise; it warns in eager steps."""
    for group in optimizer.param_groups:
        if "capturable" in group and group["lr"].is_cuda:
            group["capturable"] = True
