"""On a GPU: python -m pytest -m gpu tests/test_gpu.py"""

import copy
import json
from contextlib import closing

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from cl_train.cli import main as cli
from cl_train.config.schema import FUSED_OPTIMIZERS
from cl_train.config.validation import checked_config
from cl_train.data import device as transfer
from cl_train.data.device import Batch, DeviceFormat, DevicePrefetcher, Normalise, RawBatch
from cl_train.data.for_other_loops import channels_last_collate
from cl_train.step.cuda_graph import CAN_GO_ON_AFTER_FAILURE, RecordingError
from cl_train.step.optim import set_lr
from cl_train.step.precision import BY_NAME, kernel_selection, resolve_precision
from cl_train.system.distributed import Dist
from tests.conftest import Run
from tests.data.image_folders import data_of
from tests.networks import small, state_of
from tests.ranks import TINY, launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # of other versions of Python and third parties
]

CHANNELS_LAST = torch.channels_last
DEVICES = ["cuda", "cuda:1"][: torch.cuda.device_count()]
SINGLE = Dist(0, 1, torch.device("cuda", 0))
RUN = ("device=cuda", "precision=fp16", "channels_last=true", "optim.lr=0.1")


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    """Paths are compared bit by bit."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    with kernel_selection(tf32=False, autotune=False):
        yield
    torch.cuda.set_sync_debug_mode("default")
    torch.use_deterministic_algorithms(False)


def settings(**words):
    data = {"name": "synthetic", "image_size": 64, "synthetic_images": 512}
    fixed = {"model": "resnet18", "precision": "fp16", "channels_last": True, "data": data}
    return checked_config({**fixed, **words})


def put_together(cfg, init_scale=None):
    torch.manual_seed(0)
    precision = resolve_precision(cfg.precision, SINGLE.device)
    for part in (torch.backends.cuda.matmul, torch.backends.cudnn.conv):
        part.fp32_precision = "tf32" if precision.tf32 else "ieee"
    state = state_of(cfg, precision, SINGLE, classes=10)
    set_lr(state.parts.optimizer, 0.0625)
    if init_scale is not None:
        scaler = state.parts.scaler
        scaler.load_state_dict(scaler.state_dict() | {"scale": init_scale})
    return state


def batch_of(state, seed, images=16):
    generator, form = torch.Generator().manual_seed(seed), state.batch_format
    pixels = torch.randn(images, 3, 64, 64, generator=generator)
    targets = torch.randint(10, (images,), generator=generator).to(form.device)
    return Batch(pixels.to(form.device, form.dtype, memory_format=form.memory_format), targets)


def train_steps(state, steps, first=0):
    losses = []
    for number in range(first, first + steps):
        set_lr(state.parts.optimizer, 2.0 ** -(4 + number % 3))
        losses.append(state.train_step([batch_of(state, number)]).loss)
    return torch.stack(losses).tolist()


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("layout", [True, False])
def test_each_path_agrees_with_float64(name, layout):
    """The loss of the first step, against the same network in float64 on the CPU."""
    tolerance = {"fp32": 1e-4, "tf32": 5e-3}.get(name, 2e-2)
    for graph in (False, True):
        state = put_together(settings(precision=name, channels_last=layout, cuda_graph=graph))
        batch = batch_of(state, 1)
        logits = copy.deepcopy(state.model).cpu().double().train()(batch.images.cpu().double())
        expected = nn.functional.cross_entropy(logits, batch.targets.cpu()).item()
        assert state.train_step([batch]).loss.item() == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("optimizer", list(FUSED_OPTIMIZERS))
def test_replays_equal_eager_steps_to_the_last_bit(name, optimizer):
    optim = {"name": optimizer, "clip_norm": 1.0}
    words = {"precision": name, "optim": optim, "label_smoothing": 0.1}
    eager, graphed = (put_together(settings(**words, cuda_graph=graph)) for graph in (False, True))
    for group in eager.parts.optimizer.param_groups:
        group["lr"] = torch.tensor(0.0, device="cuda")
    for step in range(12):
        assert train_steps(eager, 1, first=step) == train_steps(graphed, 1, first=step), step
    assert graphed.train_step.replay
    torch.testing.assert_close(eager.model.state_dict(), graphed.model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    "words", [{}, {"cuda_graph": True}, {"cuda_graph": True, "precision": "fp16_o2"}]
)
def test_a_hundred_steps_never_wait_for_the_device(words):
    """With every extra that a step can have."""
    extras = {"ema_decay": 0.9, "optim": {"clip_norm": 1.0}, "accumulate_steps": 2}
    state = put_together(settings(**words, **extras))
    batches = [batch_of(state, seed) for seed in range(4)]
    for _ in range(15):  # warm-up and recording may wait
        state.train_step(batches[:2])
        state.parts.average.update(state.parts.weights.state_dict())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    losses = []
    for step in range(100):
        set_lr(state.parts.optimizer, 0.001 * step)
        losses.append(state.train_step(batches[step % 2 : step % 2 + 2]).loss)
        state.parts.average.update(state.parts.weights.state_dict())
    torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(torch.stack(losses)).all()


def test_prefetched_batches_of_any_data_loader_are_those_of_the_cpu():
    images = torch.randint(0, 256, (20, 3, 32, 32), dtype=torch.uint8)
    samples = [(image, label, {"id": label}) for label, image in enumerate(images)]
    loader = DataLoader(samples, 4, collate_fn=channels_last_collate, pin_memory=True)
    on_gpu = list(DevicePrefetcher(loader, "cuda", ahead=2))
    on_cpu = list(DevicePrefetcher(loader, "cpu"))
    for raw, gpu, cpu in zip(loader, on_gpu, on_cpu, strict=True):
        assert raw[0].is_pinned() and gpu[0].is_contiguous(memory_format=CHANNELS_LAST)
        torch.testing.assert_close(gpu[0].cpu(), cpu[0], rtol=1e-5, atol=1e-5)
        assert torch.equal(gpu[1].cpu(), cpu[1]) and torch.equal(gpu[2]["id"].cpu(), cpu[2]["id"])


@pytest.mark.parametrize("graph", [False, True])
def test_poisoned_loader_memory_never_reaches_a_step(graph):
    """It is overwritten as soon as it may be, and the device is kept busy meanwhile."""
    state = put_together(settings(cuda_graph=graph, precision="bf16"))
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (24, 16, 64, 64, 3), dtype=torch.uint8, generator=generator)
    slots = torch.empty_like(pixels[: transfer.COPIES_UNDER_WAY + 1]).pin_memory()
    targets = torch.zeros(16, dtype=torch.int64).pin_memory()

    def host_batches():
        for number, numbers in enumerate(pixels):
            slot = slots[number % len(slots)].fill_(255).copy_(numbers)
            yield RawBatch(slot.permute(0, 3, 1, 2), targets, number, epoch=0)

    form = DeviceFormat(state.parts.device, torch.bfloat16, CHANNELS_LAST)
    normalise = Normalise([0.5] * 3, [0.25] * 3, form)
    seen = []
    for batch in transfer.to_device(host_batches(), normalise):
        assert batch.images.stride() == (12288, 1, 192, 3) and batch.images.dtype == torch.bfloat16
        torch.cuda._sleep(2_000_000)
        state.train_step([batch])
        seen.append(batch.images.float().mean())
    expected = ((pixels.float() / 255 - 0.5) / 0.25).to(torch.bfloat16).float().mean((1, 2, 3, 4))
    assert torch.stack(seen).tolist() == pytest.approx(expected.tolist(), abs=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("graph", [False, True])
def test_compiled_agrees_with_eager_and_never_recompiles(graph):
    """In two steps: over more, fp16 rounding grows in any correct programs."""
    eager = put_together(settings())
    compiled = put_together(settings(compile=True, cuda_graph=graph))
    assert train_steps(compiled, 2) == pytest.approx(train_steps(eager, 2), rel=2e-2)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.tensor(train_steps(compiled, 6, first=2)).isfinite().all()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("graph", ["cuda_graph=false", "cuda_graph=true"])
def test_ddp_trains_like_one_process(image_folder, tmp_path, graph):
    """Also in replays, after eleven steps, and the run ends: NCCL would wait for a live graph."""
    weights = []
    for ranks in (1, 2):
        shared = [*TINY, "device=cuda", f"data.root={image_folder}", "epochs=8"]
        shared += [f"batch_size={32 // ranks}", f"hydra.run.dir={tmp_path / str(ranks)}"]
        words = (graph,) if ranks > 1 else ()
        done = launch(ranks, "train.py", *shared, *words)
        assert done.returncode == 0, done.stderr
        weights.append(Run(tmp_path / str(ranks), 0).checkpoint()["model"])
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-4, atol=1e-4)


def test_workers_fill_pinned_memory_and_no_batch_is_overwritten(image_folder):
    """Forks write page-locked slots, and copies overlap with them."""
    words = {"name": "folder", "root": str(image_folder), "image_size": 64, "batch_size": 16}
    forked = {"workers": 3, "prefetch": 1, "device": SINGLE.device}
    cuda = DeviceFormat(SINGLE.device, torch.float32, CHANNELS_LAST)
    cpu = DeviceFormat(torch.device("cpu"), torch.float32, CHANNELS_LAST)
    with closing(data_of(**words)) as plain, closing(data_of(**words, **forked)) as pinned:
        for epoch in range(3):
            batches = list(pinned.train(epoch, cuda))
            for batch, other in zip(batches, plain.train(epoch, cpu), strict=True):
                torch.testing.assert_close(batch.images.cpu(), other.images, rtol=0, atol=1e-5)
                assert batch.targets.tolist() == other.targets.tolist()
            assert len(list(pinned.validation(cuda))) == len(list(plain.validation(cpu)))
        images, targets = pinned.train_loader._slots.batch(0, 64)
        assert images.is_pinned() and targets.is_pinned()


@pytest.mark.parametrize(
    ("words", "steps", "tolerance"),
    [
        ("cuda_graph=true ema_decay=0.5", 12, 2e-2),
        pytest.param("compile=true", 2, 5e-2, marks=pytest.mark.slow),
        pytest.param("compile=true cuda_graph=true", 2, 5e-2, marks=pytest.mark.slow),
    ],
)
def test_a_run_on_jpegs(train, words, steps, tolerance):
    """The step before the first epoch must leave nothing that breaks compilation or recording."""
    same = (*RUN, "epochs=4", "deterministic=true")  # a search may choose other algorithms
    plain, changed = train(*same), train(*same, *words.split())
    assert changed.losses[:steps] == pytest.approx(plain.losses[:steps], rel=tolerance)
    assert changed.summary["val"]["images"] == 21 and changed.exit_code == 0


def test_a_run_goes_on_where_it_stopped(train):
    words = (*RUN, "cuda_graph=true", "data.workers=2", "deterministic=true", "epochs=4")
    whole, part = train(*words), train(*words, "max_steps=7")
    assert whole.summary["workers"] == 2 and whole.summary["reserved_memory_gib"] > 0
    again = train(*words, f"resume={part.folder}")
    assert [*part.losses, *again.losses] == pytest.approx(whole.losses, rel=1e-6)


def test_the_profile_and_the_predictions_of_a_run(train, image_folder, tmp_path):
    run, out = train(*RUN, "profile=true", "epochs=4"), tmp_path / "predictions.csv"
    assert "conv" in (run.folder / "operators.txt").read_text()
    assert (run.folder / "trace.json.gz").stat().st_size > 0
    words = [f"weights={run.folder}", f"data.root={image_folder / 'val'}", "device=cuda"]
    assert cli(["predict", *words, f"out={out}"]) == 0
    assert len(out.read_text().splitlines()) >= 21


@pytest.mark.parametrize(
    "words",
    [
        "benchmark model=squeezenet1_1 batch_size=8 precision=fp16 cuda_graph=false,true",
        "zoo model=squeezenet1_1 batch_size=8 precision=fp16",
        "audit model=squeezenet1_1 time=true",
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_commands(words, device, tmp_path):
    command, *settings = words.split()
    out = tmp_path / ("zoo" if command == "zoo" else "result.json")
    more = [f"device={device}", "data.image_size=64", "time_limit_s=1", f"out={out}"]
    assert cli([command, *settings, *more]) == 0
    text = next(tmp_path.rglob("*.json")).read_text()
    assert "error" not in json.loads(text).get("rows", [{}])[0]
    if command == "audit":
        assert json.loads(text)["times"]["explained_pct"] > 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("graph", ["cuda_graph=false", "cuda_graph=true"])
def test_a_run_on_the_second_gpu(train, graph):
    words = (*RUN[1:], "data.workers=2", "epochs=3", graph)
    first, second = train("device=cuda:0", *words), train("device=cuda:1", *words)
    assert second.losses == pytest.approx(first.losses, rel=2e-2)
    assert torch.cuda.max_memory_allocated(1) > 0 and torch.cuda.current_device() == 0


def waiting(num_classes):
    """Reads a value of the device: such a step cannot be recorded."""
    model = small(num_classes)
    model.register_forward_hook(lambda _, inputs, logits: logits * float(logits.mean() < 1e9))
    return model


def test_a_step_that_cannot_be_recorded(train):
    """It goes on eagerly, or ends with what to do. The last test: before torch 2.15 the allocator
    records on.
    """
    words = (*RUN, f"model={__name__}:waiting", "epochs=3")
    if CAN_GO_ON_AFTER_FAILURE:
        plain, fallen_back = train(*words), train(*words, "cuda_graph=auto")
        assert fallen_back.losses == pytest.approx(plain.losses, rel=2e-2)
        torch.cuda.empty_cache()
    else:
        with pytest.raises(RecordingError, match="use cuda_graph=false"):
            train(*words, "cuda_graph=auto")
