"""cl_train against others that do the same work, in alternating blocks. Keys are those of `cl-train`.

    python -m benchmarks.peers overhead model=resnet18 batch_size=32 data.image_size=224 rounds=4 out=FILE.json
    python -m benchmarks.peers loader data.root=/datasets/imagenet data.workers=8 out=FILE.json
    python -m benchmarks.peers collate batch_size=64 data.image_size=224

overhead: training on synthetic data against a bare forward-backward-step loop with the same model, on one fixed batch.
The ratio is bare step time / cl_train's step time, the median over the rounds: 1 means no overhead.
loader: cl_train's loader, torchvision's reference, and timm's (if it is installed), on the same files.
collate: channels_last_collate against copying the same bytes, at once (`block_copy`) or image by image, and against
default_collate with `.to(channels_last)`. All write to new memory, on one thread.
"""

import contextlib
import importlib
import io
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from cl_train.cli import exit_code
from cl_train.commands import print_result
from cl_train.comparison import suite
from cl_train.comparison.statistics import alternate
from cl_train.comparison.suite import Pipeline
from cl_train.config.schema import OVERWRITE_HELP, ConfigError, LoaderBenchmarkSettings, setting
from cl_train.config.validation import load
from cl_train.data.collate import channels_last_collate
