"""No CUDA graph is alive when the process group is destroyed: NCCL would wait for it for ever.
Recordings that fail.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cl_train.config.validation import load
from cl_train.step import cuda_graph
from cl_train.step.cuda_graph import GraphedStep, Recorder, RecordingError
from cl_train.step.precision import BY_NAME, autocast
from cl_train.step.train_step import train_step
from cl_train.system.distributed import Dist
from cl_train.training import active_run, build, loop
from cl_train.training.console import describe_failure
from tests.conftest import Run
from tests.cuda_without_gpu.fake_cuda import CUDA, Graph, fake_cuda
from tests.step.test_train_step import make_batch, make_parts

CPU = torch.device("cpu")
CAPTURING = "CUDA error: operation not permitted when stream is capturing"


class StubRecorder(Recorder):
    """On a CPU, with a graph that counts: its replay runs the work again."""

    def record(self, work: Any) -> Any:
        graph = Graph()
        cuda_graph._recorded[graph] = CPU  # type: ignore[index]
        return lambda: (graph.replay(), work())[1]


@pytest.fixture
def destroyed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many graphs are alive each time that the process group is destroyed, in a run of one
    "rank".
    """
    alive: list[int] = []
    Graph.alive.clear()
    processes = loop.processes

    @contextmanager
    def in_a_group(*arguments: Any) -> Iterator[Dist]:
        with processes(*arguments) as dist:
            try:
                yield dist
            finally:
                alive.append(len(Graph.alive))

    monkeypatch.setattr(loop, "processes", in_a_group)
    monkeypatch.setattr(build, "Recorder", StubRecorder)
    yield alive
    gc.collect()
    assert len(Graph.alive) == 0


WORDS = (
    "cuda_graph=true",
    "log_to=[]",
    "batch_size=8",
    "data.image_size=16",
    "log_every=5",
    "epochs=1",
)


@pytest.mark.parametrize(
    "fault", [RuntimeError("CUDA error: an illegal memory access"), KeyboardInterrupt()]
)
def test_no_graph_is_left_though_a_traceback_refers_to_it(
    train: Any,
    destroyed: list[int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
    fault: BaseException,
) -> None:
    referred: list[Graph] = []

    def fail(*arguments: Any) -> None:
        referred.extend(Graph.alive)
        raise fault

    monkeypatch.setattr(active_run, "console_line", fail)
    with pytest.raises(type(fault)):
        train(*WORDS, folder=tmp_path)
    assert len(referred) == 1 and destroyed == [0], "recorded before the fault"
    assert Run(tmp_path, 1).summary["status"] == "failed"


def test_a_graph_is_released_at_the_end_and_planted_one_that_nobody_releases_is_found(
    train: Any, destroyed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(*WORDS).exit_code == 0 and destroyed == [0]
    kept: list[Any] = []
    monkeypatch.setattr(GraphedStep, "release", lambda step, *error: kept.append(step))
    train(*WORDS)
    assert destroyed == [0, 1]
    kept.clear()


def test_the_utilisation_is_measured_without_the_memory_of_a_graph(
    train: Any, destroyed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[int] = []
    monkeypatch.setattr(loop, "utilisation_of", lambda *_: alive.append(len(Graph.alive)))
    assert train(*WORDS).summary["utilisation"] is None and alive == [0]


def test_growing_images_leave_one_graph() -> None:
    parts = make_parts("fp32")
    step = GraphedStep(parts, StubRecorder(CPU), warm_up=1)
    for images in (8, 8, 5, 5):
        step([make_batch(parts, images=images)])
        assert len(Graph.alive) <= 1
    step.release(None)
    assert len(Graph.alive) == 0 and step.call is None


def test_recordings_are_registered_and_share_a_pool() -> None:
    """On the stream of the warm-up; the loader's threads may call CUDA meanwhile. Those of another
    device have another pool."""
    with fake_cuda() as device:
        recorder, other = Recorder(CUDA), Recorder(torch.device("cuda", 1))
        replays = [
            each.record(lambda: torch.ones(2, device=CUDA)) for each in (recorder, recorder, other)
        ]
        graphs = list(cuda_graph._recorded)
        assert len(graphs) == 3, "else NCCL waits for them at the end"
        pools, streams, modes = zip(*device.captures, strict=True)
        first = graphs[[graph.pool() for graph in graphs].index(pools[1])]
        assert pools == (None, first.pool(), None) and set(modes) == {"thread_local"}
        assert streams == (recorder.stream, recorder.stream, other.stream)
        step = GraphedStep(make_parts("fp32"), recorder)
        before = device.synchronized
        step.release(KeyboardInterrupt)
        assert device.synchronized == before, "a rank may be dead"
        step.release(None)
        assert device.synchronized == before + 1, "a graph may still run"
        assert not cuda_graph._recorded and not any(graph.kernels for graph in graphs)
    del replays


def test_a_run_is_built_on_the_stream_of_its_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial and DDP, to whose stream autograd binds the gradients. A replay reads the learning
    rate of its step from the device."""
    streams: dict[str, object] = {}
    with fake_cuda() as device:
        for name in ("try_model", "wrap_in_ddp"):

            def note(*arguments: Any, name: str = name, **words: Any) -> Any:
                streams[name] = device.current
                return arguments[0]

            monkeypatch.setattr(build, name, note)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *_: None)
        monkeypatch.setattr(build, "convert", lambda *_, **__: None)  # it asks for addresses
        cfg = load({"model": "tests.networks:small", "cuda_graph": "true", "precision": "fp16"})
        for ranks, warm_up in ((1, 3), (2, 11)):
            dist = Dist(0, ranks, CUDA)
            settings = build.step_settings(cfg, BY_NAME["fp16"], dist, soft=False)
            state = build.build_train_state(cfg, settings, 3, dist, lr=0.1)
            step: Any = state.train_step
            assert set(streams.values()) == {step._recorder.stream} != {device.current}
            rates = [group["lr"] for group in state.parts.optimizer.param_groups]
            assert {rate.device for rate in rates} == {CUDA}
            # DDP times its first ten iterations with events, which cannot be recorded.
            assert step._warm_up == warm_up


@pytest.mark.parametrize("precision", ["fp32", "fp16", "fp16_o2"])
def test_auto_falls_back_to_eager_steps_with_the_same_results(
    precision: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `.item()` in a model, or without memory for the graph: a recording that ends in the
    middle of a step.
    """
    monkeypatch.setattr(cuda_graph, "CAN_GO_ON_AFTER_FAILURE", True)
    expected, parts = make_parts(precision), make_parts(precision)
    step = GraphedStep(parts, Halfway(CPU), warm_up=1, fall_back=True)
    cuda_graph.make_capturable(expected.optimizer, CPU)
    for seed in range(5):
        result = step([make_batch(parts, seed=seed)])
        assert (
            result.loss.item()
            == train_step(expected, [make_batch(expected, seed=seed)]).loss.item()
        )
    [warning] = caplog.messages
    assert "operation not permitted" in warning and "the steps run eagerly" in warning
    assert step.call is None and len(Graph.alive) == 0
    for fall_back, can_go_on in ((False, True), (True, False)):
        monkeypatch.setattr(cuda_graph, "CAN_GO_ON_AFTER_FAILURE", can_go_on)
        step = GraphedStep(parts, Halfway(CPU), warm_up=1, fall_back=fall_back)
        step([make_batch(parts)])
        with pytest.raises(RecordingError, match="operation not permitted") as caught:
            step([make_batch(parts)])
        assert "use cuda_graph=false" in (describe_failure(caught.value) or "")


class Halfway(StubRecorder):
    """The recording fails after the backward pass: gradients are left, and GradScaler is in the
    middle of a step.
    """

    def record(self, work: Any) -> Any:
        parts, batch = work.__self__._parts, work.__self__._static[0]
        with autocast(parts.precision, CPU):
            output = parts.model(batch.images).float().sum()
        parts.scaler.scale(output).backward()
        if parts.scaler.is_enabled() and not parts.precision.master_weights:
            parts.scaler.unscale_(parts.optimizer)
        raise RecordingError(CAPTURING)


@pytest.mark.parametrize("message", [CAPTURING, "out of memory"])
def test_a_recording_that_fails_leaves_dropout_working(
    message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real `Recorder.record`: its error has the first cause, and the generator no longer
    records.
    """
    states: list[str] = []
    generator = SimpleNamespace(
        clone_state=lambda: "not recording", graphsafe_set_state=states.append
    )
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))

    def work() -> None:
        try:
            raise torch.AcceleratorError(message)
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    with fake_cuda() as device:
        current = device.current
        with pytest.raises(RecordingError, match=message):
            Recorder(CUDA).record(work)
        assert device.current is current
    assert states == ["not recording"]
