"""`report=true`: what an evaluation got wrong, as tables and as a page that needs no network."""

import base64
import csv
import io
import logging
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from cl_train.data.build import Data, ImageData
from cl_train.data.decode import BadImage
from cl_train.system.distributed import Dist, gather_objects
from cl_train.system.files import write_text

log = logging.getLogger(__name__)

_IMAGES, _CLASSES, _THUMBNAIL_PX = 100, 20, 160
Rows = npt.NDArray[np.float64]  # evaluation.COLUMNS and the image's index, or -1
Counts = npt.NDArray[np.int64]  # of images [true class, predicted class]


def write_report(predicted: torch.Tensor, data: Data, dist: Dist, folder: Path) -> None:
    """Rank 0 writes `per_class.csv`, `confusions.csv` and `index.html`; if it cannot, it warns."""
    indices = data.validation_indices()
    if len(indices) != len(predicted):  # of an IterableDataset, or a file became unreadable
        indices = [-1] * len(predicted)
    rows = np.concatenate(gather_objects(np.column_stack((predicted.cpu().numpy(), indices)), dist))
    if not dist.is_main:
        return

    outputs = max(len(data.classes), int(rows[:, 1].max(initial=0)) + 1)
    # A model may have more outputs than there are classes.
    names = [*data.classes, *(f"output {n}" for n in range(len(data.classes), outputs))]
    labelled = rows[rows[:, 0] >= 0]
    counts = np.zeros((outputs, outputs), np.int64)
    np.add.at(counts, tuple(labelled[:, :2].astype(int).T), 1)
    classes, confused = per_class(labelled, counts, names), confusions(counts, names)
    try:
        folder.mkdir(exist_ok=True)
        write_csv(folder / "per_class.csv", classes, ["class"])
        write_csv(folder / "confusions.csv", confused, ["true", "predicted", "images"])
        write_text(folder / "index.html", _page(rows, counts, data, names))
    except (OSError, BadImage) as error:
        log.warning("the evaluation's report cannot be written: %s", error)
        return
    lowest = ", ".join(f"{row['class']} {row['top1']:.1f} %" for row in classes[:3])
    pairs = [f"{row['true']} as {row['predicted']} {row['images']} times" for row in confused[:3]]
    frequent = ", ".join(pairs) or "none"
    page = folder / "index.html"
    log.info("report: lowest accuracy: %s; confusions: %s; %s", lowest, frequent, page)


def write_csv(path: Path, table: Sequence[dict[str, Any]], header: Sequence[str]) -> None:
    with open(path, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.DictWriter(file, table[0] if table else header)
        writer.writeheader()
        writer.writerows(table)


def per_class(rows: Rows, counts: Counts, names: Sequence[str]) -> list[dict[str, Any]]:
    """Accuracy and precision (percent) and mean loss of each class, the lowest accuracy first."""
    table = []
    for label in np.flatnonzero(counts.sum(1)).tolist():
        images, predicted = int(counts[label].sum()), int(counts[:, label].sum())
        correct = int(counts[label, label])
        row = {"class": names[label], "images": images, "correct": correct}
        row["top1"] = 100 * correct / images
        row["precision"] = 100 * correct / predicted if predicted else None
        row["loss"] = float(rows[rows[:, 0] == label, 4].mean())
        table.append(row)
    return sorted(table, key=lambda row: row["top1"])


def confusions(counts: Counts, names: Sequence[str]) -> list[dict[str, Any]]:
    """The pairs of true and predicted class that differ, the frequent ones first."""
    wrong = counts - np.diag(np.diag(counts))
    table = [
        {"true": names[i], "predicted": names[j], "images": int(wrong[i, j])}
        for i, j in np.argwhere(wrong).tolist()
    ]
    return sorted(table, key=lambda row: -row["images"])


def _page(rows: Rows, counts: Counts, data: Data, names: Sequence[str]) -> str:
    is_correct = rows[:, 0] == rows[:, 1]
    # Wrong ones first, then by loss; NaN comes first.
    worst = np.lexsort((-np.nan_to_num(rows[:, 4], nan=np.inf), is_correct))[:_IMAGES]
    wrong = int((~is_correct).sum())
    images_caption = (
        f"{len(worst)} of {len(rows)} images as the model sees them: of {wrong} wrong ones those "
        "with the largest loss, then correct ones."
    )
    used = counts.sum(0) + counts.sum(1)
    errors = used - 2 * np.diag(counts)
    shown = np.sort(np.lexsort((-used, -errors))[:_CLASSES])
    shown = shown[used[shown] > 0]
    caption = "Rows: the true class; columns: the predicted one. Click on a cell for its images."
    if len(shown) < np.count_nonzero(used):
        caption += f" These are the {len(shown)} classes with the most errors."
    in_figures = sorted({int(label) for label in rows[worst, :2].ravel() if label >= 0})
    options = "".join(f'<option value="{n}">{escape(names[n])}</option>' for n in in_figures)
    page = Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    return page.substitute(
        title=f"{100 * is_correct.mean():.2f} % of {len(rows)} images are correct",
        matrix_caption=caption,
        matrix=_matrix(counts, shown.tolist(), names),
        images_caption=images_caption,
        options=options,
        figures="\n".join(_figure(row, data, names) for row in rows[worst]),
    )


def _matrix(counts: Counts, labels: Sequence[int], names: Sequence[str]) -> str:
    """A table, shaded by the share of a row's images: green is correct, red is wrong."""
    head = "".join(f"<th>{escape(names[label])}</th>" for label in labels)
    lines = [f"<table><thead><tr><th></th>{head}</tr></thead>"]
    for true in labels:
        cells, images = "", max(1, int(counts[true].sum()))
        for predicted in labels:
            count = int(counts[true, predicted])
            if not count:
                cells += "<td></td>"
                continue
            colour = "27 120 55" if true == predicted else "178 24 43"
            style = f"background: rgb({colour} / {0.1 + 0.5 * count / images:.2f})"
            place = f'data-true="{true}" data-predicted="{predicted}"'
            cells += f'<td {place} style="{style}">{count}</td>'
        lines.append(f"<tr><th>{escape(names[true])}</th>{cells}</tr>")
    return "\n".join([*lines, "</table>"])


def _figure(row: Rows, data: Data, names: Sequence[str]) -> str:
    """The image, its predicted and its true class with their probabilities, and a link to its file
    if it has one.
    """
    label, predicted, probability, of_label, loss, _, index = row
    kind = "right" if label == predicted else "wrong"
    lines = f'<div class="{kind}">predicted: {escape(names[int(predicted)])}'
    lines += f" {100 * probability:.1f} %</div>"
    true = f"{escape(names[int(label)])} {100 * of_label:.1f} %" if label >= 0 else "no label"
    lines += f"<div>true: {true}</div><div>loss {loss:.3f}</div>"
    classes = f'data-true="{label:.0f}" data-predicted="{predicted:.0f}"'
    if index < 0:
        return f"<figure {classes}>{lines}</figure>"

    assert isinstance(data, ImageData)
    name, buffer = data.validation_name(int(index)), io.BytesIO()
    picture = Image.fromarray(data.validation_pixels(int(index)))
    picture.thumbnail((_THUMBNAIL_PX, _THUMBNAIL_PX))
    picture.save(buffer, "JPEG", quality=85)
    image = f'<img src="data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}">'
    file, end_of_path = Path(name), escape("/".join(Path(name).parts[-2:]))
    if file.is_file():
        end_of_path = f'<a href="{escape(file.absolute().as_uri())}">{end_of_path}</a>'
    lines += f"<div>{end_of_path}</div>"
    return f'<figure {classes} title="{escape(name)}">{image}{lines}</figure>'
