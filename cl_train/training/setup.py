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

from cl_train.config.combinations import graph_conflict
from cl_train.config.schema import Config, DataConfig
from cl_train.config.validation import flatten, user_function
from cl_train.data.build import Data, size_schedule
from cl_train.data.device import DeviceFormat
from cl_train.data.loader import DataSettings
from cl_train.data.transforms import image_augment
from cl_train.errors import ConfigError
from cl_train.memory_format.convert import Layout, convert
from cl_train.memory_format.layout import model_memory_format
from cl_train.models.card import ModelCard, Preprocessing
from cl_train.models.sources import check_model
from cl_train.step.backup import random_state_restored
from cl_train.step.cuda_graph import GraphedStep
from cl_train.step.optim import check_optimizer
from cl_train.step.precision import Precision, kernel_selection, resolve_precision
from cl_train.step.train_step import Loss, StepSettings
from cl_train.system.checkpoints import CheckpointStore
from cl_train.system.distributed import (
    Dist,
    check_ranks_agree,
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
from cl_train.system.tables import counted
from cl_train.training.active_run import ActiveRun
from cl_train.training.build import TrainState, build_model, evaluated_state, train_state
from cl_train.training.checkpointing import Checkpoints, resume, starting_point
from cl_train.training.console import RunLog
from cl_train.training.evaluation import EvaluationSettings, check_metrics
from cl_train.training.layout_choice import layout_for
from cl_train.training.parts import ModelSettings, class_weights, open_data, plan_of
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


@contextmanager
def opened_run(cfg: Config, folder: Path, command: str | None) -> Iterator[ActiveRun]:
    """Yields a run that is ready for its first step, or its evaluation. An error in the block is
    recorded, and everything is closed.
    """
    signals = StopRequest(ends_process=command is None)
    with ExitStack() as last, ExitStack() as stack:
        run_log = stack.enter_context(RunLog())
        dist = stack.enter_context(processes(cfg.device))
        folder = on_main(folder.absolute, dist)  # ranks would generate different timestamps
        if cfg.evaluate_only and continues(cfg.resume, folder):  # the run's records stay
            source = str(folder) if cfg.resume == "auto" else cfg.resume
            cfg = replace(cfg, resume=source, overwrite=True)
            folder = refuse_link(folder / "evaluation")
        if dist.is_main:
            stack.enter_context(claimed_folder(folder, resume=cfg.resume, overwrite=cfg.overwrite))
        run_log.open_file(folder if dist.is_main else None)

        command = command or shlex.join(sys.argv)
        run = set_up(cfg, folder, dist, signals, stack, command)
        stack.push(partial(record_failure, run))
        # Until here a signal ends the process at once; from now on it does not interrupt the
        # closing of data and files.
        last.enter_context(signals)
        yield run


def set_up(
    cfg: Config, folder: Path, dist: Dist, signals: StopRequest, stack: ExitStack, command: str
) -> ActiveRun:
    """Returns a run, at the checkpoint of `resume`; `stack` closes its resources."""
    # 1. The process.
    machine_load = MachineLoad()  # it measures from here on
    cfg, precision = prepare_process(cfg, dist, stack)
    announce(cfg, precision, dist)

    # 2. The data. From here on the ranks draw the same numbers: their models must be equal.
    stack.enter_context(random_state_restored(dist.device))
    seed_generators(cfg.seed)
    evaluation = EvaluationSettings(
        cfg.resume or cfg.weights,
        user_function("metrics", cfg.metrics) if cfg.metrics else None,
        cfg.best_by,
        cfg.evaluate_flip,
        title_of(cfg.data) if cfg.report else None,
    )
    trains, micro_steps = not cfg.evaluate_only, cfg.accumulate_steps
    settings = DataSettings(
        cfg.data, cfg.augment, cfg.batch_size, cfg.seed, dist, micro_steps, trains
    )
    data = open_data(settings, evaluation.source, stack)
    check_data(cfg, data, dist)
    data.start()
    check_metrics(evaluation, data, dist)
    plan = plan_of(cfg, data.train_images, dist.world_size)

    # 3. The model, its memory format, and its optimizer and step.
    state = build_state(cfg, precision, dist, data)
    if isinstance(state.train_step, GraphedStep):
        stack.push(state.train_step.release)
    seed_generators(cfg.seed + dist.rank)  # ranks draw different dropout masks
    announce_work(cfg, data, plan, state, dist)

    # 4. Where the run begins.
    facts, config = describe_run(cfg, plan, data, state, dist, command), asdict(cfg)
    store = CheckpointStore(folder / "checkpoints", cfg.checkpoint.keep)
    identity = identity_of_run(facts, data, cfg.data) | {"config": config}
    checkpoints = Checkpoints(store, state, identity, dist)
    if trains:
        progress = starting_point(checkpoints, plan, folder, cfg.resume, evaluation.best_by)
        if dist.is_main:  # the earlier ones of all ranks
            data.bad_images.skipped += progress.skipped_images
    else:
        progress = resume(checkpoints, cfg.resume, training=False) or Progress()
    log.info("run folder: %s", folder)
    if trains and handles_signals() and signals.ends_process:
        log.info("kill -USR1 %d saves a checkpoint now", os.getpid())

    # 5. The records of the run.
    trackers = Trackers(cfg.log_to if dist.is_main else ())
    stack.callback(trackers.close)
    start = start_record(folder, dict(flatten(config)), progress.step, data.num_classes)
    on_main(lambda: trackers.send(start), dist)
    records = Records(folder if dist.is_main else None, config, trackers, facts, progress)
    parts = (plan, data, state, evaluation, checkpoints, records)
    return ActiveRun(dist, folder, *parts, signals, machine_load, progress)


def build_state(cfg: Config, precision: Precision, dist: Dist, data: Data) -> TrainState:
    """Returns the model, converted to its memory format, and its step. A run that only evaluates
    has an eager step, and loads no `weights` if it takes those of the checkpoint `resume`.
    """
    is_trained = not cfg.evaluate_only
    wanted = ModelSettings(
        cfg.model,
        cfg.weights if is_trained or not cfg.resume else None,
        cfg.entry,
        cfg.drop_path,
        cfg.freeze,
        cfg.sync_batchnorm,
        cfg.channels_last,
        Layout(torch.channels_last, cfg.conversion, tuple(cfg.select)),
        cfg.parity,
        cfg.batch_size,
        cfg.data,
        is_trained=is_trained,
        is_evaluated=cfg.evaluate_every >= 0,
        graph_may_fail=cfg.cuda_graph == "auto",
    )
    is_alone_on_gpu = dist.device.type == "cuda" and dist.world_size == 1
    can_record = is_alone_on_gpu and graph_conflict(cfg.optim) is None
    is_recorded = cfg.cuda_graph == "true" or (cfg.cuda_graph == "auto" and can_record)
    weights = class_weights(cfg.class_weight, data) if is_trained else ()
    settings = StepSettings(
        precision,
        cfg.optim,
        Loss(cfg.loss, cfg.label_smoothing, cfg.bce_threshold, weights),
        accumulate_steps=cfg.accumulate_steps if is_trained else 1,
        ema_decay=cfg.ema_decay,
        ema_every=cfg.ema_every,
        mixup=cfg.augment.mixup,
        cutmix=cfg.augment.cutmix,
        compile=cfg.compile and is_trained,
        image_sizes=len(size_schedule(cfg.data).image_sizes),
        cuda_graph=is_recorded and is_trained,
    )
    model, facts = build_model(wanted, precision, data, dist)
    layout, parity = layout_for(wanted, model, settings, facts, dist)
    report = convert(model, layout)
    if layout.is_channels_last:
        log.info("%s", report)
    form = DeviceFormat(dist.device, precision.input_dtype, layout.memory_format)
    if cfg.evaluate_only:
        return replace(evaluated_state(model, settings, form), parity=parity)
    state = train_state(wanted, model, settings, form, data.num_classes, dist)
    return replace(state, parity=parity, facts=facts)


def check_data(cfg: Config, data: Data, dist: Dist) -> None:
    """Raises ConfigError: there is nothing to evaluate, or ranks differ in settings or images."""
    if data.val_images == 0 and (cfg.evaluate_only or cfg.evaluate_every >= 0):
        raise ConfigError("there are no validation images: give some, or evaluate_every=-1")
    names = ("root", "csv", "val_csv", "workers", "prefetch", "dataset")
    of_machine = [f"data.{name}" for name in names]
    of_all_ranks = {key: value for key, value in flatten(asdict(cfg)) if key not in of_machine}
    check_ranks_agree(of_all_ranks | {"data": data.fingerprint}, dist)


def title_of(cfg: DataConfig) -> str:
    return f"{cfg.val_split or 'val'} of {cfg.root or cfg.dataset or cfg.name}"


def record_failure(
    run: ActiveRun, kind: object, error: BaseException | None, trace: object
) -> None:
    """Writes the summary of a run that failed; further errors do not replace the first one."""
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


def prepare_process(cfg: Config, dist: Dist, stack: ExitStack) -> tuple[Config, Precision]:
    """Sets switches of the whole process; `cl_train.train` restores those of torch at its end.

    Returns `cfg` as it applies here (deterministic if the program asked torch for it, with the
    micro-steps of `global_batch_size` and the `best_by` of `class_weight`), and the precision.
    """
    deterministic = cfg.deterministic or torch.are_deterministic_algorithms_enabled()
    if deterministic:
        if not torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(True)
        # cuBLAS reads its variable once, before any work
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    keep_freed_memory(dist.device)
    if dist.world_size > 1 and dist.device.type == "cpu":
        torch.set_num_threads(cores_of_process(dist.world_size))
    precision = on_main(lambda: resolve_precision(cfg.precision, dist.device), dist)
    stack.enter_context(kernel_selection(tf32=precision.tf32, autotune=not deterministic))
    micro_steps = micro_steps_of(cfg, dist.world_size)
    best_by = cfg.best_by or ("balanced_accuracy" if cfg.class_weight else None)
    cfg = replace(cfg, deterministic=deterministic, accumulate_steps=micro_steps, best_by=best_by)
    return cfg, precision


def micro_steps_of(cfg: Config, world_size: int) -> int:
    """Returns the number of micro-steps that `global_batch_size` requires. Raises ConfigError: it
    cannot be split evenly.
    """
    if cfg.global_batch_size is None or cfg.evaluate_only:
        return cfg.accumulate_steps
    micro_steps, rest = divmod(cfg.global_batch_size, cfg.batch_size * world_size)
    if rest or not micro_steps:
        batches = f"batch_size={cfg.batch_size} x {world_size} processes"
        what = f"global_batch_size={cfg.global_batch_size} is not a multiple of {batches}"
        raise ConfigError(f"{what}; choose another batch_size")
    return micro_steps


def seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def describe_run(
    cfg: Config, plan: Plan, data: Data, state: TrainState, dist: Dist, command: str
) -> RunFacts:
    settings = ("model", "seed", "conversion", "compile", "cuda_graph", "epochs")
    return RunFacts(
        **{name: getattr(cfg, name) for name in settings},
        command=command,
        memory_format=model_memory_format(state.model),
        parity=state.parity,
        precision=state.parts.settings.precision.name,
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


def identity_of_run(facts: RunFacts, data: Data, cfg: DataConfig) -> dict[str, Any]:
    """Returns what identifies a checkpoint's run (see `check_compatible`), with its `ModelCard`."""
    card = ModelCard(
        facts.memory_format,
        facts.model,
        facts.precision,
        tuple(data.classes),
        Preprocessing.of(cfg),
        tuple(cfg.extensions),
    )
    shared = ("world_size", "workers", "global_batch_size")
    packages = ("torch", "torchvision", "python")
    return {
        **card.to_dict(),
        **{name: getattr(facts, name) for name in shared},
        "num_classes": data.num_classes,
        "data_fingerprint": data.fingerprint,
        "versions": {name: facts.environment[name] for name in packages},
    }


def announce(cfg: Config, precision: Precision, dist: Dist) -> None:
    count = "1 process" if dist.world_size == 1 else f"{dist.world_size} processes"
    log.info("%s on %s, %s", cfg.model, device_name(dist.device), count)
    reason = f" ({precision.reason})" if precision.reason else ""
    level = logging.WARNING if reason and cfg.precision != "auto" else logging.INFO
    log.log(level, "precision: %s%s", precision.name, reason)
    nodes = gather_objects(os.environ.get("SLURMD_NODENAME") or socket.gethostname(), dist)
    if len(set(nodes)) > 1:
        log.info("ranks: %s", "; ".join(f"{rank} on {node}" for rank, node in enumerate(nodes)))


def announce_work(cfg: Config, data: Data, plan: Plan, state: TrainState, dist: Dist) -> None:
    trains, parameters = not cfg.evaluate_only, list(state.model.parameters())
    images = f"{data.val_images:,} validation images of {data.num_classes} classes"
    if trains:
        images = f"{data.train_images:,} training and {images}"
    size = f"{sum(parameter.numel() for parameter in parameters) / 1e6:.2f} M parameters"
    if trains and cfg.freeze:
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        size += f", of which {trained:,} train"
    log.info("%s: %s, %d px; %s", cfg.data.name, images, cfg.data.image_size, size)
    if not trains:
        return
    if data.num_classes == 1:
        log.warning("there is one class only: is data.root one level too high or too low?")
    steps, images_per_step = plan.steps_per_epoch, plan.global_batch_size
    left_out = data.train_images - steps * images_per_step
    less = f" (the last {counted(left_out, 'image')} of an epoch, less than a step, left out)"
    length = f"{counted(cfg.epochs, 'epoch')} of {counted(steps, 'step')}"
    if plan.last_step < steps * cfg.epochs:  # max_steps
        length = f"the first {counted(plan.last_step, 'step')} of {length}"
    log.info("%s, %d images per step%s", length, images_per_step, less if left_out else "")
    if plan.lr < cfg.optim.lr / 10:
        reference = cfg.optim.reference_batch_size
        how = f"optim.lr {cfg.optim.lr:g} x batch {plan.global_batch_size} / {reference}"
        advice = "optim.reference_batch_size=0 takes optim.lr as it is"
        log.info("lr %.3g = %s; %s", plan.lr, how, advice)
    if dist.device.type == "cuda":
        compiling = ", compiling the model, which takes minutes" if cfg.compile else ""
        log.info("selecting kernels (once per shape)%s", compiling)
