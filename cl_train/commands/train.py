"""Train an image classifier and measure the effect of the channels_last memory format.

    cl-train train channels_last=true                       on the sample data, which is generated on first use
    cl-train train -m channels_last=true,false repeats=3    compare the layouts; ends with a verdict
    cl-train train channels_last=auto model=resnet50        measure both layouts, train with the faster one
    cl-train train data=imagenet data.root=/datasets/imagenet model=resnet50 channels_last=true precision=fp16
    cl-train train config=outputs/RUN optim.lr=0.2          the settings of a run or of a YAML file, one changed
    cl-train train evaluate_only=true resume=outputs/RUN    evaluate a run, with its settings
    cl-train train --config-dir=recipes experiment=mine     recipes/experiment/mine.yaml; also found in ./conf
    torchrun --standalone --nproc-per-node=8 -m cl_train train experiment=resnet50_90ep data.root=/datasets/imagenet
    srun --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 python -m cl_train train ...      (docs/clusters.md)

`python train.py` is the same from a checkout, and `cl_train.train(...)` in Python. The training loop is in
cl_train/training/loop.py.
"""

import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from cl_train.config.command_line import GROUPS, CommandLine, Composed, as_word, compose, group_choices
from cl_train.config.schema import LAYOUT_NAMES, Config, ConfigError
from cl_train.config.validation import command_help, flatten
from cl_train.system.files import safe_name
from cl_train.system.processes import adopt_srun, read_launch

if TYPE_CHECKING:
    from cl_train.training.records import RunResult

USAGE = "cl-train train [-m] [group=choice] [key=value ...]      (from a checkout: python train.py ...)"


def main(words: list[str]) -> int:
    """Check the command line as a whole, then start the run or the sweep. Returns the exit code."""
    if {"-h", "--help"} & set(words):
        choices = [f"{group}={'|'.join(group_choices(group))}" for group in GROUPS]
        print(command_help(USAGE, __doc__ or "", {"settings": Config}, choices))
        return 0
    line = CommandLine.parse(words)
    runs = _compose(line)
    if line.printed:
        raw = runs[0].raw
        print(OmegaConf.to_yaml(OmegaConf.masked_copy(raw, [str(key) for key in raw if key != "hydra"])), end="")
        return 0
    if line.multirun:
        from cl_train.comparison.sweep import run_sweep
        from cl_train.training.setup import check_runs

        check_runs([run.cfg for run in runs])
        return run_sweep(words, runs=runs)
    try:
        return _train(runs[0], command=None).exit_code
    except KeyboardInterrupt:  # in training it is a request to save; before that there is nothing to save
        print("stopped before the first step", file=sys.stderr)
        return 130
    except ConfigError:  # before torch is imported for `describe_failure`
        raise
    except Exception as error:
        from cl_train.training.records import describe_failure

        if describe_failure(error) is None:
            raise
        return 1  # logged by the run


def train(*overrides: str, **settings: Any) -> "RunResult":
    """Train in this process, as train.py does; may be called again.

    Args:
        overrides: words of the command line, such as "channels_last=true", "optim=adamw" or "config=outputs/RUN".
        settings: the same as Python values; they come after the words: `model="resnet50"`, `data={"root": path}`,
            `**{"optim.lr": 0.1}`.

    Raises:
        ConfigError: wrong settings; the message has one line per problem.
        KeyboardInterrupt: Ctrl-C, after a checkpoint was saved; a second Ctrl-C does not wait for it.
        TrainingFault, CheckpointError, BadImageError, WorkerError, RankFault, OSError: the run cannot continue.
    """
    words = [*overrides]
    for key, value in flatten(settings):
        if callable(value):
            raise ConfigError(f"{key}= takes a name or package.module:function, not an object ({type(value).__name__})")
        words.append(f"{key}={as_word(value)}")
    line = CommandLine.parse(words)
    if line.multirun or line.printed:
        raise ConfigError("-m and --cfg belong to the command line: call train() once for each run")
    result = _train(_compose(line)[0], command=f"cl_train.train({', '.join(map(repr, words))})")
    if result.exit_code:
        signal.raise_signal(result.exit_code - 128)  # Ctrl-C raises KeyboardInterrupt
    return result


def _compose(line: CommandLine) -> list[Composed]:
    OmegaConf.register_new_resolver("run_name", run_name, replace=True)
    adopt_srun()
    return compose(line)


def _train(run: Composed, command: str | None) -> "RunResult":
    launch, cfg = read_launch(), run.cfg
    from cl_train.models.sources import follow_published_preprocessing
    from cl_train.system.checkpoints import resume_path
    from cl_train.training import loop, setup

    setup.check_runs([cfg])
    folder = Path()  # only rank 0 names the folder: ranks would generate different timestamps
    if launch is None or launch.rank == 0:
        if cfg.resume not in (None, "auto"):
            resume_path(cfg.resume)  # before the sample data is generated
        folder = run.folder("run")
    if cfg.evaluate_only and cfg.weights is not None and cfg.resume is None:
        given = {word.partition("=")[0].lstrip("+") for word in run.words}
        cfg = replace(cfg, data=follow_published_preprocessing(cfg.data, cfg.model, cfg.weights, given))
    return loop.train(cfg, folder, command=command)


def run_name(model: str, channels_last: object, precision: str, device: str) -> str:
    """The end of a run folder's name: `resnet50_channels_last_fp16`. Imports torch where precision=auto."""
    layout = LAYOUT_NAMES.get(str(channels_last).lower(), str(channels_last))
    if precision == "auto":
        from cl_train.step.precision import resolve_precision
        from cl_train.system.distributed import choose_device

        precision = resolve_precision(precision, choose_device(device)).name
    return safe_name(f"{model}_{layout}_{precision}")
