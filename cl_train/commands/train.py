"""Train an image classifier and measure the effect of the channels_last memory format.

    cl-train train channels_last=true                       on the sample data, which is generated on first use
    cl-train train -m channels_last=true,false repeats=3    compare the layouts; ends with a verdict
    cl-train train channels_last=auto model=resnet50        measure both layouts, train with the faster one
    cl-train train data=imagenet data.root=/datasets/imagenet model=resnet50 channels_last=true precision=fp16
    torchrun --standalone --nproc-per-node=8 -m cl_train train experiment=resnet50_90ep data.root=/datasets/imagenet
    srun --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 python -m cl_train train ...      (docs/clusters.md)

`python train.py` is the same from a checkout. The training loop is `train` in cl_train/training/loop.py.
"""

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from cl_train.config.command_line import (
    CONF_DIR,
    GROUPS,
    CommandLine,
    check_command_line,
    group_choices,
    hydra_folder,
    quoted,
)
from cl_train.config.help import train_help
from cl_train.config.schema import LAYOUT_NAMES, ConfigError
from cl_train.config.validation import load, stop_with
from cl_train.system.launcher import adopt_srun, read_launch
from cl_train.system.run_folder import claimed_folder, safe_name

USAGE = "cl-train train [-m] [group=choice] [key=value ...]      (from a checkout: python train.py ...)"


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")
def train(raw: DictConfig) -> None:
    """The run itself, in the folder that Hydra made for it."""
    from cl_train.models.preprocessing import follow_published_preprocessing
    from cl_train.system.signals import exit_without_teardown
    from cl_train.training.loop import run_and_log_failure

    context = HydraConfig.get()
    given_keys = {word.partition("=")[0].lstrip("+") for word in context.overrides.task}
    try:
        cfg = load(raw)
        if cfg.evaluate_only and cfg.weights is not None:
            cfg = replace(cfg, data=follow_published_preprocessing(cfg.data, cfg.model, cfg.weights, given_keys))
        exit_without_teardown(run_and_log_failure(cfg, Path(context.runtime.output_dir)))
    except ConfigError as error:  # caught here, because Hydra would print a traceback
        stop_with(error)


def main(words: list[str]) -> int:
    """Check the command line as a whole, then start the run or the sweep."""
    if {"-h", "--help"} & set(words):
        print(train_help(USAGE, __doc__ or "", {group: group_choices(group) for group in GROUPS}))
        return 0
    OmegaConf.register_new_resolver("run_name", run_name, replace=True)
    adopt_srun()
    try:
        runs = check_command_line(words)
        with ExitStack() as claim:
            if runs:  # no runs for --cfg and tab completion, which must not import torch
                launch = read_launch()
                from cl_train.system.checkpoint_store import resume_path
                from cl_train.training import loop

                loop.check_runs(runs)
                line = CommandLine.parse(words)
                if line.multirun:
                    from cl_train.comparison.sweep import run_sweep

                    return run_sweep(words, runs=runs)
                folder = Path()  # only rank 0 creates a run folder: ranks would generate different timestamps
                if launch is None or launch.rank == 0:
                    if runs[0].resume not in (None, "auto"):
                        resume_path(runs[0].resume)  # before the sample data is generated
                    folder = hydra_folder(line.overrides, "run")
                    # Before Hydra writes into the folder: a refused run must not change the files of another one.
                    claim.enter_context(claimed_folder(folder, resume=runs[0].resume, overwrite=runs[0].overwrite))
                words = [*words, f"hydra.run.dir={quoted(folder)}"]
            sys.argv = ["train.py", *words]  # Hydra reads it
            train()
        return 0
    except KeyboardInterrupt:  # in training it is a request to save; before that there is nothing to save
        print("stopped before the first step", file=sys.stderr)
        return 130


def run_name(model: str, channels_last: object, precision: str, device: str) -> str:
    """The end of a run folder's name: `resnet50_channels_last_fp16`. Imports torch where precision=auto."""
    layout = LAYOUT_NAMES.get(str(channels_last).lower(), str(channels_last))
    if precision == "auto":
        from cl_train.step.precision import resolve_precision
        from cl_train.system.distributed import choose_device

        precision = resolve_precision(precision, choose_device(device)).name
    return safe_name(f"{model}_{layout}_{precision}")
