"""The recorded step: warm-up, recording and replay train as `train_step` does.

The recorder of these tests runs on the CPU; `test_gpu.py` has the CUDA graph itself.
"""

import pytest
import torch
from torch.testing import assert_close

from cl_train.config.schema import FUSED_OPTIMIZERS
from cl_train.config.validation import checked_config
from cl_train.data.device import Batch
from cl_train.errors import ConfigError
from cl_train.step.cuda_graph import GraphedStep, Recorder
from cl_train.step.optim import set_lr
from cl_train.step.train_step import Loss, train_step
from tests.conftest import CPU_PRECISIONS
from tests.step.test_train_step import make_batch, make_parts

CPU = torch.device("cpu")


class CountingRecorder(Recorder):
    """Remembers the calls; like a CUDA graph, a replay writes into the result of the one before."""

    def __init__(self):
        super().__init__(CPU)
        self.asked = []

    def run(self, work):
        self.asked.append("run")
        return super().run(work)

    def record(self, work):
        self.asked.append("record")
        result = torch.empty(0)

        def replay():
            values = work()
            return result.resize_(values.shape).copy_(values)

        return replay


def state(parts):
    """Weights, statistics, moments and the loss scale."""
    weights = [parts.wrapped_model.state_dict(), parts.weights.state_dict()]
    return [*weights, parts.optimizer.state_dict()["state"], parts.scaler.state_dict()]


def values(sums):
    return [float(value) for value in (sums.loss, sums.correct1, sums.correct5, sums.skipped)]


@pytest.mark.parametrize("optimizer", list(FUSED_OPTIMIZERS))
@pytest.mark.parametrize("name", CPU_PRECISIONS)
def test_step_by_step_as_train_step(name, optimizer):
    """Twelve steps: another learning rate in each, two micro-batches, clipping, two overflows."""
    given = {"optimizer": optimizer, "clip_norm": 1.0, "loss": Loss(label_smoothing=0.1)}
    eager, recorded = make_parts(name, **given), make_parts(name, **given)
    step = GraphedStep(recorded, CountingRecorder())
    for parts in (eager, recorded):
        for group in parts.optimizer.param_groups:
            group["lr"] = torch.tensor(0.0)  # float32 in both, so that results are equal
    for number in range(12):
        batches = [make_batch(eager, seed=10 * number + micro) for micro in range(2)]
        if number in (0, 6):
            batches[1].images[0, 0, 0, 0] = float("inf")
        for parts in (eager, recorded):
            set_lr(parts.optimizer, 0.01 * (number + 1))
        expected = values(train_step(eager, batches))
        found = values(step(batches))
        assert found == pytest.approx(expected, nan_ok=True)
        assert found[3] == (number in (0, 6))
        assert_close(state(eager), state(recorded), rtol=0, atol=0, equal_nan=True)
    assert step.replay is not None
    if name.startswith("fp16"):
        assert recorded.scaler.get_scale() == 256, "two overflows halved 1024 twice"


def test_batches_of_another_shape_or_layout_are_recorded_anew():
    """With the results of eager steps, though a replay writes where the one before wrote, from its
    copy of a batch.
    """
    parts, eager, recorder = make_parts("fp32"), make_parts("fp32"), CountingRecorder()
    step, given, expected = GraphedStep(parts, recorder, warm_up=2), [], []
    for seed, images in enumerate((8, 8, 8, 8, 8, 5, 5, 5, 5)):
        batch = make_batch(parts, seed=seed, images=images)
        given.append(step([batch]))
        batch.images.fill_(float("nan"))
        expected.append(values(train_step(eager, [make_batch(eager, seed=seed, images=images)])))
    assert [values(sums) for sums in given] == [pytest.approx(row, rel=1e-6) for row in expected]
    assert_close(parts.wrapped_model[0].weight, eager.wrapped_model[0].weight)
    assert recorder.asked == ["run", "run", "record"] * 2
    other = make_batch(parts, images=5)
    step([Batch(other.images.contiguous(), other.targets)])
    assert recorder.asked[6:] == ["run"], "strides are part of a recording"


def test_what_cannot_be_recorded_is_refused():
    with pytest.raises(ConfigError, match="rmsprop has no fused kernel"):
        checked_config({"cuda_graph": "true", "optim": {"name": "rmsprop"}})
    assert checked_config({"cuda_graph": True}).cuda_graph == "true"
