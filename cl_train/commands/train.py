"""Train an image classifier and measure what the channels_last memory format is worth.

    cl-train train channels_last=true                       on the sample data, which is generated on first use
    cl-train train -m channels_last=true,false repeats=3    compare the layouts; ends in a verdict
    torchrun --standalone --nproc-per-node=8 -m cl_train train data=imagenet data.root=/datasets/imagenet

`python train.py` is the same from a checkout. The loop is `train` in cl_train/training/loop.py.
"""

from __future__ import annotations

import sys

import hydra
from omegaconf import DictConfig

from cl_train.config.command_line import CONF_DIR, check_command_line, requested_folder, run_folder
from cl_train.config.schema import ConfigError
from cl_train.config.validation import load, stop_with
from cl_train.system.run_folder import check_writable


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")
def train(raw: DictConfig) -> None:
    """The run itself, in the folder that Hydra made for it."""
    from cl_train.system.signals import ignore_stop_signals
    from cl_train.training.loop import run

    try:
        code = run(load(raw), run_folder())
        ignore_stop_signals()
        sys.exit(code)
    except ConfigError as error:  # here, because Hydra would print a traceback
        stop_with(error)


def main(words: list[str]) -> int:
    """Check the command line as a whole, then start the run or the sweep."""
    try:
        runs = check_command_line(words)
        if runs:  # none for --help, --cfg and tab completion, which must not wait for torch
            from cl_train.training import loop

            loop.check(runs)
            if "-m" in words or "--multirun" in words:
                from cl_train.comparison.sweep import run_sweep

                return run_sweep(words)
            check_writable(requested_folder(words))  # Hydra itself would fail with a traceback
            words = [*words, *loop.hydra_arguments_of_rank()]
        sys.argv = ["train.py", *words]  # Hydra reads it
        train()
        return 0
    except KeyboardInterrupt:  # in training it is a request to save; before that there is nothing to save
        print("stopped before the first step", file=sys.stderr)
        return 130
