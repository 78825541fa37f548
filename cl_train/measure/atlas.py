"""The atlas: what each operator of torch that takes an image does in channels_last.

A child process runs the samples of torch's operator database: a crash must not end the atlas, and
the database changes flags of torch for good.
"""

import importlib.util
import inspect
import math
import multiprocessing
import os
import subprocess
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from cl_train.errors import ConfigError
from cl_train.measure.kernels import OF_MEMORY, compare_results
from cl_train.memory_format.layout import CHANNELS_LAST_BY_DIM, classify
from cl_train.system.processes import end_with_parent
from cl_train.system.tables import markdown_table
from cl_train.system.tensors import map_leaves, tensors_in

Row = dict[str, Any]  # what is known of an operator
Record = dict[str, Any]  # what is known of all of them


def atlas(device: torch.device, dtype: torch.dtype, patterns: Sequence[str]) -> Record:
    """Returns what the operators whose names match `patterns` keep, lose and compute wrong.

    Raises ConfigError: no operator matches, or a package is missing.
    """
    if importlib.util.find_spec("expecttest") is None:
        what = "torch's operator database needs expecttest"
        raise ConfigError(f"operators=true: {what}; pip install 'cl-train[atlas]'")
    before_s = os.times().children_user
    facts = {"torch": torch.__version__, "device": str(device), "dtype": str(dtype)[6:]}
    rows = [row for row in _rows(device, dtype, patterns) if row["draws"]]
    if not rows:
        raise ConfigError(f"select={','.join(patterns)}: no operator on images; docs/operators.md")
    wrong = [row for row in rows if row["faults"]]
    for row in wrong:
        row["alone"] = _shown_by(program(facts, row), row["worst"]["what"])
    seconds = round(os.times().children_user - before_s, 1)  # of CPU: others may be busy
    draws = sum(row["draws"] for row in rows)
    counts = {"draws": draws, "wrong": len(wrong), "seconds": seconds}
    return {"schema_version": 1, **facts, **counts, "operators": rows}


def _shown_by(text: str, what: str) -> str:
    """Runs a program; returns the line of its output that begins like `what`, or how it ends."""
    ran = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    start, lines = what.partition(":")[0], (ran.stdout + ran.stderr).splitlines()
    shown = [line for line in lines if line.startswith(start)]
    return shown[-1] if shown else f"ended with {ran.returncode}"


def _rows(
    device: torch.device, dtype: torch.dtype, patterns: Sequence[str], start: int = 0
) -> Iterator[Row]:
    """Yields rows from a child; after an operator that crashes, goes on in another child."""
    # A forked child has what the caller replaced in torch; CUDA does not survive a fork.
    context: Any = multiprocessing.get_context("spawn" if device.type == "cuda" else "fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_examine_all, args=(sender, device, dtype, patterns, start))
    child.start()
    sender.close()
    row: Row = {}
    with suppress(EOFError):
        while True:
            row = receiver.recv()
            if "draws" in row:
                yield row
    child.join()
    if child.exitcode and not row:
        raise RuntimeError(f"the operator database ended with {child.exitcode}")
    if child.exitcode:
        counts = {"draws": 1, "faults": 1, "output": {}, "gradient": {}}
        yield {**row, **counts, "worst": {**row, "what": f"ended with {child.exitcode}"}}
        yield from _rows(device, dtype, patterns, row["number"] + 1)


# --- a program of torch alone, which is also what the child runs ----------------------------------


def placed(value: Any, in_channels_last: bool) -> Any:
    """Returns a copy of a tensor, since operators write into their arguments."""
    if not isinstance(value, torch.Tensor):
        return value
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    memory_format = formats.get(value.dim()) if in_channels_last else None
    copy = value.detach().clone(memory_format=memory_format or torch.contiguous_format)
    return copy.requires_grad_(value.requires_grad)


def results(op: Any, call: Any, in_channels_last: bool, seed: int = 0) -> dict[str, torch.Tensor]:
    args, kwargs = map_leaves(lambda value: placed(value, in_channels_last), call)
    torch.manual_seed(seed)
    outputs = [t for t in tensors_in(op.op(*args, **kwargs)) if t.layout == torch.strided]
    roots = [output for output in outputs if output.requires_grad]
    leaves = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
    gradients: Any = ()
    if roots and leaves:
        numbers = [(torch.arange(t.numel(), device=t.device) % 7 - 3).view_as(t) for t in roots]
        given = [placed(n.to(t), in_channels_last) for n, t in zip(numbers, roots, strict=True)]
        gradients = torch.autograd.grad(roots, leaves, given, allow_unused=True)
    found = {f"output {i}": t.detach() for i, t in enumerate(outputs)}
    return found | {f"gradient {i}": g for i, g in enumerate(gradients) if g is not None}


_PROGRAM = """\
# {operator} in channels_last: {what}
import copy
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db  # pip install expecttest
from torch.testing._internal.common_utils import set_rng_seed


{functions}

op = next(op for op in op_db if op.full_name == {operator!r})
set_rng_seed(0)
sample = list(op.sample_inputs({device!r}, torch.{dtype}, requires_grad={has_gradients}))[{draw}]
call = (sample.input, *sample.args), sample.kwargs
print("torch", torch.__version__, sample)
channels_last = results(op, call, True)
for name, one in results(op, call, False).items():
    wide = torch.complex128 if one.is_complex() else torch.float64
    error = (one.to(wide) - channels_last[name].to(wide)).norm() / one.to(wide).norm()
    print(f"{{name}}: relative error {{error:.2g}}")
"""


def program(facts: Record, row: Row) -> str:
    parts: list[Any] = [tensors_in, map_leaves, placed, results]
    functions = "\n\n".join(map(inspect.getsource, parts))
    return _PROGRAM.format(**facts | row | row["worst"], functions=functions)


# --- in the child ---------------------------------------------------------------------------------


def _examine_all(
    rows: Connection, device: torch.device, dtype: torch.dtype, patterns: Sequence[str], start: int
) -> None:
    """Sends a row for each operator and, before each draw, which operator and draw it is."""
    end_with_parent()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # the threads of the parent are not forked
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_utils import set_rng_seed

    kind, of_memory = device.type, (*OF_MEMORY, "resize_")
    operators = [
        op
        for op in op_db
        if any(fnmatchcase(op.full_name, pattern) for pattern in patterns)
        and dtype in op.supported_dtypes(kind)
        and all(word not in op.name for word in of_memory)
    ]
    for number, op in list(enumerate(operators))[start:]:
        has_gradients = op.supports_autograd and dtype in op.supported_backward_dtypes(kind)
        facts = {"operator": op.full_name, "number": number, "has_gradients": has_gradients}
        set_rng_seed(0)
        # Draw all samples first, as operators draw random numbers, too.
        samples = list(op.sample_inputs(str(device), dtype, requires_grad=has_gradients))
        layouts: dict[str, Counter[str]] = {"output": Counter(), "gradient": Counter()}
        draws, faults = 0, []
        for draw, sample in enumerate(samples):
            call = (sample.input, *sample.args), sample.kwargs
            if any(classify(one) in ("contiguous", "channels_last") for one in tensors_in(call)):
                rows.send({**facts, "draw": draw})
                fault = _fault(op, call, layouts)
                draws += fault is not None
                if fault and fault[0] > 1:
                    faults.append((*fault, draw))
        row = {**facts, "draws": draws, "faults": len(faults), **layouts}
        if faults:
            _, what, draw = max(faults)
            row["worst"] = {"draw": draw, "what": what}
        rows.send(row)


def _fault(op: Any, call: Any, layouts: dict[str, Counter[str]]) -> tuple[float, str] | None:
    """Returns the largest error in multiples of its limit, and in words; None: contiguous fails."""

    contiguous = partial(results, op, in_channels_last=False)
    with suppress(Exception):  # contiguous inputs may fail, too
        contiguous(call)
        try:
            found = results(op, call, True)
        except Exception as failure:
            return math.inf, f"{type(failure).__name__}: {str(failure).strip():.150}".split("\n")[0]
        for name, tensor in found.items():
            if tensor.dim() in CHANNELS_LAST_BY_DIM:
                layouts[name.split()[0]][classify(tensor)] += 1
        errors = compare_results(
            lambda values: found if values is call else contiguous(values), call
        )
        worst = max(errors, key=errors.__getitem__, default="")
        error, relative = errors.get(worst, (0.0, 0.0))
        if error > 1:
            # A random operator also differs between two seeds.
            others = compare_results(
                lambda values: contiguous(values, seed=int(values is call)), call
            )
            if max(others.values())[0] <= 1:
                return error, f"{worst}: relative error {relative:.2g}, {error:.2g} of the limit"
        return 0.0, ""
    return None


# --- tables ---------------------------------------------------------------------------------------


def tables(records: Sequence[Record]) -> str:
    measured, wrong, lost, names = [], defaultdict(list), defaultdict(list), set()
    for record in records:
        where = f"{record['dtype']}, torch {record['torch'].partition('+')[0]}"
        counts = {key: record[key] for key in ("draws", "wrong", "seconds")}
        measured.append({"where": where, "operators": len(record["operators"]), **counts})
        for row in record["operators"]:
            names.add(name := f"`{row['operator']}`")
            if row["faults"]:
                number = f"{row['faults']} of {row['draws']}"
                wrong[name, number, row["worst"]["what"], row["alone"]].append(where)
            losses = _losses(row["output"]), _losses(row["gradient"])
            if any(losses):
                lost[name, *losses].append(where)
    faults = _table(("wrong", "samples", "what", "torch alone"), wrong, len(records))
    losing = _table(("loses it", "outputs", "gradients"), lost, len(records))
    kept = ", ".join(sorted(names - {name for name, *_ in lost}))
    parts = markdown_table(measured), faults, losing, f"Nothing lost by {kept}." if kept else ""
    return "\n\n".join(filter(None, parts))


def _losses(orders: dict[str, int]) -> str:
    number = sum(orders.values()) - orders.get("ambiguous", 0)
    lost = number - orders.get("channels_last", 0)
    return "" if not lost else "all" if lost == number else f"{lost} of {number}"


def _table(names: Sequence[str], rows: dict[Any, list[str]], count: int) -> str:
    """Returns a table in which equal rows of several records are one."""
    return markdown_table(
        [
            dict(zip(names, row, strict=True))
            | {"where": "; ".join(places) if len(places) < count else "everywhere"}
            for row, places in sorted(rows.items())
        ]
    )
