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
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cl_train.config.schema import Config
from cl_train.config.validation import flatten, user_function
from cl_train.data.build import Data, ImageData, build_data
from cl_train.data.loader import DataSettings
from cl_train.data.transforms import image_augment
from cl_train.errors import ConfigError
from cl_train.memory_format.layout import model_memory_format
from cl_train.models.card import ModelCard, Preprocessing
from cl_train.models.sources import check_model, classes_of, log_preprocessing
from cl_train.step.backup import random_state_restored
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
)
from cl_train.system.files import claimed_folder, continues, refuse_link
from cl_train.system.machine import describe_environment, device_name, git_state, keep_freed_memory
from cl_train.system.processes import (
    MachineLoad,
    StopRequest,
    cores_of_process,
    handles_signals,
)
from cl_train.system.run_folder import RunFacts
from cl_train.training.active_run import ActiveRun
from cl_train.training.build import (
    TrainState,
    balanced_weights,
    build_evaluated_state,
    build_train_state,
    check_ranks_agree,
    step_settings,
)
from cl_train.training.checkpointing import Checkpoints, evaluated_progress, starting_point
from cl_train.training.console import RunLog
from cl_train.training.evaluation import check_metrics
from cl_train.training.plan import Plan, Progress
from cl_train.training.records import Records
from cl_train.training.trackers import Trackers, find_tracker, start_record

log = logging.getLogger(__name__)

_UNEVEN = 10  # images of the largest class / those of the smallest one, from which it is said


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
        dist = stack.enter_context(processes(cfg.device))
        folder = on_main(folder.absolute, dist)  # ranks would generate different timestamps
        if not training and continues(cfg.resume, folder):  # the run's records stay
            source = str(folder) if cfg.resume == "auto" else cfg.resume
            cfg, folder = (
                replace(cfg, resume=source, overwrite=True),
                refuse_link(folder / "evaluation"),
            )
        if dist.is_main:
            stack.enter_context(claimed_folder(folder, resume=cfg.resume, overwrite=cfg.overwrite))
        run_log.open_file(folder if dist.is_main else None)

        command = command or shlex.join(sys.argv)
        run = set_up(cfg, folder, dist, signals, stack, command, training=training)
        stack.push(partial(record_failure, run))
        # Until here a signal ends the process at once; from now on it does not interrupt the
        # closing of data and files.
        last.enter_context(signals)
        yield run


def set_up(
    cfg: Config,
    folder: Path,
    dist: Dist,
    signals: StopRequest,
    stack: ExitStack,
    command: str,
    *,
    training: bool,
) -> ActiveRun:
    """Build the objects of a run, and restore the checkpoint of `resume=`.

    Resources are registered on `stack`.
    """
    # 1. The process. A program that asked torch for deterministic algorithms keeps them.
    is_deterministic = cfg.deterministic or torch.are_deterministic_algorithms_enabled()
    cfg = replace(cfg, deterministic=is_deterministic)
    prepare_process(cfg, dist)
    cfg = with_micro_steps(cfg, dist) if training else cfg
    machine_load = MachineLoad()  # it measures from here on
    precision = on_main(lambda: resolve_precision(cfg.precision, dist.device), dist)
    stack.enter_context(kernel_selection(tf32=precision.tf32, autotune=not cfg.deterministic))
    announce(cfg, precision, dist, training=training)

    # 2. The data. From here on the ranks draw the same numbers: their models must be equal.
    stack.enter_context(random_state_restored(dist.device))
    seed_generators(cfg.seed)
    data = open_data(cfg, dist, stack, training=training)
    plan = Plan.of(cfg, data.train_images, dist.world_size)

    # 3. The model, and its optimizer and step.
    weights = class_weights(cfg, data) if training else ()
    step = step_settings(cfg, precision, dist, weights)
    check_metrics(cfg, data, dist)
    if training:
        lr, classes = plan.lr_at(Progress()), data.classes
        state = build_train_state(cfg, step, data.num_classes, dist, lr, classes)
    else:
        state = build_evaluated_state(cfg, step, data.num_classes, dist)
    if isinstance(state.train_step, GraphedStep):
        stack.push(state.train_step.release)
    seed_generators(cfg.seed + dist.rank)  # ranks draw different dropout masks
    announce_work(data, plan, state, training=training)

    # 4. Where the run begins.
    facts = describe_run(plan, data, state, dist, command)
    store = CheckpointStore(folder / "checkpoints", cfg.checkpoint.keep)
    checkpoints = Checkpoints(store, state, identity_of_run(facts, data, cfg), dist)
    if training:
        progress = starting_point(checkpoints, plan, folder)
    else:
        progress = evaluated_progress(checkpoints, cfg.resume)
    announce_folder(folder, saves=training and handles_signals() and signals.ends_process)

    # 5. Its records.
    trackers = Trackers(cfg.log_to if dist.is_main else ())
    stack.callback(trackers.close)
    start = start_record(folder, dict(flatten(asdict(cfg))), progress.step, data.num_classes)
    on_main(lambda: trackers.send(start), dist)
    records = Records(folder if dist.is_main else None, cfg, trackers, facts, progress)
    return ActiveRun(
        dist, folder, plan, data, state, checkpoints, records, signals, machine_load, progress
    )


def announce_folder(folder: Path, *, saves: bool) -> None:
    """saves: the process has a handler for SIGUSR1."""
    hint = f" (kill -USR1 {os.getpid()} saves a checkpoint now)" if saves else ""
    log.info("run folder: %s%s", folder, hint)


def record_failure(
    run: ActiveRun, kind: object, error: BaseException | None, trace: object
) -> None:
    """A run that failed still writes its summary; other errors do not replace the first one."""
    if error is None:
        return
    if run.dist.world_size == 1:  # the other ranks may not take part
        with suppress(RuntimeError):
            run.log_pending()
    run.records.write_bad_images(run.data.bad_images.reasons)
    with suppress(OSError):
        run.records.finish("failed", why=str(error).partition("\n")[0])
    if isinstance(error, Exception):  # a second Ctrl-C does not wait
        with suppress(Exception):
            run.checkpoints.store.wait()


def prepare_process(cfg: Config, dist: Dist) -> None:
    """Set switches of the whole process; but for those of `new_torch_state` for good."""
    if cfg.deterministic:
        if not torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(True)
        # cuBLAS reads its variable once, before any work
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    keep_freed_memory(dist.device)
    if dist.world_size > 1 and dist.device.type == "cpu":
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
    if not training and isinstance(data, ImageData):
        what = f"resume={cfg.resume}" if cfg.resume else f"weights={cfg.weights}"
        if known := on_main(lambda: classes_of(cfg.resume or cfg.weights), dist):
            data.evaluate_as(known, what)
    if data.val_images == 0 and not (training and cfg.evaluate_every < 0):
        raise ConfigError("there are no validation images: give some, or evaluate_every=-1")
    names = ("root", "csv", "val_csv", "workers", "prefetch", "dataset")
    of_machine = [f"data.{name}" for name in names]
    of_all_ranks = {key: value for key, value in flatten(asdict(cfg)) if key not in of_machine}
    check_ranks_agree(of_all_ranks | {"data": data.fingerprint}, dist)
    data.start()
    return data


def class_weights(cfg: Config, data: Data) -> tuple[float, ...]:
    """Those of the loss; a line without them if the classes differ much.

    Raises ConfigError: the labels are unknown.
    """
    counts = data.class_counts
    if cfg.class_weight is None:
        if counts and max(counts) >= _UNEVEN * max(1, min(counts)):
            images = f"classes from {min(counts)} to {max(counts)} images"
            equal = "class_weight=balanced counts them equally, as balanced_accuracy does"
            log.info("%s: %s", images, equal)
        return ()
    if counts is None:
        needs = "a Dataset with its labels as the attribute `targets`, or your own loss="
        raise ConfigError(f"class_weight={cfg.class_weight} needs {needs}")
    return balanced_weights(counts)


def describe_run(plan: Plan, data: Data, state: TrainState, dist: Dist, command: str) -> RunFacts:
    cfg = plan.cfg
    settings = ("model", "seed", "conversion", "compile", "cuda_graph", "epochs")
    return RunFacts(
        **{name: getattr(cfg, name) for name in settings},
        command=command,
        memory_format=model_memory_format(state.model),
        parity=state.parity,
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


def identity_of_run(facts: RunFacts, data: Data, cfg: Config) -> dict[str, Any]:
    """What identifies the run of a checkpoint (see `check_compatible`), with its `ModelCard`."""
    card = ModelCard(
        facts.memory_format,
        facts.model,
        facts.precision,
        tuple(data.classes),
        Preprocessing.of(cfg.data),
        tuple(cfg.data.extensions),
    )
    shared = ("world_size", "workers", "global_batch_size")
    packages = ("torch", "torchvision", "python")
    return {
        **card.to_dict(),
        **{name: getattr(facts, name) for name in shared},
        "num_classes": data.num_classes,
        "data_fingerprint": data.fingerprint,
        "versions": {name: facts.environment[name] for name in packages},
        "config": asdict(cfg),
    }


def announce(cfg: Config, precision: Precision, dist: Dist, *, training: bool) -> None:
    count = "1 process" if dist.world_size == 1 else f"{dist.world_size} processes"
    log.info("%s on %s, %s", cfg.model, device_name(dist.device), count)
    reason = f" ({precision.reason})" if precision.reason else ""
    level = logging.WARNING if reason and cfg.precision != "auto" else logging.INFO
    log.log(level, "precision: %s%s", precision.name, reason)
    nodes = gather_objects(os.environ.get("SLURMD_NODENAME") or socket.gethostname(), dist)
    if len(set(nodes)) > 1:
        log.info("ranks: %s", "; ".join(f"{rank} on {node}" for rank, node in enumerate(nodes)))
    if dist.is_main and cfg.weights is not None:
        names = ("mean", "std") if training else None
        log_preprocessing(cfg.data, cfg.model, cfg.weights, cfg.entry, names)
    if not training:
        return
    if dist.device.type == "cuda":
        compiling = ", compiling the model, which takes minutes" if cfg.compile else ""
        log.info("selecting kernels (once per shape)%s", compiling)
    if dist.is_main and cfg.data.val_split == "train":
        log.warning("data.val_split=train: the accuracy on other images is lower")


def announce_work(data: Data, plan: Plan, state: TrainState, *, training: bool) -> None:
    cfg, parameters = plan.cfg, list(state.model.parameters())
    total = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    images = f"{data.train_images:,} training and " if training else ""
    images += f"{data.val_images:,} validation images"
    size = f"{data.num_classes} classes, {cfg.data.image_size} px; {total / 1e6:.2f} M parameters"
    frozen = f", of which {trained:,} train" if training and cfg.freeze else ""
    log.info("%s: %s of %s%s", cfg.data.name, images, size, frozen)
    if not training:
        return
    if data.num_classes == 1:
        log.warning("there is one class only: is data.root one level too high or too low?")
    steps, images_per_step = plan.steps_per_epoch, plan.global_batch_size
    left_out = data.train_images - steps * images_per_step
    dropped = f" ({left_out} images of each epoch are left out: no full batch)" if left_out else ""
    length = f"{cfg.epochs} epoch{'s' if cfg.epochs > 1 else ''} of {steps} steps"
    if plan.last_step < steps * cfg.epochs:  # max_steps
        length = f"the first {plan.last_step} steps of {length}"
    log.info("%s, %d images per step%s", length, images_per_step, dropped)
    if cfg.ema_decay and cfg.ema_every > plan.last_step:
        log.warning("ema_every=%d is never due: the average is the initial model", cfg.ema_every)
