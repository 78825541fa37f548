"""What the fork server imports before it forks a run."""

import tensorboard.plugins.hparams.api_pb2  # noqa: F401
import torch.utils.tensorboard  # noqa: F401
from PIL import Image

import cl_train.commands.train
import cl_train.measure.auto
import cl_train.training.loop  # noqa: F401
import tests.faults.plants  # noqa: F401
from cl_train.config.command_line import check_command_line

Image.init()
check_command_line([])  # Hydra loads its plugins, and its parsers build their tables
