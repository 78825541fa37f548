"""The model is tried before the first step: refusals, crashes as errors, no trace left; unusual
models of a user train, or are refused in one message; and `batch_size=auto`.
"""

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn

from cl_train.config.schema import Config, ConfigError, OptimConfig
from cl_train.data.device import DeviceFormat
from cl_train.memory_format.convert import convert
from cl_train.step.make import StepSettings
from cl_train.step.precision import resolve_precision
from cl_train.system.distributed import Dist
from cl_train.training import build
from cl_train.training.build import BatchSpeed, resolve_batch_size, search, try_model
from tests.conftest import Run
from tests.measure.test_parity import MODELS as COMPARED
from tests.memory_format.test_odd_models import MODELS as AUDITED
from tests.networks import small

CPU = torch.device("cpu")
FP32 = resolve_precision("fp32", CPU)


def attempt(model: nn.Module, **changes: Any) -> None:
    form = DeviceFormat(CPU, torch.float32, torch.channels_last)
    try_model(model, StepSettings(FP32, **changes), form, (2, 3, 32, 32), 3)


def test_what_cannot_train_is_refused_in_one_line() -> None:
    broken = small(3)
    broken.register_forward_pre_hook(
        Mock(side_effect=RuntimeError("the first line\nand the second"))
    )
    with pytest.raises(ConfigError, match="the first line and the second"):
        attempt(broken)
    with pytest.raises(ConfigError, match=r"outputs \[2, 2\], not \[N, classes\] for 3 classes"):
        attempt(small(2))


@pytest.mark.parametrize(
    "changes", [{}, {"ema_decay": 0.9, "mixup": 0.2, "optim": OptimConfig(name="adamw", lr=9.0)}]
)
def test_the_trial_leaves_no_trace(changes: dict[str, Any]) -> None:
    model = small(3)
    model[1].eval()  # as a frozen part
    before = {name: value.clone() for name, value in model.state_dict().items()}
    numbers = torch.get_rng_state()
    attempt(model, **changes)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), numbers)
    assert model.training and not model[1].training


@pytest.mark.parametrize("loses", [False, True])
def test_the_trial_tells_that_the_model_loses_channels_last(
    loses: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = small(3)
    if loses:
        model[0].register_forward_hook(lambda module, inputs, output: output.contiguous())
    convert(model)
    cfg = Config(model="my_net:build", batch_size=2)
    cfg = replace(cfg, data=replace(cfg.data, image_size=32))
    form = DeviceFormat(CPU, torch.float32, torch.channels_last)
    with caplog.at_level("INFO"):
        build.try_run(cfg, model, StepSettings(FP32), form, 3)
    lines = [line for line in caplog.messages if "loses channels_last in " in line]
    assert len(lines) == loses
    assert all("cl-train audit model=my_net:build data.image_size=32" in line for line in lines)


MODELS = {f"{kind} {name}": row[0] for kind, rows in (("audited", AUDITED), ("compared", COMPARED))
          for name, row in rows.items()}  # fmt: skip
REMEDIES = {
    "audited dict": "logits",
    "audited lazy": "one batch",
    "audited meta": "meta",
    "compared view": "reshape",
    "compared sparse gradients": "sparse=False",
}

# The classifiers among them.
TRAINS = {
    f"compared {name}"
    for name in (
        "attribute that cannot be copied",
        "dataclass",
        "dict with attributes",
        "dropout",
        "logits",
        "named tuple",
        "reads strides",
        "recurrent",
        "scripted inside",
        "spectral_norm",
        "weight_norm, new",
        "weight_norm, old",
    )
}

chosen: Callable[[], nn.Module] = nn.Identity


def traced(num_classes: int) -> nn.Module:
    return torch.jit.trace(small(num_classes), torch.randn(2, 3, 32, 32), check_trace=False)


@pytest.mark.filterwarnings("ignore")
def test_a_traced_classifier_is_tried() -> None:
    attempt(traced(3))


def chosen_model(num_classes: int) -> nn.Module:
    return chosen()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_or_is_refused(
    name: str, train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "chosen", MODELS[name])
    words = ("data=synthetic", "data.root=null", "data.image_size=16", "data.synthetic_images=16")
    words += (
        "data.synthetic_classes=5",
        "batch_size=4",
        "max_steps=2",
        "log_to=[]",
        "channels_last=true",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about sparse, quantised and complex tensors
        try:
            train(f"model={__name__}:chosen_model", *words)
            assert name in TRAINS
        except ConfigError as error:
            assert name not in TRAINS and "AssertionError" not in str(error)
            assert REMEDIES.get(name, "") in str(error)
    assert torch.is_grad_enabled()


# --- batch_size=auto ------------------------------------------------------------------------------

ALONE = Dist(0, 1, CPU)


def found(
    dies_at: int = 10**6, half_speed_at: int = 16, **limits: Any
) -> tuple[int, list[int], list[int]]:
    """The choice, the sizes tried, and those that fit, where the weights take 1 GiB, an image 1/16
    GiB, and the speed grows to 1000 images/s.
    """
    asked: list[int] = []

    def measure(size: int) -> BatchSpeed:
        asked.append(size)
        if size >= dies_at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return BatchSpeed(size, 1000 * size / (size + half_speed_at), 1 + size / 16)

    with patch.object(build, "perf_counter", lambda: sum(asked)):
        chosen, measured = search(
            measure, **{"largest": 4096, "limit_gib": 1e6, "time_limit_s": 1e9} | limits
        )
    return chosen, asked, [item.batch_size for item in measured]


def test_the_size_doubles_while_it_fits_and_the_smallest_of_the_fastest_is_chosen() -> None:
    for limits, asked, fit in (
        (
            {"limit_gib": 10.5},
            [8, 16, 32, 64, 128],
            [8, 16, 32, 64, 128],
        ),  # 152 images fit: 256 is not tried
        ({"dies_at": 40}, [8, 16, 32, 64], [8, 16, 32]),  # unforeseen
        ({"limit_gib": 1.3}, [8, 4], [4]),
        ({"largest": 100}, [8, 16, 32, 64, 100], [8, 16, 32, 64, 100]),
        ({"largest": 5}, [5], [5]),
        ({"time_limit_s": 115}, [8, 16, 32], [8, 16, 32]),  # ends before the time is spent: 56 s
    ):
        assert found(**limits)[1:] == (asked, fit)
    # Speed half-way at 1 image: 64 images reach 98.5 % of the best, 32 only 97 %.
    assert found(half_speed_at=1)[0] == 64 and found(half_speed_at=1000)[0] == 4096
    with pytest.raises(ConfigError, match=r"not even 2 images fit into 1\.10 GiB"):
        found(limit_gib=1.1)
    with pytest.raises(RuntimeError, match="shapes"):
        search(Mock(side_effect=RuntimeError("shapes do not match")), 64, 1.0, 1.0)


@pytest.mark.slow
def test_the_search_keeps_within_its_memory(
    tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An injected limit: what is measured for the chosen size stays below it, and the generators
    stay as they were.
    """
    monkeypatch.setattr(build, "STEPS", 1)
    monkeypatch.setattr(build, "TIME_LIMIT_S", {"cpu": 1e6})
    cfg = tiny("batch_size=auto", "channels_last=auto", "precision=bf16", "augment.repeats=2")
    results: list[tuple[int, list[BatchSpeed]]] = []
    monkeypatch.setattr(build, "search", lambda *a: results.append(search(*a)) or results[-1])
    state = torch.get_rng_state()
    free = resolve_batch_size(cfg, ALONE)
    limit_gib = results[0][1][2].peak_memory_gib  # of 32 images
    monkeypatch.setattr(build, "available_bytes", lambda device: int(limit_gib * 2**30))
    bounded = resolve_batch_size(cfg, ALONE)
    assert torch.equal(torch.get_rng_state(), state)
    (_, measured), (_, fitting) = results
    assert measured[-1].batch_size == 96, "there are 96 training images"
    peaks = [item.peak_memory_gib for item in measured]
    assert peaks == sorted(peaks) and peaks[-1] > 2 * peaks[0]
    assert 8 <= bounded.batch_size < 32 and fitting[-1].peak_memory_gib <= 0.9 * limit_gib
    assert free.batch_size in [item.batch_size for item in measured]
    assert replace(free, batch_size=0) == cfg, "nothing else of the settings changes"
    assert resolve_batch_size(free, ALONE) is free, "a number is left alone"


@pytest.mark.slow
def test_a_run_with_auto_writes_the_number_down(
    train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "STEPS", 1)
    monkeypatch.setattr(build, "LARGEST", {"cpu": 16})
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    original, cublas = build.build_model, []
    read = partial(os.environ.get, "CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(build, "build_model", lambda *a: cublas.append(read()) or original(*a))
    done = train(
        "batch_size=auto", "epochs=1", "optim.reference_batch_size=32", "deterministic=true"
    )
    assert cublas[0] == ":4096:8", (
        "cuBLAS reads it at its first product, which the measurement calls"
    )
    assert (chosen := done.summary["global_batch_size"]) in (8, 16)
    assert f"batch_size: {chosen}\n" in (done.folder / "config.yaml").read_text()
    assert done.records("train")[0]["lr"] == pytest.approx(0.4 * chosen / 32)
