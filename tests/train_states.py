"""The state of a run around a model and its optimizer."""

from functools import partial

import torch
from torch import nn

from cl_train.data.device import DeviceFormat
from cl_train.step.precision import BY_NAME, Fp32Weights
from cl_train.step.train_step import StepParts, train_step
from cl_train.training.state import TrainState

FORMAT = DeviceFormat(torch.device("cpu"), torch.float32, torch.contiguous_format)


def train_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, weights: Fp32Weights | None = None
) -> TrainState:
    weights = weights or Fp32Weights(model, BY_NAME["fp32"])
    parts = StepParts(model, weights, optimizer, scaler, BY_NAME["fp32"], FORMAT.device)
    return TrainState(model, parts, None, FORMAT, partial(train_step, parts))
