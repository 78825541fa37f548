"""The model is tried before the first step, and the trial leaves no trace."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from cl_train.config.schema import DataConfig, OptimConfig
from cl_train.data.device import DeviceFormat
from cl_train.memory_format.convert import convert
from cl_train.step.precision import resolve_precision
from cl_train.step.train_step import StepSettings
from cl_train.system.distributed import Dist
from cl_train.training import build
from cl_train.training.build import try_model
from cl_train.training.parts import ModelSettings
from tests.measure.conftest import unchanged
from tests.networks import small

CPU = torch.device("cpu")
FP32 = resolve_precision("fp32", CPU)


def attempt(model, **changes):
    form = DeviceFormat(CPU, torch.float32, torch.channels_last)
    try_model(model, StepSettings(FP32, **changes), form, (2, 3, 32, 32), 3)


def test_a_frozen_batch_norm_stays_frozen_when_it_is_synchronised(monkeypatch):
    monkeypatch.setattr(nn.Module, "to", lambda model, device: model)
    wanted = ModelSettings("tests.networks:small", freeze=["1"], sync_batchnorm=True)
    data = SimpleNamespace(num_classes=3, classes=())
    model, _ = build.build_model(wanted, FP32, data, Dist(0, 2, torch.device("cuda")))
    norm = model.train()[1]
    assert isinstance(norm, nn.SyncBatchNorm) and not norm.training


def test_ddp_is_told_that_recorded_steps_are_alike(monkeypatch):
    wrap = Mock(side_effect=lambda model, dist, static_graph: model)
    monkeypatch.setattr(build, "wrap_in_ddp", wrap)
    form = DeviceFormat(CPU, torch.float32, torch.contiguous_format)
    for accumulate_steps in (1, 2):
        settings = StepSettings(FP32, cuda_graph=True, accumulate_steps=accumulate_steps)
        build.train_state(ModelSettings("small"), small(3), settings, form, 3, Dist(0, 1, CPU))
        assert wrap.call_args.kwargs == {"static_graph": accumulate_steps == 1}


@pytest.mark.parametrize(
    "changes", [{}, {"ema_decay": 0.9, "mixup": 0.2, "optim": OptimConfig(name="adamw", lr=9.0)}]
)
def test_the_trial_leaves_no_trace(changes):
    model = small(3)
    model[1].eval()  # as a frozen part
    with unchanged(model):
        attempt(model, **changes)
    assert not model[1].training


@pytest.mark.parametrize(
    ("loses", "is_contiguous", "name", "command"),
    [
        (False, False, "my_net:build", None),
        (True, True, "my_net:build", None),
        (True, False, "my_net:build", "data.image_size=32 batch_size=2 precision=fp32"),
        (True, False, "of_this_process:build", "cl_train.audit(model, images)"),
    ],
)
def test_the_trial_tells_that_the_model_loses_channels_last_unless_it_trains_contiguous(
    loses, is_contiguous, name, command, caplog, monkeypatch
):
    monkeypatch.setitem(sys.modules, "of_this_process", ModuleType("of_this_process"))
    model = small(3)
    if loses:
        model[0].register_forward_hook(lambda module, inputs, output: output.contiguous())
    convert(model)
    wanted = ModelSettings(name, batch_size=2, data=DataConfig(image_size=32))
    form = DeviceFormat(CPU, torch.float32, torch.channels_last)
    if is_contiguous:
        convert(model, memory_format=torch.contiguous_format)
        model[0].register_forward_pre_hook(
            lambda module, inputs: inputs[0].to(memory_format=torch.channels_last)
        )
        form = replace(form, memory_format=torch.contiguous_format)
    with caplog.at_level("INFO"):
        build.try_run(wanted, model, StepSettings(FP32), form, 3)
    lines = [line for line in caplog.messages if "loses channels_last in " in line]
    assert [line.endswith(command) for line in lines] == [True] * (command is not None)
