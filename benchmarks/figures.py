"""Make every measured number, table and picture of README and docs from `results/`.

    python -m benchmarks.figures

A page has its numbers between `<!-- figures: NAME -->` and `<!-- end -->`; NAME is one of `BLOCKS`.
The picture carries the digest of its record. docs/benchmarks.md has the commands that write the
records.
"""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from cl_train.measure.atlas import tables
from cl_train.measure.charts import Bar, write_chart
from cl_train.measure.statistics import Interval
from cl_train.system.files import read_json

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
PICTURE = ROOT / "docs/speed.png"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
NOT_MEASURED = "Not measured at this version yet."

Record = dict[str, Any]
Row = dict[str, str]  # a cell per column


def record(name: str) -> Record | None:
    """None: not measured yet."""
    path = RESULTS / f"{name}-cpu.json"
    return read_json(path) if path.exists() else None


def provenance(found: Record) -> str:
    """Where numbers come from, as the line under a table."""
    commit = found["git"]["commit"][:10]
    version = found["environment"]["torch"].partition("+")[0]
    device = found["device_name"].replace("(1 threads)", "(1 thread)")  # of older records
    return f"*{device}, torch {version}, commit {commit}.*"


def table(rows: Sequence[Row]) -> str:
    head = list(rows[0])
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *(row.values() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(values: Sequence[float] | None, digits: int = 2) -> str:
    """`values`: median, least, largest."""
    if not values or values[0] is None:
        return "not reached"
    middle, *ends = (f"{value:.{digits}f}" if value is not None else "never" for value in values)
    return f"{middle} ({ends[0]} to {ends[1]})"


# --- blocks of the pages --------------------------------------------------------------------------


def headline() -> str:
    names = ("models", "loader", "time-to-accuracy", "overhead")
    found = {name: of_name for name in names if (of_name := record(name))}
    if not found:
        return NOT_MEASURED
    places = list(dict.fromkeys(map(provenance, found.values())))
    cells = []
    for name, of_name in found.items():
        for what, ratio, against in headlines(name, of_name):
            where = f"{places.index(provenance(of_name)) + 1}"
            cells.append({"what": what, "ratio": ratio, "against": against, "where": where})
    return "\n".join([table(cells), "", *(f"{i}. {place}" for i, place in enumerate(places, 1))])


def headlines(name: str, found: Record) -> Iterator[tuple[str, str, str]]:
    if name == "models":
        for precision, pairs in pairs_of_models(found).items():
            what = f"the tutorial's 28 models, training step, {precision}, channels_last"
            against = f"contiguous (geometric mean; {verdicts_of(pairs)})"
            yield what, mean_ratio(pairs), against
    elif name == "loader":
        *others, ours = found["rows"]
        what = f"loader, JPEG to NHWC uint8 batch, {ours['workers']} workers"
        for other in others:
            if other["pipeline"] != "cl_train":
                yield what, f"{ours['ratio'] / other['ratio']:.2f}x", other["pipeline"]
    elif name == "time-to-accuracy":
        for data, program, row in summaries(found):
            if program != "cl_train":
                what = f"speed of an epoch, resnet18, {data}, the same recipe"
                ratio = f"{spread(row['theirs_over_ours']['epoch'])}x"
                yield what, ratio, program.partition(",")[0]
    else:
        settings, ratios = found["settings"], found["ratios"]
        what = f"training through cl_train, {settings['model']}, {settings['image_size']} px"
        ratio = f"{found['ratio']:.2f}x (rounds {min(ratios):.2f} to {max(ratios):.2f})"
        yield what, ratio, "a bare loop of forward, backward, step"


def models(found: Record) -> Iterator[Row]:
    for precision, pairs in pairs_of_models(found).items():
        yield {
            "precision": precision,
            "geometric mean": mean_ratio(pairs),
            "verdicts": verdicts_of(pairs),
        }


def pairs_of_models(found: Record) -> dict[str, list[tuple[str, Record]]]:
    """Model and pair of each result, by precision."""
    pairs: dict[str, list[tuple[str, Record]]] = {}
    for one in found["results"]:
        for pair in one["pairs"][:1]:
            pairs.setdefault(one["precision"], []).append((one["model"], pair))
    return pairs


def mean_ratio(pairs: Sequence[tuple[str, Record]]) -> str:
    return f"{geometric_mean([pair['ratio'] for _, pair in pairs]):.2f}x"


def verdicts_of(pairs: Sequence[tuple[str, Record]]) -> str:
    counts = Counter(pair["verdict"] for _, pair in pairs)
    words = {"no_difference": "no difference", "inconclusive": "not decided"}
    verdicts = ("faster", "slower", *words)
    return ", ".join(f"{counts[name]} {words.get(name, name)}" for name in verdicts if counts[name])


def accuracy(found: Record) -> Iterator[Row]:
    for data, program, row in summaries(found):
        ratios = {"target": "", "epoch": ""}
        if program != "cl_train":
            ratios = {key: spread(row["theirs_over_ours"][key]) for key in ratios}
        yield {
            "data, program": f"{data}, {program}",
            f"reached {found['target_top1']:g} %": f"{row['reached']} of {row['runs']}",
            "s to it": spread(row["target_s"], 1),
            "s to the first": spread(row["first_s"], 1),
            "s per later epoch": spread(row["epoch_s"], 1),
            "floor / it": spread(row["share_of_floor"]),
            "to it / train.py": ratios["target"],
            "epoch / train.py": ratios["epoch"],
        }


def summaries(found: Record) -> Iterator[tuple[str, str, Record]]:
    for data, of_data in found["summary"].items():
        for program, row in of_data.items():
            yield data, program, row


def sweeps(found: Record) -> Iterator[Row]:
    """Verdicts of real sweeps that compare a setting with itself."""
    for name in dict.fromkeys(one["beside"] for one in found["sweeps"]):
        of_name = [one for one in found["sweeps"] if one["beside"] == name]
        wrong = sum(one["verdict"] in ("faster", "slower") for one in of_name)
        yield {
            "beside": name,
            "sweeps": f"{len(of_name)}",
            "called different": f"{wrong}",
            "repeats in the median": f"{median(one['n'] for one in of_name):g}",
        }


LOADER = {
    "pipeline": "{pipeline}",
    "workers": "{workers}",
    "images/s": "{images_per_s:,.0f}",
    "ratio": "{ratio:.2f}",
}
UPDATES = {
    "network, update, threads": "{model}, {update}, {threads}",
    "contiguous, ms": "{ms[contiguous]:.1f}",
    "channels_last, ms": "{ms[channels_last]:.1f}",
    "channels_last without views, ms": "{ms[torch]:.1f}",
    "channels_last / contiguous": "{ratio:.2f}",
}


def formatted(columns: Row, found: Record) -> list[Row]:
    return [{name: cell.format(**row) for name, cell in columns.items()} for row in found["rows"]]


# With the record of each.
TABLES: dict[str, tuple[str, Callable[[Record], Iterable[Row]]]] = {
    "models": ("models", models),
    "accuracy": ("time-to-accuracy", accuracy),
    "loader": ("loader", partial(formatted, LOADER)),
    "updates": ("updates", lambda found: formatted(UPDATES, found)[:10]),  # resnet18's
    "sweeps": ("aa-sweeps", sweeps),
}
BLOCKS = ("headline", "operators", *TABLES)


def block(name: str) -> str:
    if name == "headline":
        return headline()
    if name == "operators":
        return tables([read_json(path) for path in sorted(RESULTS.glob("operators-*.json"))])
    source, rows_of = TABLES[name]
    found = record(source)
    if found is None:
        return NOT_MEASURED
    text = f"{table(list(rows_of(found)))}\n\n{provenance(found)}"
    if name == "models":
        settings = found["settings"]
        intro = f"Batches of {settings['batch_size'][0]}, {settings['image_size']} px, SGD."
        picture = "![Speed ratios with intervals, model by model](speed.png)"
        text = f"{intro} {picture}\n\n{text}"
    return text


def with_figures(text: str) -> str:
    return BLOCK.sub(lambda found: f"{found[1]}{block(found[2])}\n{found[3]}", text)


# --- the picture of the models --------------------------------------------------------------------


def draw_speeds(found: Record, out: Path) -> None:
    """One panel per precision; models are sorted by the first panel's ratio, largest on top."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    pairs = pairs_of_models(found)
    ratios = {model: pair["ratio"] for model, pair in next(iter(pairs.values()))}
    panels: dict[str, list[Bar]] = {}
    for precision, of_precision in pairs.items():
        bars = panels[precision] = []
        for model, pair in sorted(of_precision, key=lambda one: -ratios.get(one[0], 0.0)):
            low, high = pair["ci95"] or (0.0, math.inf)
            interval = Interval(pair["ratio"], low, high, pair["n"])
            bars.append(Bar(model, interval, pair["verdict"], ""))
    settings, version = found["settings"], found["environment"]["torch"].partition("+")[0]
    what = f"batch {settings['batch_size'][0]}, {settings['image_size'] or 224} px, torch {version}"
    title = f"Training step in channels_last against contiguous\n{found['device_name']}, {what}"
    write_chart(panels, title, ("contiguous", "channels_last"), out)
    info = PngInfo()
    info.add_text("record", digest("models"))
    with Image.open(out) as image:
        image.load()
        image.save(out, pnginfo=info, optimize=True)


def digest(name: str) -> str:
    return hashlib.sha256((RESULTS / f"{name}-cpu.json").read_bytes()).hexdigest()


def main() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(with_figures(text), encoding="utf-8")
    if found := record("models"):
        draw_speeds(found, PICTURE)


if __name__ == "__main__":
    main()
