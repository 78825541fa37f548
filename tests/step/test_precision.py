"""Number formats on a CPU: the same code paths as on a GPU, so that none of them rots."""

import re

import pytest
import torch
from torch import backends

from cl_train.config.schema import PRECISIONS
from cl_train.step import precision as precision_module
from cl_train.step.precision import (
    BY_NAME,
    EMA,
    Fp32Weights,
    cast_model,
    kernel_selection,
    resolve_precision,
)
from tests.networks import small

CPU = torch.device("cpu")
NEWER = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)


def test_auto_is_resolved_and_fp16_on_a_cpu_is_doubted():
    assert set(PRECISIONS) == {"auto", *BY_NAME}
    precision = resolve_precision("auto", CPU)
    assert precision.name in ("bf16", "fp32") and precision.reason
    assert "precision=auto" in resolve_precision("fp16_o2", CPU).reason
    assert resolve_precision("fp32", CPU) is BY_NAME["fp32"]


@pytest.mark.parametrize(
    ("product_s", "convolution_s", "depthwise_s", "expected"),
    [
        (0.25, 0.25, 0.5, "bf16"),
        (0.25, 0.25, 1.5, "bf16"),
        (0.9, None, None, "fp32"),
        (0.25, 2.0, None, "fp32"),
    ],
)
def test_auto_is_bf16_on_a_cpu_where_products_and_dense_convolutions_are_faster_and_says_it(
    product_s, convolution_s, depthwise_s, expected, monkeypatch
):
    def planted_s(work):
        convolved_s = depthwise_s if "groups" in work.keywords else convolution_s
        of_bf16 = {torch.matmul: product_s, torch.conv2d: convolved_s}
        return of_bf16[work.func] if work().dtype == torch.bfloat16 else 1.0

    monkeypatch.setattr(precision_module, "thread_s", planted_s)
    uncached = precision_module.bf16_shares.__wrapped__
    monkeypatch.setattr(precision_module, "bf16_shares", uncached)
    chosen = resolve_precision("auto", CPU)
    times_s = [product_s, convolution_s, depthwise_s]
    timed = [f"{100 * seconds:.0f}" for seconds in times_s if seconds is not None]
    assert chosen.name == expected and re.findall(r"(\d+) %", chosen.reason) == timed
    assert "cl-train benchmark precision=fp32,bf16" in chosen.reason


def test_fp32_weights_have_the_models_strides_and_take_what_fp16_cannot_hold():
    """All but BatchNorm is fp16; the average follows the fp32 weights and the statistics."""
    model = cast_model(small(3).to(memory_format=torch.channels_last), BY_NAME["fp16_o2"])
    weights, average = Fp32Weights(model, BY_NAME["fp16_o2"]), EMA(model, decay=0.75)
    halves = {name for name, value in model.state_dict().items() if value.dtype == torch.float16}
    assert halves == {"0.weight", "3.weight", "3.bias", "8.weight", "8.bias"}
    half, full = model[3].weight, weights.trainable()["3.weight"]
    assert full.dtype == torch.float32 and full.stride() == half.stride() == (72, 1, 24, 8)
    model(torch.randn(4, 3, 32, 32).half()).float().sum().backward()
    gradient = half.grad.float()
    weights.copy_gradients_from_model()
    assert half.grad is None and torch.equal(full.grad, gradient)
    before = full.detach().clone()
    with torch.no_grad():
        full.add_(8e-6)  # below fp16's resolution of larger weights
    weights.copy_weights_to_model()
    assert torch.equal(half, full.half())
    average.update(weights.state_dict())
    change, expected = average.module[3].weight - before, torch.full_like(before, 2e-6)
    torch.testing.assert_close(change, expected, rtol=0.05, atol=0)
    averaged = average.module[1]
    assert torch.equal(averaged.running_mean, model[1].running_mean / 4)
    assert averaged.num_batches_tracked == 1
    assert average.module[3].weight.stride() == full.stride()


@pytest.fixture
def default_switches():
    yield
    backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32 = True, False


@pytest.mark.usefixtures("default_switches")
@pytest.mark.parametrize(
    "program",
    [
        lambda: None,
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: setattr(backends, "fp32_precision", "tf32"),
        lambda: setattr(backends.cudnn.conv, "fp32_precision", "ieee"),
    ],
)
def test_kernel_selection_is_restored_whichever_switches_a_program_uses(program):
    """Older and newer ones; in the block both can be read, for example by a user's model."""
    reads = [
        *(lambda part=part: part.fp32_precision for part in NEWER),
        lambda: backends.cuda.matmul.allow_tf32,
        torch.get_float32_matmul_precision,
        lambda: backends.cudnn.allow_tf32,
        lambda: backends.cudnn.benchmark,
    ]

    def state(read):
        try:
            return read()
        except RuntimeError:  # torch's: older and newer ones differ
            return "differ"

    program()
    before = list(map(state, reads))
    for tf32 in (True, False):
        with pytest.raises(KeyError), kernel_selection(tf32=tf32, autotune=True):
            assert [part.fp32_precision == "tf32" for part in NEWER] == [tf32] * 3
            assert backends.cuda.matmul.allow_tf32 is backends.cudnn.allow_tf32 is tf32
            with kernel_selection(autotune=False):
                assert not backends.cudnn.benchmark and backends.cudnn.allow_tf32 is tf32
            assert backends.cudnn.benchmark
            raise KeyError
        for restored, earlier in zip(map(state, reads), before, strict=True):
            assert earlier in (restored, "differ")
