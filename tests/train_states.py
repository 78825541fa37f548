"""The state of a run around a model and its optimizer."""

from functools import partial

import torch
from torch import nn

from cl_train.data.device import DeviceFormat
from cl_train.step.precision import EMA, Fp32Weights, Precision
from cl_train.step.train_step import StepParts, train_step
from cl_train.training.state import TrainState


def train_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    weights: Fp32Weights | None = None,
    average: EMA | None = None,
) -> TrainState:
    precision = Precision("fp32")
    weights = weights or Fp32Weights(model, precision)
    parts = StepParts(model, weights, optimizer, scaler, precision, torch.device("cpu"))
    batch_format = DeviceFormat(parts.device, torch.float32, torch.contiguous_format)
    return TrainState(model, parts, average, batch_format, partial(train_step, parts))
