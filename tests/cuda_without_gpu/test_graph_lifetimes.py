"""Recordings: how they end and fail. No CUDA graph is alive when the process group is destroyed:
NCCL would wait for it for ever. DDP and process groups as on GPUs.
"""

from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from cl_train.config.validation import checked_config
from cl_train.step import cuda_graph
from cl_train.step.cuda_graph import GraphedStep, Recorder, RecordingError
from cl_train.step.precision import BY_NAME
from cl_train.step.train_step import train_step
from cl_train.system import distributed
from cl_train.system.distributed import Dist
from cl_train.training import active_run, build, setup
from cl_train.training.console import describe_failure
from tests.conftest import Run
from tests.cuda_without_gpu.fake_cuda import CUDA, Graph, fake_cuda
from tests.networks import small, state_of
from tests.step.test_train_step import make_batch, make_parts

CPU = torch.device("cpu")
CAPTURING = "CUDA error: operation not permitted when stream is capturing"
WORDS = "cuda_graph=true log_to=[] batch_size=8 data.image_size=16 log_every=5 epochs=1"


class StubRecorder(Recorder):
    """On a CPU, with a graph that counts: its replay runs the work again."""

    def record(self, work):
        graph = Graph()
        cuda_graph._recorded[graph] = CPU
        return lambda: (graph.replay(), work())[1]


@pytest.fixture
def destroyed(monkeypatch):
    """How many graphs are alive each time that a run leaves its process group."""
    alive = []
    processes = setup.processes

    @contextmanager
    def counted(*arguments):
        with processes(*arguments) as dist, ExitStack() as at_the_end:
            at_the_end.callback(lambda: alive.append(len(Graph.alive)))
            yield dist

    monkeypatch.setattr(setup, "processes", counted)
    monkeypatch.setattr(build, "Recorder", StubRecorder)
    Graph.alive.clear()
    yield alive
    cuda_graph._recorded.clear()


def test_no_graph_is_left_though_a_traceback_refers_to_it(train, destroyed, monkeypatch, tmp_path):
    referred = []

    def fail(*arguments):
        referred.extend(Graph.alive)
        raise KeyboardInterrupt

    monkeypatch.setattr(active_run, "console_line", fail)
    with pytest.raises(KeyboardInterrupt):
        train(*WORDS.split(), folder=tmp_path)
    assert len(referred) == 1 and destroyed == [0], "recorded before the fault"
    assert Run(tmp_path, 1).summary["status"] == "failed"


def test_recordings_are_registered_and_share_a_pool():
    """On the stream of the warm-up; the loader's threads may call CUDA meanwhile. Those of another
    device have another pool."""
    with fake_cuda() as device:
        recorder, other = Recorder(CUDA), Recorder(torch.device("cuda", 1))
        recorders = (recorder, recorder, other)
        replays = [each.record(lambda: torch.ones(2, device=CUDA)) for each in recorders]
        graphs = list(cuda_graph._recorded)
        assert len(graphs) == len(replays), "else NCCL waits for them at the end"
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


def test_a_recording_that_fails_leaves_dropout_working(monkeypatch):
    """The error names the first cause, and the generator no longer records."""
    states = []
    generator = SimpleNamespace(clone_state=lambda: "idle", graphsafe_set_state=states.append)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))

    def work():
        try:
            raise torch.AcceleratorError("out of memory")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    with fake_cuda() as device:
        current = device.current
        with pytest.raises(RecordingError, match="out of memory"):
            Recorder(CUDA).record(work)
        assert device.current is current and states == ["idle"]


def test_a_run_is_built_on_the_stream_of_its_recordings(monkeypatch):
    """The trial and DDP, to whose stream autograd binds the gradients. A replay reads the learning
    rate of its step from the device."""
    streams = {}
    cfg = checked_config(
        {"model": "tests.networks:small", "cuda_graph": "true", "precision": "fp16"}
    )
    with fake_cuda() as device:
        for name in ("try_model", "wrap_in_ddp"):

            def note(model, *_, name=name, **words):
                streams[name] = device.current
                return model

            monkeypatch.setattr(build, name, note)
        monkeypatch.setattr(build, "try_evaluation", lambda *_: None)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *_: None)
        monkeypatch.setattr(setup, "convert", lambda *_: None)  # it asks for addresses
        # DDP times its first ten iterations with events, which cannot be recorded.
        for ranks, warm_up in ((1, 3), (2, 11)):
            dist = Dist(0, ranks, CUDA)
            state = state_of(cfg, BY_NAME["fp16"], dist)
            step = state.train_step
            assert set(streams.values()) == {step._recorder.stream} != {device.current}
            rates = [group["lr"] for group in state.parts.optimizer.param_groups]
            assert {rate.device for rate in rates} == {CUDA}
            assert step._warm_up == warm_up


def test_windows_before_a_replay_do_not_count(train, destroyed):
    """Three eager steps, and the fourth records: 0.3 to 1 s on a GPU; DDP has eleven."""
    run = train(*WORDS.split(), "warmup_steps=0", "log_every=2", "max_steps=8")
    windows = run.records("train")
    assert [(window["step"], window["warmup"]) for window in windows][:3] == [
        (2, True), (4, True), (6, False),
    ]  # fmt: skip


class Halfway(StubRecorder):
    """The recording fails in the update, as for lack of memory: gradients are left, and GradScaler
    is in the middle of a step.
    """

    def record(self, work):
        optimizer = work.__self__._parts.optimizer
        optimizer.step = Mock(side_effect=RecordingError(CAPTURING))
        try:
            work()
        finally:
            del optimizer.step


@pytest.mark.parametrize(("precision", "clip_norm"), [("fp32", None), ("fp16", 1.0)])
def test_auto_falls_back_to_eager_steps_with_the_same_results(
    precision, clip_norm, caplog, monkeypatch
):
    expected = make_parts(precision, clip_norm=clip_norm)
    cuda_graph.use_tensor_rates(expected.optimizer, CPU)

    def graphed(*, can_go_on, fall_back):
        monkeypatch.setattr(cuda_graph, "CAN_GO_ON_AFTER_FAILURE", can_go_on)
        parts = make_parts(precision, clip_norm=clip_norm)
        return GraphedStep(parts, Halfway(CPU), warm_up=1, fall_back=fall_back)

    step = graphed(can_go_on=True, fall_back=True)
    for seed in range(5):
        batch = make_batch(expected, seed=seed)
        assert step([batch]).loss == train_step(expected, [batch]).loss
    [warning] = caplog.messages
    assert "operation not permitted" in warning and "the steps run eagerly" in warning
    assert step.replay is None
    for can_go_on in (True, False):
        step = graphed(can_go_on=can_go_on, fall_back=not can_go_on)
        step([make_batch(expected)])
        with pytest.raises(RecordingError, match="operation not permitted") as caught:
            step([make_batch(expected)])
        assert "use cuda_graph=false" in (describe_failure(caught.value) or "")


# --- ranks ----------------------------------------------------------------------------------------


def ddp(model, *, forward_sync_buffers=True, **words):
    """The arguments of torch's since 2.15."""
    return {"forward_sync_buffers": forward_sync_buffers, **words}


def test_statistics_of_batchnorm_are_not_broadcast_in_each_step(monkeypatch):
    monkeypatch.setattr(build, "check_ranks_agree", lambda *_: None)
    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", ddp)
    model = small(3)
    options = build.wrap_in_ddp(model, Dist(0, 2, CUDA), static_graph=False)
    assert options["forward_sync_buffers"] is False
    assert options["gradient_as_bucket_view"] and options["device_ids"] == [CUDA]
    model.register_buffer("calls", torch.zeros(1))  # which all ranks must share
    options = build.wrap_in_ddp(model, Dist(0, 2, CUDA), static_graph=False)
    assert options["forward_sync_buffers"] is True


def test_adamw_becomes_capturable_before_the_recording_not_before_eager_steps():
    """torch warns at a capturable optimizer whose step is eager."""
    group = {"lr": 0.1, "capturable": False}
    optimizer = SimpleNamespace(param_groups=[group])
    with fake_cuda():
        cuda_graph.use_tensor_rates(optimizer, CUDA)
        assert not group["capturable"]
        cuda_graph.make_capturable(optimizer)
        assert group["capturable"]


def test_hosts_exchange_flags_in_a_group_of_their_own(monkeypatch):
    torch_distributed = Mock()
    torch_distributed.rendezvous.return_value = iter([(Mock(), 0, 2)])
    monkeypatch.setattr(torch, "distributed", torch_distributed)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(distributed, "read_launch", lambda: Mock(local_rank=0))
    monkeypatch.setattr(distributed, "choose_device", lambda name, rank: CUDA)
    for name in ("end_with_parent", "_store_prefix"):
        monkeypatch.setattr(distributed, name, lambda *_: "")
    with distributed.processes("cuda") as dist:
        hosts = torch_distributed.new_group
        hosts.assert_called_once_with(backend="gloo")
        distributed.gather_objects(None, dist)
        assert torch_distributed.all_gather_object.call_args.kwargs == {"group": hosts()}
