"""Writes the answer of a benchmark in four lines: right, faster, because, do."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from cl_train.config.validation import show
from cl_train.measure.audit import audit
from cl_train.measure.code_paths import code_errors
from cl_train.measure.paired import Comparison, by_itself_text
from cl_train.measure.parity_gate import Parity
from cl_train.measure.timed_step import Workload, model_in_layout, noise, place_batch
from cl_train.memory_format.audit_report import LayoutReport
from cl_train.memory_format.convert import Layout
from cl_train.memory_format.model_call import call_model, output_tensors
from cl_train.models.sources import copy_model

SMALL_SIDE = 64  # pixels of the images on which the outputs of two models are compared
LEAST_LOSS_PCT = 1.0  # of a step's bytes; a smaller loss is not worth a change


def right_text(parity: Mapping[str, Parity], same_outputs: str = "") -> str:
    """Says whether the results are right. `parity`: by name of the compared layout or model."""
    parts = [f"{name}: {found.text}" for name, found in parity.items() if found.passed is not True]
    agreed = "not checked" if not parity else "both layouts compute the same"
    return "; ".join(filter(None, [", ".join(parts) or agreed, same_outputs]))


def faster_text(done: Comparison) -> str:
    baseline = done.speeds[0].layout
    parts = []
    for speed in done.speeds[1:]:
        verdict = speed.verdict.replace("_", " ")
        if speed.verdict == "not_comparable":
            parts.append(f"{speed.layout} and {baseline} are not comparable")
        else:
            parts.append(f"{speed.layout} runs at {speed.ratio} of {baseline}: {verdict}")
    if by_itself_text(done.by_itself_pct):
        parts.append("the flag matters little, as the model is channels_last by itself")
    return "; ".join(parts)


def because_text(
    audited: Sequence[LayoutReport], done: Comparison, words: Mapping[str, Any]
) -> str:
    """Says what each model loses of channels_last, and at which line it loses most; if that does
    not explain why it is slower, names the command that does. `words`: as in `do_text`.
    """
    parts = []
    for report in audited:
        losses = report.losses()
        most = f"; most in {losses[0]['operator']} at {_place(losses[0])}" if losses else ""
        parts.append(report.headline() + most)
    is_unexplained = done.speeds[-1].verdict == "slower" and not any(
        report.losses() for report in audited
    )
    if is_unexplained and words.get("compare_by") != "model":
        names = ("config", "model", "precision", "batch_size", "data.image_size", "device")
        typed = [f"{name}={show(words[name])}" for name in names if words.get(name)]
        parts.append(f"what takes longer: cl-train audit {shlex.join([*typed, 'time=true'])}")
    return "; ".join(parts)


def do_text(
    done: Comparison,
    words: Mapping[str, Any],
    parity: Mapping[str, Parity],
    audited: Sequence[LayoutReport],
    to_decide: str | None,
) -> str:
    """Returns the next command and, if the model loses enough, the one line of it to change.

    `words`: the settings of the comparison, as they are typed.
    """
    last = done.speeds[-1]
    size = f"data.image_size={words['data.image_size']}"
    if wrong := [name for name, found in parity.items() if found.passed is False]:
        model = wrong[0] if words.get("compare_by") == "model" else words["model"]
        return f"cl-train compare parity=true model={model} {size}"
    if last.verdict == "not_comparable":
        return "measure again on a quiet machine, or with OMP_NUM_THREADS=1"
    if to_decide:
        return f"decide it: {to_decide}"
    best = last.layout if last.verdict == "faster" else done.speeds[0].layout
    if words.get("compare_by") == "model":
        layout = "channels_last" if words.get("channels_last", True) else "contiguous"
        return train_command(best, layout, done.batch_size, words)
    command = train_command(words["model"], best, done.batch_size, words)
    losses = audited[-1].losses() if audited else []
    if losses and losses[0]["% of bytes"] >= LEAST_LOSS_PCT:
        command += f"; to gain more, mend {_place(losses[0])}: {losses[0]['advice']}"
    return command


def train_command(model: str, layout: str, batch_size: int, words: Mapping[str, Any]) -> str:
    """Returns the command that trains what was timed. `words`: as in `do_text`."""
    values = {"config": words["config"]} if words.get("config") else {}
    values |= {"model": model, "channels_last": layout != "contiguous"}
    if layout == "channels_last_conv":
        values["conversion"] = "conv"
    values["precision"] = words["precision"]
    values["data.image_size"] = words["data.image_size"]
    values["batch_size"] = batch_size
    for name in ("compile", "cuda_graph", "device"):
        if words.get(name):
            values[name] = words[name]
    if "optimizer" in words:
        values["optim"] = words["optimizer"]
    typed = [f"{name}={show(value)}" for name, value in values.items()]
    your_data = "" if words.get("config") else "; add your data=... (config=RUN has it)"
    return f"cl-train train {shlex.join(typed)}{your_data}"


def _place(loss: Mapping[str, Any]) -> str:
    """Returns the file and number of the line, without its text."""
    return str(loss["line"]).partition(" `")[0]


def audited_step(model: nn.Module, layout: Layout, workload: Workload, name: str) -> LayoutReport:
    precision, is_trained = workload.precision, workload.mode == "train"
    images = place_batch(
        noise((workload.batch_size, *workload.input_shape)),
        workload.device,
        precision.input_dtype,
        layout.memory_format,
    )
    model = model_in_layout(model, layout, precision, workload.device).train(is_trained)
    return audit(model, images, precision=precision, backward=is_trained, name=name)


def audit_summary(report: LayoutReport) -> dict[str, Any]:
    """Returns plain values: calls by outcome, lost ones by operator, and the lines that lose."""
    summary: dict[str, Any] = {**report.totals, "moved_pct": round(report.moved_pct, 2)}
    for direction in ("forward", "backward"):
        lost: Counter[str] = Counter()
        for call in report.of("lost", direction):
            lost[call.operator.removeprefix("aten.").partition(".")[0]] += call.count
        summary[f"lost_{direction}"] = dict(lost)
    return {**summary, "losses": report.losses()}


def same_outputs_text(first: nn.Module, other: nn.Module, workload: Workload) -> str:
    """Says whether `other`, with the weights of `first`, computes the same in float64."""
    side = [min(size, SMALL_SIDE) for size in workload.input_shape[1:]]
    images = noise((2, workload.input_shape[0], *side)).double()
    models = [copy_model(model, "cpu").double().eval() for model in (first, other)]
    try:
        models[1].load_state_dict(models[0].state_dict())
    except RuntimeError:
        return "the models' weights differ in name or shape, so their outputs are not compared"
    try:
        with torch.no_grad():
            outputs = [output_tensors(call_model(model, images)) for model in models]
    except Exception as error:  # a model may raise any
        return f"their outputs cannot be compared: {error}"
    true, found = ({f"result {n}": one for n, one in enumerate(each)} for each in outputs)
    errors = code_errors(found, true, torch.float64)
    if any(not error <= 1 for error, _ in errors.values()):
        return "with the same weights, the second model computes something else"
    return "with the same weights, both models compute the same"
