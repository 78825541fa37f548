"""Write docs/operators.md: what torch's operators do with channels_last, by dtype and version.

    python -m benchmarks.operators_page docs/operators.md results/operators-*.json
    python -m benchmarks.operators_page confirm results/operators-fp32-cpu-torch2.15.json

Each file is the `out=` of `cl-train audit operators=true against=fake,decompose,compile`. With
the same torch, `confirm` runs a program of torch alone for each difference of a file, and notes
in it whether the program shows the same.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from cl_train.memory_format.operators import AGAINST, conformance_program, differs
from cl_train.system.files import write_json
from cl_train.system.tables import markdown_table

_HEAD = """# What each operator does with channels_last

Measured on a CPU. The page is made from `results/` by

    python -m benchmarks.operators_page docs/operators.md results/operators-*.json

and your own torch, device and dtype are measured by

    cl-train audit operators=true against=fake,decompose,compile precision=fp32

`x` is an image [2, 8, 8, 8], `v` a video [2, 8, 4, 6, 6], both in channels_last, and so is the
gradient of the output; `ones` is contiguous, `weight` channels_last. No dimension has size 1.
`other` is neither: strides of another order, or fewer dimensions.

"""


def label(document: dict[str, Any]) -> str:
    return f"{document['dtype']}, torch {document['torch'].partition('+')[0]}"


def places(labels: list[str], documents: list[dict[str, Any]]) -> str:
    return "everywhere" if len(labels) == len(documents) else "; ".join(labels)


def formats(documents: list[dict[str, Any]]) -> str:
    """The format of the output and of the input's gradient of the operators that lose it."""
    cells: dict[tuple[str, str], str] = {}  # by operator and label
    for document in documents:
        for row in document["operators"]:
            place = row["operator"], label(document)
            cell = cells.get(place)
            cells[place] = f"{cell} / " * bool(cell) + row["eager"].split()[0]
    labels: dict[tuple[str, str], list[str]] = {}
    for (operator, name), cell in cells.items():
        labels.setdefault((operator, cell), []).append(name)
    losing = {operator for operator, cell in labels if set(cell.split(" / ")) != {"channels_last"}}
    rows = [
        {
            "operator": f"`{operator}`",
            "output / gradient": cell,
            "where": places(names, documents),
        }
        for (operator, cell), names in labels.items()
        if operator in losing
    ]
    keeping = [
        operator for operator in dict.fromkeys(name for name, _ in cells) if operator not in losing
    ]
    listed = ", ".join(f"`{operator}`" for operator in keeping)
    return (
        f"## Who loses it\n\nIn eager mode.\n\n{markdown_table(rows)}\n\n"
        f"The other {len(keeping)} keep it in both directions: {listed}.\n"
    )


def differences(documents: list[dict[str, Any]]) -> str:
    """What differs from eager mode under the compiler."""
    labels: dict[tuple[str, ...], list[str]] = {}
    for document in documents:
        for row in filter(differs, document["operators"]):
            columns = ("operator", "direction", "eager", *AGAINST, "alone")
            cells = tuple(row.get(name, "-") for name in columns)
            labels.setdefault(cells, []).append(label(document))
    rows = [
        {
            "operator": f"`{operator}`, {direction}",
            "eager": eager,
            **dict(zip([*AGAINST, "torch alone"], others, strict=True)),
            "where": places(names, documents),
        }
        for (operator, direction, eager, *others), names in labels.items()
    ]
    return (
        "\n## What differs under the compiler\n\nStrides and values of eager mode, of fake tensors "
        "(what the compiler plans with),\nthrough torch's decompositions, and compiled by inductor."
        " `torch alone`: whether a program\nof torch alone, which `repro=FILE` writes, shows the "
        "same.\n\n"
        f"{markdown_table(rows)}\n"
    )


def confirm(file: Path) -> None:
    """Note for each difference in the file whether its program of torch alone shows the same."""
    document = json.loads(file.read_text(encoding="utf-8"))
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
    documents = [json.loads(Path(file).read_text(encoding="utf-8")) for file in sorted(files)]
    Path(out).write_text(_HEAD + formats(documents) + differences(documents), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
