"""From the configuration to a run that is ready for its first step.

Functions of other packages get plain values or their own part of the `Config`, not the whole.
"""

import logging
import os
import random
import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

import numpy as np
import torch

from cl_train.config.schema import Config
from cl_train.config.validation import flatten, user_function
from cl_train.data.build import Data, build_data
from cl_train.data.loader import DataSettings
from cl_train.data.transforms import image_augment
from cl_train.errors import ConfigError
from cl_train.memory_format.layout import model_memory_format
from cl_train.models.card import ModelCard, Preprocessing
from cl_train.models.sources import check_model, log_preprocessing
from cl_train.step.cuda_graph import GraphedStep
from cl_train.step.optim import check_optimizer
from cl_train.step.precision import Precision, kernel_selection, resolve_precision
from cl_train.step.train_step import Loss
from cl_train.system.checkpoints import CheckpointStore
from cl_train.system.distributed import (
    Dist,
    choose_device,
    gather_objects,
    on_main,
    processes,
    watch_ranks,
)
from cl_train.system.files import claimed_folder, continues
from cl_train.system.machine import describe_environment, device_name, git_state, keep_freed_memory
from cl_train.system.processes import (
    MachineLoad,
    StopRequest,
    bind_to_cores,
    cores_of_process,
    handles_signals,
)
from cl_train.system.run_folder import RunFacts
from cl_train.training.active_run import ActiveRun
from cl_train.training.build import (
    TrainState,
    build_evaluated_state,
    build_train_state,
    check_ranks_agree,
    step_settings,
)
from cl_train.training.checkpointing import Checkpoints, resume, starting_point
from cl_train.training.console import RunLog
from cl_train.training.evaluation import check_metrics
from cl_train.training.plan import Plan, Progress
from cl_train.training.records import Records
from cl_train.training.trackers import Trackers, find_tracker, start_record

log = logging.getLogger(__name__)


def check_runs(runs: list[Config]) -> None:
    """Raises ConfigError: every problem of every run that can be found before a file is created."""
    problems = []
    for cfg in runs:
        try:
            check_model(cfg.model, cfg.weights)
            check_optimizer(cfg.optim)
            _ = Loss(cfg.loss).function  # imports it
            if cfg.metrics is not None:
                user_function("metrics", cfg.metrics)
            image_augment(cfg.augment, cfg.data)  # timm reads its policies itself
            choose_device(cfg.device, warn=False)
            for name in cfg.log_to:
                find_tracker(name)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


@dataclass(frozen=True)
class Process:
    """What a run has before its data and its model."""

    dist: Dist
    folder: Path
    command: str
    signals: StopRequest
    stack: ExitStack  # of what is closed at the end of the run


@contextmanager
def opened_run(
    cfg: Config, folder: Path, command: str | None, *, training: bool
) -> Iterator[ActiveRun]:
    """A run that is ready for its first step, or its evaluation. An error in the block is recorded,
    and everything is closed.
    """
    signals = StopRequest(ends_process=command is None)
    with ExitStack() as last, ExitStack() as stack:
        run_log = stack.enter_context(RunLog())
        dist = stack.enter_context(processes(cfg.device, cfg.rank_timeout_s))
        stack.enter_context(watch_ranks(dist))
        folder = on_main(folder.absolute, dist)  # ranks would generate different timestamps
        if not training and continues(cfg.resume, folder):  # the run's records stay
            source = str(folder) if cfg.resume == "auto" else cfg.resume
            cfg, folder = replace(cfg, resume=source, overwrite=True), folder / "evaluation"
        if dist.is_main:
            stack.enter_context(claimed_folder(folder, resume=cfg.resume, overwrite=cfg.overwrite))
        run_log.open_file(folder if dist.is_main else None)

        process = Process(dist, folder, command or shlex.join(sys.argv), signals, stack)
        run = (set_up_training if training else set_up_evaluation)(cfg, process)
        stack.push(partial(record_failure, run))
        # Until here a signal ends the process at once; from now on it does not interrupt the
        # closing of data and files.
        last.enter_context(signals)
        yield run


def set_up_training(cfg: Config, process: Process) -> ActiveRun:
    """Build the objects of a run, and restore the checkpoint of `resume=`."""
    dist, stack = process.dist, process.stack
    cfg = with_micro_steps(cfg, dist)
    machine_load = MachineLoad()  # it measures from here on
    precision = prepare_process(cfg, dist, stack)
    announce(cfg, precision, dist, follows=("mean", "std"))
    if dist.device.type == "cuda":
        compiling = ", compiling the model, which takes minutes" if cfg.compile else ""
        log.info("selecting kernels (once per shape)%s", compiling)
    if dist.is_main and cfg.data.val_split == "train":
        log.warning("data.val_split=train: the accuracy on other images is lower")

    # From here on the ranks draw the same numbers: their models must be equal.
    seed_generators(cfg.seed)
    data = open_data(cfg, dist, stack, training=True)
    plan = Plan.of(cfg, data.train_images, dist.world_size)
    step = step_settings(cfg, precision, dist)
    check_metrics(cfg, data, dist)
    state = build_train_state(cfg, step, data.num_classes, dist, plan.lr_at(Progress()))
    if isinstance(state.train_step, GraphedStep):
        stack.push(state.train_step.release)
    seed_generators(cfg.seed + dist.rank)  # ranks draw different dropout masks
    announce_training(data, plan, state)

    facts = describe_run(process, plan, data, state)
    checkpoints = checkpoints_of(cfg, process, facts, data, state)
    checkpoints.check()
    progress = starting_point(checkpoints, plan, process.folder)
    saves = handles_signals() and process.signals.ends_process
    hint = f" (kill -USR1 {os.getpid()} saves a checkpoint now)" if saves else ""
    log.info("run folder: %s%s", process.folder, hint)
    records = open_records(cfg, process, facts, data, progress)
    return ActiveRun(
        dist, process.folder, plan, data, state, checkpoints, records, process.signals,
        machine_load, progress,
    )  # fmt: skip


def set_up_evaluation(cfg: Config, process: Process) -> ActiveRun:
    """Build the model, with `weights` or those of the checkpoint that `resume` names."""
    dist = process.dist
    machine_load = MachineLoad()
    precision = prepare_process(cfg, dist, process.stack)
    announce(cfg, precision, dist, follows=None)
    seed_generators(cfg.seed)
    data = open_data(cfg, dist, process.stack, training=False)
    plan = Plan.of(cfg, data.train_images, dist.world_size)
    check_metrics(cfg, data, dist)
    step = step_settings(cfg, precision, dist)
    state = build_evaluated_state(cfg, step, data.num_classes, dist)
    announce_work(f"{data.val_images:,} validation images", data, cfg, state)

    facts = describe_run(process, plan, data, state)
    checkpoints = checkpoints_of(cfg, process, facts, data, state)
    progress = Progress()
    if cfg.resume is not None:
        progress = resume(checkpoints, cfg.resume, training=False) or progress
    log.info("run folder: %s", process.folder)
    records = open_records(cfg, process, facts, data, progress)
    return ActiveRun(
        dist, process.folder, plan, data, state, checkpoints, records, process.signals,
        machine_load, progress,
    )  # fmt: skip


def record_failure(
    run: ActiveRun, kind: object, error: BaseException | None, trace: object
) -> None:
    """A run that failed still writes its summary; other errors do not replace the first one."""
    if error is None:
        return
    if run.dist.world_size == 1:  # the other ranks may not take part
        with suppress(RuntimeError):
            run.log_submitted()
    with suppress(OSError):
        run.records.finish("failed", why=str(error).partition("\n")[0])
    if isinstance(error, Exception):  # a second Ctrl-C does not wait
        with suppress(Exception):
            run.checkpoints.store.wait()


def prepare_process(cfg: Config, dist: Dist, stack: ExitStack) -> Precision:
    """Set the switches of the process; those of kernels until the end of the run."""
    switch_process(cfg, dist)
    precision = on_main(lambda: resolve_precision(cfg.precision, dist.device), dist)
    stack.enter_context(kernel_selection(tf32=precision.tf32, autotune=not cfg.deterministic))
    return precision


def switch_process(cfg: Config, dist: Dist) -> None:
    """Set switches of the whole process, for good."""
    torch.use_deterministic_algorithms(cfg.deterministic)
    if cfg.deterministic:  # cuBLAS reads its variable once, before any work
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    keep_freed_memory(dist.device)
    if dist.world_size > 1 and dist.device.type == "cpu":
        bind_to_cores()
        torch.set_num_threads(cores_of_process(dist.world_size))


def with_micro_steps(cfg: Config, dist: Dist) -> Config:
    """`cfg` with the `accumulate_steps` that `global_batch_size` requires.

    Raises ConfigError: it cannot be split evenly.
    """
    if cfg.global_batch_size is None:
        return cfg
    micro_steps, rest = divmod(cfg.global_batch_size, cfg.batch_size * dist.world_size)
    batches = f"batch_size={cfg.batch_size} x {dist.world_size} processes"
    request = f"global_batch_size={cfg.global_batch_size} with {batches}"
    if rest or not micro_steps:
        raise ConfigError(f"{request}: it is not a multiple; choose another batch_size")
    if micro_steps > 1 and cfg.ddp_static_graph:
        advice = "raise batch_size, or set ddp_static_graph=false"
        raise ConfigError(f"{request} needs micro-steps: {advice}")
    return replace(cfg, accumulate_steps=micro_steps)


def seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def open_data(cfg: Config, dist: Dist, stack: ExitStack, *, training: bool) -> Data:
    """The images of the run. Raises ConfigError: they do not fit, or differ between the ranks."""
    settings = DataSettings(
        cfg.data,
        cfg.augment,
        batch_size=cfg.batch_size,
        seed=cfg.seed,
        dist=dist,
        accumulate_steps=cfg.accumulate_steps,
        training=training,
    )
    data = build_data(settings)
    stack.callback(data.close)
    if data.val_images == 0 and not (training and cfg.evaluate_every < 0):
        raise ConfigError("there are no validation images: give some, or evaluate_every=-1")
    of_machine = ("data.root", "data.workers", "data.prefetch", "data.dataset")
    of_all_ranks = {key: value for key, value in flatten(asdict(cfg)) if key not in of_machine}
    check_ranks_agree(of_all_ranks | {"data": data.fingerprint}, dist)
    data.start()
    return data


def describe_run(process: Process, plan: Plan, data: Data, state: TrainState) -> RunFacts:
    cfg, dist = plan.cfg, process.dist
    return RunFacts(
        command=process.command,
        model=cfg.model,
        seed=cfg.seed,
        conversion=cfg.conversion,
        compile=cfg.compile,
        cuda_graph=cfg.cuda_graph,
        epochs=cfg.epochs,
        memory_format=model_memory_format(state.model),
        precision=state.parts.precision.name,
        world_size=dist.world_size,
        global_batch_size=plan.global_batch_size,
        channels_last_requested=cfg.channels_last,
        device=dist.device.type,
        device_name=device_name(dist.device),
        # data.root replaces the sample.
        data="folder" if cfg.data.name == "sample" and cfg.data.root else cfg.data.name,
        workers=data.workers,
        environment=describe_environment(dist.device),
        started=datetime.now().astimezone().isoformat(timespec="seconds"),
        git=git_state(),
    )


def checkpoints_of(
    cfg: Config, process: Process, facts: RunFacts, data: Data, state: TrainState
) -> Checkpoints:
    """With what identifies the run (see `check_compatible`), and its `ModelCard`."""
    card = ModelCard(
        model=facts.model,
        memory_format=facts.memory_format,
        precision=facts.precision,
        classes=tuple(data.classes),
        preprocessing=Preprocessing.of(cfg.data),
        extensions=tuple(cfg.data.extensions),
    )
    packages = ("torch", "torchvision", "python")
    identity = {
        **card.to_dict(),
        "world_size": facts.world_size,
        "workers": facts.workers,
        "global_batch_size": facts.global_batch_size,
        "num_classes": data.num_classes,
        "data_fingerprint": data.fingerprint,
        "versions": {name: facts.environment[name] for name in packages},
        "config": asdict(cfg),
    }
    store = CheckpointStore(process.folder / "checkpoints", cfg.checkpoint.keep)
    return Checkpoints(store, state, identity, process.dist)


def open_records(
    cfg: Config, process: Process, facts: RunFacts, data: Data, progress: Progress
) -> Records:
    dist, folder = process.dist, process.folder
    trackers = Trackers(cfg.log_to if dist.is_main else ())
    process.stack.callback(trackers.close)
    start = start_record(folder, dict(flatten(asdict(cfg))), progress.step, data.num_classes)
    on_main(lambda: trackers.begin(start), dist)
    return Records(folder if dist.is_main else None, cfg, trackers, facts, progress)


def announce(
    cfg: Config, precision: Precision, dist: Dist, follows: tuple[str, ...] | None
) -> None:
    """follows: the settings that should be those of published `weights`; None: all."""
    count = "1 process" if dist.world_size == 1 else f"{dist.world_size} processes"
    log.info("%s on %s, %s", cfg.model, device_name(dist.device), count)
    reason = f" ({precision.reason})" if precision.reason else ""
    level = logging.WARNING if reason and cfg.precision != "auto" else logging.INFO
    log.log(level, "precision: %s%s", precision.name, reason)
    nodes = gather_objects(os.environ.get("SLURMD_NODENAME") or socket.gethostname(), dist)
    if len(set(nodes)) > 1:
        log.info("ranks: %s", "; ".join(f"{rank} on {node}" for rank, node in enumerate(nodes)))
    if dist.is_main and cfg.weights is not None:
        log_preprocessing(cfg.data, cfg.model, cfg.weights, cfg.entry, follows)


def announce_work(images: str, data: Data, cfg: Config, state: TrainState) -> None:
    parameters = list(state.model.parameters())
    total = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    size = f"{data.num_classes} classes, {cfg.data.image_size} px; {total / 1e6:.2f} M parameters"
    frozen = f", of which {trained:,} train" if cfg.freeze else ""
    log.info("%s: %s of %s%s", cfg.data.name, images, size, frozen)


def announce_training(data: Data, plan: Plan, state: TrainState) -> None:
    cfg = plan.cfg
    images = f"{data.train_images:,} training and {data.val_images:,} validation images"
    announce_work(images, data, cfg, state)
    if data.num_classes == 1:
        log.warning("there is one class only: is data.root one level too high or too low?")
    steps, images_per_step = plan.steps_per_epoch, plan.global_batch_size
    left_out = data.train_images - steps * images_per_step
    dropped = f" ({left_out} images of each epoch are left out: no full batch)" if left_out else ""
    length = f"{cfg.epochs} epoch{'s' if cfg.epochs > 1 else ''} of {steps} steps"
    if plan.last_step < steps * cfg.epochs:  # max_steps
        length = f"the first {plan.last_step} steps of {length}"
    log.info("%s, %d images per step%s", length, images_per_step, dropped)
