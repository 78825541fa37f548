"""What `cl-train benchmark` measures: every combination of its settings; and the zoo's driver."""

import itertools
import logging
import math
import multiprocessing
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from cl_train.config.combinations import graph_conflict
from cl_train.config.schema import BenchmarkSettings, OptimConfig
from cl_train.config.validation import show
from cl_train.errors import ConfigError
from cl_train.measure.alternate import Stop
from cl_train.measure.answer import (
    audit_summary,
    audited_step,
    because_text,
    do_text,
    faster_text,
    right_text,
    same_outputs_text,
)
from cl_train.measure.paired import Comparison, Variant, benchmark_in_time, variants_of
from cl_train.measure.parity_gate import Parity, parity_before_use
from cl_train.measure.statistics import seconds_to_decide
from cl_train.measure.timed_step import Workload, input_shape
from cl_train.memory_format.audit_report import LayoutReport
from cl_train.memory_format.convert import CHANNELS_LAST, CONTIGUOUS, LAYOUTS
from cl_train.models import sources as models
from cl_train.step.cuda_graph import CAN_GO_ON_AFTER_FAILURE
from cl_train.step.precision import resolve_precision
from cl_train.step.train_step import StepSettings
from cl_train.system.distributed import choose_device
from cl_train.system.failures import explain_failure
from cl_train.system.files import write_json
from cl_train.system.machine import document_of
from cl_train.system.processes import with_threads

log = logging.getLogger(__name__)
T = TypeVar("T")

SLOW_PARITY_S = 5.0  # from here on a line tells that it has ended
LONGEST_ADVISED_S = 3600.0
DECIDING_ROUNDS = 10  # eight rounds and their warm-up
AUDIT_SHARE = 0.05  # of the time limit, for the step that is audited
LEAST_AUDITED = 4  # images
NAMES = ("model", "mode", "precision", "batch_size", "compile", "cuda_graph")


@dataclass(frozen=True)
class Combination:
    """A model, and how it is measured."""

    settings: BenchmarkSettings
    described: dict[str, Any]
    workload: Workload
    tell: Callable[[str], object] = log.info  # gets a line on how long a slow part takes

    def result(self, *, is_checked: bool = True) -> dict[str, Any]:
        """Returns plain values, with `error` instead of speeds if the model raised anything: the
        results of the others must not be lost. Before that, cuda_graph=auto tries eager steps.

        `is_checked`: add parity, audit and answer.
        """
        result: dict[str, Any] = {}
        for graph in self._graphs():
            step = replace(self.workload.settings, cuda_graph=graph)
            one = replace(
                self,
                described=self.described | {"cuda_graph": graph},
                workload=replace(self.workload, settings=step),
            )
            try:
                return one.described | one._measured(is_checked)
            except Exception as error:
                why = explain_failure(error)
                result = one.described | {"error": why, "text": f"  failed: {why}", "pairs": []}
        return result

    def _graphs(self) -> list[bool]:
        """Returns whether the step is a CUDA graph, and what to try if that fails: in eager mode
        the host limits small models, and both layouts are as fast as the host.
        """
        word, settings = self.described["cuda_graph"], self.workload.settings
        is_auto = word == "auto" and self.workload.device.type == "cuda"
        if is_auto and graph_conflict(settings.optim) is None:
            return [True, False] if CAN_GO_ON_AFTER_FAILURE else [True]
        return [word == "true"]

    def _timed(self, variants: Sequence[Variant], limit_s: float) -> Comparison:
        stop = Stop(self.settings.target_ci, limit_s, tell=self.tell)
        return benchmark_in_time(variants, self.workload, stop=stop)

    def _measured(self, is_checked: bool) -> dict[str, Any]:
        """Measures parity, then speed, then audit."""
        limit_s, started_at = self.settings.time_limit_s, time.perf_counter()
        variants = self._variants()
        if not is_checked:
            return self._timed(variants, limit_s).to_dict()
        parity = self._parity(variants)
        parity_s = time.perf_counter() - started_at
        if parity and parity_s >= SLOW_PARITY_S:
            self.tell(f"parity is compared after {parity_s:.0f} s, speed follows")
        done = self._timed(variants, max(limit_s - parity_s, limit_s / 2))
        differing = [name for name, found in parity.items() if found.passed is False]
        done = done.not_comparable(differing)

        try:
            audited = self._audited(variants, self._images_to_audit(done))
            because = because_text(audited, done, self._words())
        except Exception as error:  # the speeds stay
            audited, because = [], f"the audit failed: {explain_failure(error)}"
        to_decide = self._to_decide(done)
        answer = {
            "right": right_text(parity, self._same_outputs(variants)),
            "faster": faster_text(done),
            "because": because,
            "do": do_text(done, self._words(), parity, audited, to_decide),
        }
        lines = (f"  {name + ':':<9}{line}" for name, line in answer.items())
        return {
            **done.to_dict(),
            "to_decide": to_decide,
            **_plain(parity, audited),
            "answer": answer,
            "text": "\n".join([str(done), *lines]),
        }

    def checked(self) -> dict[str, Any]:
        """Returns parity and audit alone, as in `result`."""
        variants = self._variants()
        audited = self._audited(variants, self.workload.batch_size)
        return _plain(self._parity(variants), audited)

    def _variants(self) -> list[Variant]:
        """Builds the variants, the baseline first."""
        size = self.workload.input_shape[-1]
        built: dict[str, nn.Module] = {}
        for name in self.described["model"].split(","):
            torch.manual_seed(0)
            built[name] = models.build_model(name, num_classes=1000, image_size=size)
        if self.settings.compare_by == "model":
            layout = CHANNELS_LAST if self.settings.channels_last else CONTIGUOUS
            return [Variant(name, model, layout) for name, model in built.items()]
        (model,) = built.values()
        return variants_of(model, [LAYOUTS[name] for name in self.settings.layouts])

    def _parity(self, variants: Sequence[Variant]) -> dict[str, Parity]:
        asked = self.settings.parity
        checked = [one for one in variants if asked != "false" and one.layout is not CONTIGUOUS]
        return {
            one.name: parity_before_use(one.model, self.workload, one.layout, asked)
            for one in checked
        }

    def _images_to_audit(self, done: Comparison) -> int:
        """Returns as many images as were timed, or as fit into `AUDIT_SHARE`."""
        image_s = max(speed.step_ms for speed in done.speeds) / 1000 / done.batch_size
        affordable = int(AUDIT_SHARE * self.settings.time_limit_s / image_s)
        return min(done.batch_size, max(LEAST_AUDITED, affordable))

    def _same_outputs(self, variants: Sequence[Variant]) -> str:
        if self.settings.compare_by != "model" or len(variants) > 2:
            return ""
        first, other = variants
        return same_outputs_text(first.model, other.model, self.workload)

    def _audited(self, variants: Sequence[Variant], batch_size: int) -> list[LayoutReport]:
        """Audits a step of each model in channels_last."""
        workload = replace(self.workload, batch_size=batch_size)
        names = self.described["model"].split(",")
        layouts = {one.model: one.layout for one in variants if one.layout is not CONTIGUOUS}
        return [
            audited_step(model, layout, workload, name)
            for name, (model, layout) in zip(names, layouts.items(), strict=False)
        ]

    def _words(self) -> dict[str, Any]:
        """Returns the settings of this combination, as they are typed."""
        values = {name: value for name, value in self.described.items() if value}
        values["data.image_size"] = values.pop("image_size")
        if self.settings.cuda_graph != BenchmarkSettings().cuda_graph:
            values["cuda_graph"] = self.described["cuda_graph"]
        for name in ("config", "compare_by", "channels_last", "layouts", "optimizer", "device"):
            if getattr(self.settings, name) != getattr(BenchmarkSettings(), name):
                values[name] = getattr(self.settings, name)
        return values

    def _to_decide(self, done: Comparison) -> str | None:
        """Returns the command that probably decides; None: decided, or not even an hour decides."""
        if all(speed.verdict != "inconclusive" for speed in done.speeds):
            return None
        values = self._words()
        seconds = max(seconds_to_decide(speed.ratio, done.seconds) for speed in done.speeds[1:])
        # Parity check and warm-up take their time once more.
        seconds += max(0.0, self.settings.time_limit_s - done.seconds)
        if done.rounds < 2:
            values["batch_size"] = done.batch_size
            seconds = DECIDING_ROUNDS * done.round_s
            if seconds > LONGEST_ADVISED_S:
                values["batch_size"] = max(1, int(done.batch_size * LONGEST_ADVISED_S / seconds))
                seconds = LONGEST_ADVISED_S
        if not done.is_host_bound:
            if seconds > LONGEST_ADVISED_S:
                return None
            values["time_limit_s"] = math.ceil(seconds)
        elif self.described["cuda_graph"]:
            values["batch_size"] *= 4
        else:
            values["cuda_graph"] = True
        words = [f"{name}={show(value).strip('[]')}" for name, value in values.items()]
        return with_threads(f"cl-train benchmark {shlex.join(words)}")


def _plain(parity: Mapping[str, Parity], audited: Sequence[LayoutReport]) -> dict[str, Any]:
    return {
        "parity": {name: vars(found) for name, found in parity.items()},
        "audit": {report.model: audit_summary(report) for report in audited},
    }


def run_suite(settings: BenchmarkSettings) -> dict[str, Any]:
    """Measures every combination; prints each result, and writes it to `out`, as it is ready.

    Raises ConfigError: unknown models, or fewer than two layouts.
    """
    combinations = combinations_of(settings)
    document = document_of(settings, choose_device(settings.device), complete=False, results=[])

    def measured(one: Combination) -> dict[str, Any]:
        described = ", ".join(f"{key} {value}" for key, value in one.described.items())
        print(f"{described}: about {settings.time_limit_s:g} s at most", flush=True)
        return replace(one, tell=lambda text: print(f"  {text}", flush=True)).result()

    def keep(result: dict[str, Any]) -> None:
        print(result["text"], flush=True)
        document["results"].append(result)
        if settings.out:
            write_json(Path(settings.out), document)

    run_each(combinations, measured, keep, settings.out)
    return document | {"complete": True, "fastest": fastest_of(document["results"])}


def fastest_of(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the fastest settings and layout of each model and mode that was measured with several
    settings, unless one of them is not comparable.
    """
    fastest = []
    for described in dict.fromkeys((one["model"], one["mode"]) for one in results):
        group = [one for one in results if (one["model"], one["mode"]) == described]
        sides = [(speed, one) for one in group for speed in one.get("speeds", ())]
        verdicts = {pair["verdict"] for one in group for pair in one["pairs"]}
        if len(group) > 1 and sides and "not_comparable" not in verdicts:
            speed, one = max(sides, key=lambda side: side[0]["images_per_s"])
            settings = {name: one[name] for name in NAMES}
            fastest.append(settings | {key: speed[key] for key in ("layout", "images_per_s")})
    return fastest


def run_each(
    items: Sequence[T],
    measure: Callable[[T], dict[str, Any]],
    keep: Callable[[dict[str, Any]], None],
    out: Path | str | None,
) -> None:
    """Measures each item, and keeps its result before the next one. SIGTERM ends it as Ctrl-C does:
    a line says how many were kept, in `out`.
    """
    kept = 0
    before = signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    try:
        for item in items:
            keep(measure(item))
            kept += 1
    except (KeyboardInterrupt, SystemExit):
        where = "" if not out else f", in {out}" if kept else f"; {out} is not written"
        print(f"stopped: {kept} of {len(items)} are measured{where}", flush=True)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def in_child(
    work: Callable[[str, Any], dict[str, Any]], name: str, settings: Any, limit_s: float
) -> dict[str, Any]:
    """Returns what `work(name, settings)` returns in a process of its own, or an `error` if that
    crashes, lacks memory or takes longer than `limit_s`.
    """
    context = multiprocessing.get_context("forkserver")
    # Importing takes longer than most models. A user's packages may touch CUDA when imported, and
    # forks of a process that did cannot use it: for CUDA, only torch is imported before the fork.
    is_cuda = settings.device.startswith("cuda")
    context.set_forkserver_preload(["torch" if is_cuda else work.__module__])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, work, name, settings), daemon=True)
    process.start()
    sender.close()
    try:
        result = receiver.recv() if receiver.poll(limit_s) else {"error": f"over {limit_s:g} s"}
    except EOFError:
        process.join()
        code = process.exitcode
        result = {"error": f"its process ended with exit code {code} (-9: out of memory)"}
    finally:
        process.kill()
        process.join()
    return {"model": name, **result}


def _child(sender: Any, work: Callable[[str, Any], Any], name: str, settings: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    try:
        sender.send(work(name, settings))
    except Exception as error:
        sender.send({"error": explain_failure(error)})


def combinations_of(settings: BenchmarkSettings) -> list[Combination]:
    """Returns all combinations. Raises ConfigError as `run_suite` does."""
    if empty := [name for name in NAMES if not getattr(settings, name)]:
        raise ConfigError([f"{name}= is empty: name at least one" for name in empty])
    for model in settings.model:
        models.check_model(model)
    if len(settings.layouts) < 2:
        raise ConfigError("layouts: a comparison needs two or more")
    chosen = {name: getattr(settings, name) for name in NAMES}
    if settings.compare_by == "model":
        if len(set(settings.model)) < 2:
            raise ConfigError("compare_by=model: name two or more models: model=A,B")
        chosen["model"] = [",".join(settings.model)]
    device = choose_device(settings.device)
    combinations = []
    for values in itertools.product(*chosen.values()):
        described = dict(zip(NAMES, values, strict=True))
        shape = input_shape(settings.model[0], settings.image_size, settings.frames)
        described["image_size"] = shape[-1]
        if settings.frames:
            described["frames"] = settings.frames
        precision = resolve_precision(described["precision"], device)
        described["precision"] = precision.name
        optim = OptimConfig(name=settings.optimizer)
        step = StepSettings(precision, optim, compile=described["compile"])
        workload = Workload(described["batch_size"], shape, step, device, described["mode"])
        combinations.append(Combination(settings, described, workload))
    return combinations
