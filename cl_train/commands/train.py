"""Train an image classifier and measure the effect of the channels_last memory format.

    cl-train train channels_last=true                       on sample data, made on first use
    cl-train train -m channels_last=true,false repeats=4    compare the layouts, with a verdict
    cl-train train channels_last=auto model=resnet50        measure both, train with the faster
    cl-train train data=imagenet data.root=/datasets/imagenet model=resnet50 precision=fp16
    cl-train train config=outputs/RUN optim.lr=0.2          settings of a run or a file, one changed
    cl-train train evaluate_only=true resume=outputs/RUN    evaluate a run, with its settings
    cl-train train --config-dir=recipes experiment=mine     recipes/experiment/mine.yaml, or ./conf
    torchrun --standalone --nproc-per-node=8 -m cl_train train experiment=resnet50_90ep ...

`python train.py` is the same from a checkout, and `cl_train.train(...)` in Python. The training
loop is in cl_train/training/loop.py.
"""

import logging
import signal
import sys
import threading
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from cl_train.commands.objects import is_module, with_names
from cl_train.config.arguments import command_help
from cl_train.config.command_line import (
    CommandLine,
    Composed,
    as_word,
    compose,
    group_choices,
    without_hydra,
)
from cl_train.config.schema import GROUPS, LAYOUT_NAMES, Config
from cl_train.errors import ConfigError, TrainingFault
from cl_train.system.files import safe_name
from cl_train.system.processes import read_launch
from cl_train.system.torch_state import own_torch_state

if TYPE_CHECKING:
    from cl_train.training.records import RunResult

USAGE = "cl-train train [-m] [group=choice] [key=value ...]"
_train_lock = threading.Lock()  # a run sets switches of the whole process: kernels, seeds, signals


def main(words: list[str]) -> int:
    if {"-h", "--help"} & set(words):
        choices = [f"{group}={'|'.join(group_choices(group))}" for group in GROUPS]
        print(command_help(USAGE, __doc__ or "", {"settings": Config}, choices))
        return 0
    logging.raiseExceptions = False  # a log line that the console cannot take is no error
    line = CommandLine.parse(words)
    runs = _compose(line)
    if line.printed:
        print(OmegaConf.to_yaml(without_hydra(runs[0].raw)), end="")
        return 0
    if line.multirun:
        from cl_train.commands.dashboard import write_dashboard
        from cl_train.sweeps.launch import run_sweep
        from cl_train.training.setup import check_runs

        check_runs([run.cfg for run in runs])
        report, exit_code = run_sweep(runs)
        write_dashboard(report)
        return exit_code
    try:
        return _train(runs[0], command=None).exit_code
    except KeyboardInterrupt:  # in training it is a request to save
        print("stopped before the first step", file=sys.stderr)
        return 130
    except ConfigError:  # before torch is imported for `describe_failure`
        raise
    except Exception as error:
        from cl_train.training.console import describe_failure

        if describe_failure(error) is None:
            raise
        return 1  # logged by the run


@own_torch_state
def train(*overrides: str, verbose: bool = True, **settings: Any) -> "RunResult":
    """Train in this process, as train.py does; may be called again.

    Args:
        overrides: words of the command line, such as "channels_last=true", "optim=adamw" or
            "config=outputs/RUN".
        verbose: False keeps the lines of the run out of the standard output; `train.log` has them.
        settings: the same as Python values, which come after the words: `model="resnet50"`,
            `data={"root": path}`, `**{"optim.lr": 0.1}`. Objects may stand for names of code: a
            module (it is trained in place) or a function of `num_classes` as `model`, a pair of
            Datasets as `data`, functions as `loss`, `metrics` and `log_to`.

    Returns:
        A `RunResult`: `folder`, `summary`, `history` (a record per log line and evaluation), `top1`
        in percent, `images_per_s`.

    Raises:
        ConfigError: wrong settings; the message has one line per problem.
        KeyboardInterrupt: Ctrl-C, after a checkpoint was saved; a second Ctrl-C does not wait.
            Signals are handled in the main thread only.
        Fault, OSError: the run cannot continue; see `cl_train.errors`.
    """
    if wrong := [word for word in overrides if not isinstance(word, str)]:
        raise ConfigError(f"train({wrong[0]!r}): write a setting as a word, or as key=value")
    words = [*overrides]
    for key, value in with_names(settings).items():
        if key == "data.name":
            words.append(f"data={value}")
        else:
            words.append(f"{key}={as_word(value)}")
    line = CommandLine.parse(words)
    from cl_train.step.backup import module_restored

    if line.multirun or line.printed:
        raise ConfigError("-m and --cfg belong to the command line: call train() once for each run")
    if not _train_lock.acquire(blocking=False):
        raise ConfigError("another thread of this process trains: wait for it, or use a process")
    try:
        given: Any = settings.get("model")
        output = nullcontext() if verbose else redirect_stdout(StringIO())
        with output, module_restored(given) if is_module(given) else nullcontext():
            command = f"cl_train.train({', '.join(map(repr, words))})"
            result = _train(_compose(line)[0], command=command)
    except SystemExit as request:
        what = f"code that this run called ended it with sys.exit({request.code})"
        raise TrainingFault(what) from request
    finally:
        _train_lock.release()
    if result.exit_code:
        signal.raise_signal(result.exit_code - 128)  # Ctrl-C raises KeyboardInterrupt
    return result


def _compose(line: CommandLine) -> list[Composed]:
    OmegaConf.register_new_resolver("run_name", run_name, replace=True)
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
        typed = {word.partition("=")[0].lstrip("+") for word in run.words}
        data = follow_published_preprocessing(cfg.data, cfg.model, cfg.weights, typed, cfg.entry)
        cfg = replace(cfg, data=data)
    run_whole = loop.evaluate if cfg.evaluate_only else loop.train
    return run_whole(cfg, folder, command)


def run_name(model: str, channels_last: object, precision: str, device: str) -> str:
    """Returns the end of a run folder's name, such as `resnet50_channels_last_fp16`."""
    layout = LAYOUT_NAMES.get(str(channels_last).lower(), str(channels_last))
    if precision == "auto":
        from cl_train.step.precision import resolve_precision
        from cl_train.system.distributed import choose_device

        precision = resolve_precision(precision, choose_device(device)).name
    return safe_name(f"{model}_{layout}_{precision}")
