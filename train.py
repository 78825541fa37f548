"""Train an image classifier and measure what the channels_last memory format is worth.

    python train.py channels_last=true                       on the sample data, which is generated on first use
    python train.py -m channels_last=true,false repeats=3    compare the layouts; ends in a verdict
    torchrun --standalone --nproc-per-node=8 train.py data=imagenet data.root=/datasets/imagenet model=resnet50

`python train.py --help` lists the settings. This file is short on purpose: the loop is `train` in
cl_train/training/loop.py.
"""

import sys

import hydra
from omegaconf import DictConfig

from cl_train.config.command_line import check_command_line, requested_folder, run_folder
from cl_train.config.schema import ConfigError, load, stop_with
from cl_train.system.run_folder import check_writable


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(raw: DictConfig) -> None:
    from cl_train.system.signals import ignore_stop_signals
    from cl_train.training.loop import run

    try:
        code = run(load(raw), run_folder())
        ignore_stop_signals()
        sys.exit(code)
    except ConfigError as error:  # here, because Hydra would print a traceback
        stop_with(error)


if __name__ == "__main__":
    try:
        runs = check_command_line(sys.argv[1:])
        if runs:  # none for --help, --cfg and tab completion, which should not wait for torch
            from cl_train.training import loop

            loop.check(runs)
            if "-m" in sys.argv or "--multirun" in sys.argv:
                from cl_train.comparison.sweep import run_sweep

                sys.exit(run_sweep(sys.argv[1:]))
            check_writable(requested_folder(sys.argv[1:]))  # Hydra itself would fail with a traceback
            sys.argv += loop.hydra_arguments_of_rank()
        main()
    except ConfigError as error:
        stop_with(error)
    except KeyboardInterrupt:  # in training it is a request to save; before that there is nothing to save
        print("stopped before the first step", file=sys.stderr)
        sys.exit(130)
