"""Write docs/operators.md: what torch's operators do with channels_last, by dtype and version.

    python -m benchmarks.operators_page docs/operators.md results/operators-*.json
    python -m benchmarks.operators_page confirm results/operators-fp32-cpu-torch2.15.json

Each file is the `out=` of `cl-train audit operators=true against=fake,decompose,compile`. With
the same torch, `confirm` runs a program of torch alone for each difference of a file, and notes
in it whether the program shows the same.
"""

import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from cl_train.memory_format.operators import AGAINST, conformance_program, differs
from cl_train.system.files import read_json, write_json
from cl_train.system.tables import markdown_table

Record = dict[str, Any]
_HEAD = """# What each operator does with channels_last

Measured on a CPU. The page is made from `results/` by

    python -m benchmarks.operators_page docs/operators.md results/operators-*.json

and your own torch, device and dtype are measured by

    cl-train audit operators=true against=fake,decompose,compile precision=fp32

`x` is an image [2, 8, 8, 8], `v` a video [2, 8, 4, 6, 6], both in channels_last, and so is the
gradient of the output; `ones` is contiguous, `weight` channels_last. No dimension has size 1.
`other` is neither: strides of another order, or fewer dimensions.

"""
_DIFFERENCES = """
## What differs under the compiler

Strides and values of eager mode, of fake tensors (what the compiler plans with),
through torch's decompositions, and compiled by inductor. `torch alone`: whether a program
of torch alone, which `repro=FILE` writes, shows the same.

"""


def where(cells: Mapping[tuple[str, ...], list[str]], count: int) -> Iterator[tuple[str, ...]]:
    """Each row of cells with its place; `count`: of all places."""
    for row, places in cells.items():
        yield *row, "everywhere" if len(places) == count else "; ".join(places)


def label(document: Record) -> str:
    return f"{document['dtype']}, torch {document['torch'].partition('+')[0]}"


def formats(documents: list[Record]) -> str:
    """The format of the output and of the input's gradient of the operators that lose it."""
    cells = defaultdict[tuple[str, str], list[str]](list)  # by operator and label
    for document in documents:
        for row in document["operators"]:
            cells[row["operator"], label(document)].append(row["eager"].split()[0])
    labels = defaultdict[tuple[str, ...], list[str]](list)
    losing = {operator: False for operator, _ in cells}
    for (operator, name), words in cells.items():
        labels[operator, " / ".join(words)].append(name)
        losing[operator] |= set(words) != {"channels_last"}
    rows = [
        {"operator": f"`{operator}`", "output / gradient": cell, "where": places}
        for operator, cell, places in where(labels, len(documents))
        if losing[operator]
    ]
    keeping = [f"`{operator}`" for operator in losing if not losing[operator]]
    return (
        f"## Who loses it\n\nIn eager mode.\n\n{markdown_table(rows)}\n\n"
        f"The other {len(keeping)} keep it in both directions: {', '.join(keeping)}.\n"
    )


def differences(documents: list[Record]) -> str:
    """What differs from eager mode under the compiler."""
    columns = ("operator", "direction", "eager", *AGAINST, "alone")
    labels = defaultdict[tuple[str, ...], list[str]](list)
    for document in documents:
        for row in filter(differs, document["operators"]):
            labels[tuple(row.get(name, "-") for name in columns)].append(label(document))
    head = ("eager", *AGAINST, "torch alone", "where")
    rows = [
        {"operator": f"`{operator}`, {direction}", **dict(zip(head, cells, strict=True))}
        for operator, direction, *cells in where(labels, len(documents))
    ]
    return f"{_DIFFERENCES}{markdown_table(rows)}\n"


def confirm(file: Path) -> None:
    """Note for each difference in the file whether its program of torch alone shows the same."""
    document = read_json(file)
    assert document["torch"] == torch.__version__, f"{file} is of torch {document['torch']}"
    device, dtype = torch.device(document["device"]), getattr(torch, document["dtype"])
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        for row in filter(differs, document["operators"]):
            program.write_text(conformance_program(row, device, dtype), encoding="utf-8")
            done = subprocess.run([sys.executable, program], capture_output=True, text=True)
            ways = ["eager", *(way for way in AGAINST if row.get(way, "same") != "same")]
            missing = [way for way in ways if not shows(done.stdout + done.stderr, row, way)]
            row["alone"] = f"other: {', '.join(missing)}" if missing else "same"
            print(f"{row['operator']}, {row['direction']}: {row['alone']}", flush=True)
    write_json(file, document, indent=1)


def shows(printed: str, row: dict[str, str], way: str) -> bool:
    """Whether a line of the program has the strides, deviation or error of the row."""
    fact = row[way].partition(" of ")[0].partition(" ")[2]
    start = f"{row['direction']} {way}:"
    is_error = "Error:" in row[way]
    return any(fact in line for line in printed.splitlines() if is_error or line.startswith(start))


def main(out: str, *files: str) -> None:
    if out == "confirm":
        for file in files:
            confirm(Path(file))
        return
    documents = [read_json(Path(file)) for file in sorted(files)]
    Path(out).write_text(_HEAD + formats(documents) + differences(documents), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
