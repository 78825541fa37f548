"""What a program has set in torch neither changes what a public function computes nor is lost."""

import random
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import torch
from torch import nn

import cl_train
from cl_train.step.precision import BATCH_NORMS
from tests.contract.test_python_train import TINY
from tests.measure.test_parity import Made, backward, network
from tests.networks import dropout, small

KINDS = ("cached", "no_grad", "context", "all")
IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@contextmanager
def ambient(kind):
    """What a program can set for its thread; "all" but what its parts would hide."""
    with ExitStack() as stack:
        if kind == "all":
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            stack.enter_context(torch.inference_mode())
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float64)
            stack.callback(torch.set_default_device, None)
            torch.set_default_device("meta")
        elif kind == "cached":  # a switched off autocast keeps the cache of the one around it
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            stack.enter_context(torch.autocast("cpu", enabled=False))
        elif kind == "no_grad":
            stack.enter_context(torch.no_grad())
        else:
            stack.enter_context(torch.device("meta"))
        yield


def flags():
    return (
        *(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")),
        torch.is_autocast_cache_enabled(),
        torch.get_autocast_dtype("cpu"),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        str(torch.get_default_device()),
        torch.get_deterministic_debug_mode(),
        torch.backends.cudnn.benchmark,
        torch.get_float32_matmul_precision(),
        torch.get_num_threads(),
    )


def generators():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def trained(folder, tmp_path):
    """Two epochs at which a model learns the colours, if its weights are those that it uses."""
    words = ("data=folder", f"hydra.run.dir={tmp_path}", "overwrite=true", "epochs=2")
    given = TINY | {"batch_size": 32, "precision": "bf16", "data": TINY["data"] | {"root": folder}}
    run = cl_train.train(*words, **given)
    return {(r["kind"], r["step"]): (r["loss"], r["top1"]) for r in run.history}


def model():
    with torch.device("cpu"), torch.inference_mode(False), torch.random.fork_rng([]):
        torch.manual_seed(0)
        return small(4).float()


def wrong_gradient():
    with torch.device("cpu"), torch.inference_mode(False), torch.random.fork_rng([]):
        faulty = network(Made(backward)).float()
    report = cl_train.check_parity(faulty, image_size=12, device="cpu")
    return report.passed, report.first_divergence, report.precision


def collated():
    batch = cl_train.channels_last_collate([IMAGES[0].numpy(), IMAGES[1].numpy()])
    return batch.dtype, batch.stride(), batch.device, batch.is_inference()


def of_loader(folder):
    with cl_train.image_loader(
        folder, batch_size=4, image_size=32, workers=0, device="cpu"
    ) as loader:
        return [(x.dtype, x.sum().item(), x.is_inference(), y.tolist()) for x, y in loader]


def prefetched():
    raw = [(torch.full((1, 3, 8, 8), 9, dtype=torch.uint8, device="cpu"), 1)]
    batches = cl_train.DevicePrefetcher(raw, "cpu")
    return [(x.dtype, x.sum().item(), x.is_inference(), y) for x, y in batches]


@pytest.fixture
def calls(image_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return {
        "DevicePrefetcher": prefetched,
        "audit": lambda: str(cl_train.audit(model(), IMAGES, name="m", time=False)),
        "channels_last_collate": collated,
        "check_parity": wrong_gradient,
        "image_loader": lambda: of_loader(image_folder),
        "train": lambda: trained(image_folder, tmp_path / "run"),
    }


def test_one_decorator_keeps_it_out_of_all_functions():
    """But for those that read strides or watch a block of the caller."""
    reading = {"classify", "layout_guard", "DevicePrefetcher"}  # the last one's iterator has it
    for name in set(cl_train._MODULES) - reading:
        assert hasattr(getattr(cl_train, name), "__wrapped__"), name


@pytest.mark.parametrize(
    "name",
    ["DevicePrefetcher", "audit", "channels_last_collate", "check_parity", "image_loader", "train"],
)
def test_state_of_the_caller(name, calls):
    """Only a training shows its single parts."""
    expected = calls[name]()
    for kind in KINDS if name == "train" else ("all",):
        with ambient(kind):
            before = flags(), generators()
            result = calls[name]()
            after = flags(), generators()
        assert result == expected, kind
        assert after[0] == before[0], kind
        assert after[1] == before[1] or name == "image_loader", kind
        with ambient(kind), torch.inference_mode(False):  # the caller's autocast goes on
            conv = nn.Conv2d(3, 4, 3, device="cpu", dtype=torch.float32)
            assert conv(IMAGES).dtype == (torch.bfloat16 if kind == "all" else torch.float32)


@pytest.mark.parametrize("mode", ["default", "warn", "error"])
def test_deterministic_algorithms_of_the_program(mode, calls, tmp_path):
    torch.set_deterministic_debug_mode(mode)
    try:
        before = torch.get_deterministic_debug_mode()
        calls["train"]()
        assert torch.get_deterministic_debug_mode() == before
        config = (tmp_path / "run/config.yaml").read_text()
        assert f"deterministic: {str(mode != 'default').lower()}" in config
        calls["check_parity"]()
        assert torch.get_deterministic_debug_mode() == before
    finally:
        torch.set_deterministic_debug_mode("default")


def test_an_error_gives_the_state_back(calls):
    with ambient("all"):
        before = flags()
        with pytest.raises(cl_train.ConfigError):
            cl_train.audit(model(), torch.zeros(2))
        assert flags() == before


def test_a_module_given_as_an_object_is_given_back(image_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = dropout(4)
    given[3].weight.requires_grad_(False)
    given[1].eval()
    modes = [module.training for module in given.modules()]
    trains = [parameter.requires_grad for parameter in given.parameters()]
    settings = TINY | {"model": given, "data": TINY["data"] | {"root": image_folder}}
    for frozen in (["1", "4"], []):
        cl_train.train("data=folder", freeze=frozen, **settings)
        assert [module.training for module in given.modules()] == modes
        assert [parameter.requires_grad for parameter in given.parameters()] == trains
        given.train()
        assert all(module.training for module in given.modules() if type(module) in BATCH_NORMS)
        given[1].eval()
