"""Make every measured number, table and picture of README and docs from `results/`.

    python -m benchmarks.figures

A page has its numbers between `<!-- figures: NAME -->` and `<!-- end -->`; NAME is one of `BLOCKS`.
A picture carries the digest of the record that it shows. docs/benchmarks.md has the commands that
write the records.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from benchmarks import operators_page
from cl_train.measure.charts import Bar, write_chart
from cl_train.measure.statistics import Interval

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
NOT_MEASURED = "Not measured at this version yet."

Record = dict[str, Any]
Rows = list[list[str]]


def record(name: str) -> Record | None:
    """The record results/NAME-cpu.json; None: not measured yet."""
    path = RESULTS / f"{name}-cpu.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def provenance(found: Record) -> str:
    """Where numbers come from, as the line under a table."""
    commit = found["git"]["commit"][:10]
    version = found["environment"]["torch"].partition("+")[0]
    return f"*{found['device_name']}, torch {version}, commit {commit}.*"


def table(head: Sequence[str], rows: Rows) -> str:
    lines = [list(head), ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(values: Sequence[float] | None, digits: int = 2) -> str:
    """`[median, least, largest]` as text."""
    if not values or values[0] is None:
        return "not reached"
    middle, *ends = (f"{value:.{digits}f}" if value is not None else "never" for value in values)
    return f"{middle} ({ends[0]} to {ends[1]})"


# --- blocks of the pages --------------------------------------------------------------------------


def headline() -> str:
    """README's table: one row for each record that there is."""
    rows: Rows = []
    sources: list[Record] = []
    if models := record("models"):
        sources.append(models)
        for precision, pairs in pairs_of_models(models).items():
            ratio = geometric_mean([pair["ratio"] for _, pair in pairs])
            counts = f"geometric mean; {faster_and_slower(pairs)}"
            what = f"the tutorial's 28 models, training step, {precision}, channels_last"
            rows.append([what, f"{ratio:.2f}x", f"contiguous ({counts})"])
    if loader := record("loader"):
        sources.append(loader)
        *others, ours = loader["rows"]
        for other in others:
            if other["pipeline"] != "cl_train":
                what = f"loader, JPEG to NHWC uint8 batch, {ours['workers']} workers"
                ratio = ours["ratio"] / other["ratio"]
                rows.append([what, f"{ratio:.2f}x", other["pipeline"]])
    if accuracy := record("time-to-accuracy"):
        sources.append(accuracy)
        for data, summary in accuracy["summary"].items():
            for name, row in summary.items():
                if name != "cl_train":
                    what = f"seconds per epoch, resnet18, {data}, the same recipe"
                    words = f"{spread(row['theirs_over_ours']['epoch'])}x"
                    rows.append([what, words, name.partition(",")[0]])
    if overhead := record("overhead"):
        sources.append(overhead)
        ratios, settings = overhead["ratios"], overhead["settings"]
        what = f"training through cl_train, {settings['model']}, {settings['image_size']} px"
        words = f"{overhead['ratio']:.2f}x (rounds {min(ratios):.2f} to {max(ratios):.2f})"
        rows.append([what, words, "a bare loop of forward, backward, step"])
    if not rows:
        return NOT_MEASURED
    lines = dict.fromkeys(map(provenance, sources))
    return f"{table(['what', 'ratio', 'against'], rows)}\n\n" + "\n".join(lines)


def models() -> str:
    """Speed ratios of the tutorial's models: a picture, and what is decided."""
    found = record("models")
    if found is None:
        return NOT_MEASURED
    settings = found["settings"]
    lines = [
        f"Batches of {settings['batch_size'][0]}, {settings['image_size']} px, SGD."
        " ![Speed ratios with intervals, model by model](speed.png)",
        "",
    ]
    rows: Rows = []
    for precision, pairs in pairs_of_models(found).items():
        decided = sum(pair["verdict"] != "inconclusive" for _, pair in pairs)
        ratio = geometric_mean([pair["ratio"] for _, pair in pairs])
        row = [precision, f"{ratio:.2f}x", f"{decided} of {len(pairs)}", faster_and_slower(pairs)]
        rows.append(row)
    head = ("precision", "geometric mean", "decided", "of these")
    return "\n".join([*lines, table(head, rows), "", provenance(found)])


def pairs_of_models(found: Record) -> dict[str, list[tuple[str, Record]]]:
    """Model and pair of each result, by precision."""
    pairs: dict[str, list[tuple[str, Record]]] = {}
    for one in found["results"]:
        for pair in one["pairs"][:1]:
            pairs.setdefault(one["precision"], []).append((one["model"], pair))
    return pairs


def faster_and_slower(pairs: Sequence[tuple[str, Record]]) -> str:
    counts = [
        f"{count} {verdict.replace('_', ' ')}"
        for verdict in ("faster", "slower", "no_difference")
        if (count := sum(pair["verdict"] == verdict for _, pair in pairs))
    ]
    return ", ".join(counts)


def accuracy() -> str:
    """Seconds to the target and per epoch, by data set and program."""
    found = record("time-to-accuracy")
    if found is None:
        return NOT_MEASURED
    rows: Rows = []
    for data, summary in found["summary"].items():
        for name, row in summary.items():
            ratios = row["theirs_over_ours"]
            cells = [f"{data}, {name}", f"{row['reached']} of {row['runs']}"]
            cells += [spread(row[key], 1) for key in ("target_s", "first_s", "epoch_s")]
            is_ours = name == "cl_train"
            cells += ["" if is_ours else spread(ratios[key]) for key in ("target", "epoch")]
            rows.append(cells)
    head = ["data, program", f"reached {found['target_top1']:g} %", "s to it", "s to the first"]
    head += ["s per later epoch", "to it / train.py", "epoch / train.py"]
    return f"{table(head, rows)}\n\n{provenance(found)}"


def loader() -> str:
    """Images per second of each pipeline."""
    found = record("loader")
    if found is None:
        return NOT_MEASURED
    rows = [
        [row["pipeline"], str(row["workers"]), f"{row['images_per_s']:,.0f}", f"{row['ratio']:.2f}"]
        for row in found["rows"]
    ]
    head = ("pipeline", "workers", "images/s", "ratio")
    return f"{table(head, rows)}\n\n{provenance(found)}"


def updates() -> str:
    """Fused updates of each network, optimizer and number of threads."""
    found = record("updates")
    if found is None:
        return NOT_MEASURED
    rows: Rows = []
    for row in found["rows"]:
        name = f"{row['model']}, {row['update']}, {row['threads']}"
        ms = [f"{row['ms'][side]:.1f}" for side in ("contiguous", "channels_last", "torch")]
        rows.append([name, *ms, f"{row['ratio']:.2f}"])
    head = ["network, update, threads", "contiguous, ms", "channels_last, ms"]
    head += ["channels_last without views, ms", "channels_last / contiguous"]
    return f"{table(head, rows)}\n\n{provenance(found)}"


def sweeps() -> str:
    """Verdicts of real sweeps that compare a setting with itself."""
    found = record("aa-sweeps")
    if found is None:
        return NOT_MEASURED
    rows: Rows = []
    for name, of_name in grouped(found["sweeps"], "beside"):
        verdicts = [one["verdict"] for one in of_name]
        wrong = sum(verdict in ("faster", "slower") for verdict in verdicts)
        repeats = median(one["n"] for one in of_name)
        rows.append([name, str(len(of_name)), str(wrong), f"{repeats:g}"])
    head = ("beside", "sweeps", "called different", "repeats in the median")
    return f"{table(head, rows)}\n\n{provenance(found)}"


def grouped(rows: Sequence[Record], key: str) -> list[tuple[str, list[Record]]]:
    names = dict.fromkeys(str(row[key]) for row in rows)
    return [(name, [row for row in rows if str(row[key]) == name]) for name in names]


BLOCKS: dict[str, Callable[[], str]] = {
    block.__name__: block for block in (headline, models, accuracy, loader, updates, sweeps)
}


def with_figures(text: str) -> str:
    """A page with its blocks made anew."""

    def made(block: re.Match[str]) -> str:
        return f"{block[1]}{BLOCKS[block[2]]()}\n{block[3]}"

    return BLOCK.sub(made, text)


# --- pictures -------------------------------------------------------------------------------------


def draw_speeds(found: Record, out: Path) -> None:
    """One panel per precision; models are sorted by the first panel's ratio, largest on top."""
    pairs = pairs_of_models(found)
    ratios = {model: pair["ratio"] for model, pair in next(iter(pairs.values()))}
    panels: dict[str, list[Bar]] = {}
    for precision, of_precision in pairs.items():
        bars = []
        for model, pair in sorted(of_precision, key=lambda one: -ratios.get(one[0], 0.0)):
            low, high = pair["ci95"] or (0.0, math.inf)
            bars.append(
                Bar(model, Interval(pair["ratio"], low, high, pair["n"]), pair["verdict"], "")
            )
        panels[precision] = bars
    settings, version = found["settings"], found["environment"]["torch"].partition("+")[0]
    what = f"batch {settings['batch_size'][0]}, {settings['image_size'] or 224} px, torch {version}"
    title = f"Training step in channels_last against contiguous\n{found['device_name']}, {what}"
    write_chart(panels, title, ("contiguous", "channels_last"), out)


def draw_accuracies(found: Record, out: Path) -> None:
    """Accuracy over seconds, a line per run."""
    from matplotlib.figure import Figure

    colours = {"cl_train": "#1a7f37", "timm": "#b35900", "torchvision": "#0969da"}
    figure = Figure(figsize=(10, 3.6), dpi=110, layout="constrained")
    axes = figure.subplots(1, len(found["summary"]), squeeze=False)[0]
    for axis, (data, summary) in zip(axes, found["summary"].items(), strict=True):
        for name in summary:
            program, _, recipe = name.partition(",")
            style = ":" if recipe else "-"
            of_program = [r for r in found["runs"] if (r["data"], r["program"]) == (data, name)]
            for number, run in enumerate(of_program):
                label = "" if number else name
                line = {"color": colours[program], "linestyle": style, "label": label}
                axis.plot(*zip(*run["points"], strict=True), linewidth=1.0, alpha=0.6, **line)
        axis.axhline(found["target_top1"], color="black", linewidth=0.7, linestyle="--")
        axis.set(title=data, xlabel="seconds from the start", ylim=(0, 101), xlim=(0, None))
        axis.legend(loc="lower right", fontsize=8)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("top-1, %")
    figure.suptitle(f"ResNet-18 on {found['device_name']}, one line per run", fontsize=10)
    figure.savefig(out)


PICTURES: dict[str, tuple[str, Callable[[Record, Path], None]]] = {
    "speed.png": ("models", draw_speeds),
    "time_to_accuracy.png": ("time-to-accuracy", draw_accuracies),
}


def digest(name: str) -> str:
    return hashlib.sha256((RESULTS / f"{name}-cpu.json").read_bytes()).hexdigest()


def draw(name: str, path: Path) -> None:
    """Draw a picture of `PICTURES`, with the digest of its record."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    source, make = PICTURES[name]
    found = record(source)
    assert found is not None
    make(found, path)
    info = PngInfo()
    info.add_text("record", digest(source))
    with Image.open(path) as image:
        image.load()
        image.save(path, pnginfo=info, optimize=True)


def main() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(with_figures(text), encoding="utf-8")
    for name, (source, _) in PICTURES.items():
        if record(source):
            draw(name, ROOT / "docs" / name)
    operators = sorted(RESULTS.glob("operators-*.json"))
    operators_page.main(str(ROOT / "docs/operators.md"), *map(str, operators))


if __name__ == "__main__":
    main()
