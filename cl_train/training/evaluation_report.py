"""`report=true`: accuracy per class, confusions, and a page with the worst images of an evaluation."""

import base64
import csv
import io
import logging
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from cl_train.data.build import Data, ImageData
from cl_train.data.decode import BadImage, Pixels
from cl_train.system.distributed import Dist, gather_objects
from cl_train.system.files import write_text

log = logging.getLogger(__name__)

WORST_IMAGES = 50
THUMBNAIL_PX = 160
_LISTED = 20  # classes and confusions on the page
_STYLE = """
body { font: 15px/1.4 sans-serif; margin: 2em; color: #222 } h2 { margin-top: 1.5em }
table { border-collapse: collapse; display: inline-table; margin: 0 3em 1em 0; vertical-align: top }
td, th { padding: .15em .8em; text-align: left; border-bottom: 1px solid #ddd }
.images { display: flex; flex-wrap: wrap; gap: 14px }
figure { margin: 0; width: 160px; font-size: 13px; overflow-wrap: anywhere }
img, .none { width: 160px; height: 160px; background: #eee; display: block }
.wrong { color: #b3261e } .true { color: #1b6e3c } .name { color: #777; font-size: 11px }
"""


def write_report(predictions: torch.Tensor, data: Data, dist: Dist, folder: Path) -> None:
    """Gather the predictions (see `evaluation.predictions`) of all ranks; the host waits for the device.

    Rank 0 writes `per_class.csv`, `confusions.csv` and `worst.html`.

    A report that cannot be written is left out with a warning, because it must not end a training run.
    """
    own = predictions.cpu().numpy()
    indices = data.validation_indices()
    if len(indices) != len(own):  # an IterableDataset, or a file that became unreadable during the run
        indices = [-1] * len(own)
    ranks = gather_objects((own, indices), dist)
    if not dist.is_main:
        return
    rows = np.concatenate([of_rank for of_rank, _ in ranks])
    images = [index for _, of_rank in ranks for index in of_rank]
    outputs = int(rows[:, 1].max(initial=0)) + 1  # a model may have more outputs than the data has classes
    names = [*data.classes, *(f"output {label}" for label in range(len(data.classes), outputs))]
    classes, confused = per_class(rows, names), confusions(rows, names)
    try:
        folder.mkdir(exist_ok=True)
        _write_csv(folder / "per_class.csv", classes)
        _write_csv(folder / "confusions.csv", confused)
        worst = np.argsort(rows[:, 3])[::-1][:WORST_IMAGES]  # NaN losses come first
        figures = [_figure(rows[i], images[i], data, names) for i in worst]
        accuracy = f"{100 * (rows[:, 0] == rows[:, 1]).mean():.2f} % of {len(rows)} images are correct"
        write_text(folder / "worst.html", _page(accuracy, [classes, confused], figures))
    except (OSError, BadImage) as error:
        log.warning("the evaluation's report cannot be written: %s", error)
        return
    lowest = ", ".join(f"{row['class']} {row['top1']:.1f} %" for row in classes[:3])
    frequent = ", ".join(f"{row['true']} as {row['predicted']} {row['images']} times" for row in confused[:3]) or "none"
    log.info("report: lowest accuracy: %s; confusions: %s; %s", lowest, frequent, folder / "worst.html")


def per_class(rows: npt.NDArray[np.float64], names: Sequence[str]) -> list[dict[str, Any]]:
    """One row per class with images, the lowest accuracy first. Accuracy in percent; `loss` is the mean."""
    table = []
    for label in np.unique(rows[:, 0]).astype(int):
        of_class = rows[rows[:, 0] == label]
        correct, predicted = int((of_class[:, 1] == label).sum()), int((rows[:, 1] == label).sum())
        table.append(
            {
                "class": names[label],
                "images": len(of_class),
                "correct": correct,
                "top1": 100 * correct / len(of_class),
                "precision": 100 * correct / predicted if predicted else None,
                "loss": float(of_class[:, 3].mean()),
            }
        )
    return sorted(table, key=lambda row: row["top1"])


def confusions(rows: npt.NDArray[np.float64], names: Sequence[str]) -> list[dict[str, Any]]:
    """The cells of the confusion matrix that are not zero, without the diagonal; the most frequent first."""
    pairs = Counter((int(true), int(predicted)) for true, predicted in rows[:, :2] if true != predicted)
    return [
        {"true": names[true], "predicted": names[predicted], "images": count}
        for (true, predicted), count in sorted(pairs.items(), key=lambda item: (-item[1], item[0]))
    ]


def _write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else ["true", "predicted", "images"])
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def _page(title: str, tables: Sequence[Sequence[dict[str, Any]]], figures: Sequence[str]) -> str:
    """A page without references to other files."""
    return (
        f'<!doctype html><meta charset="utf-8"><title>Evaluation</title><style>{_STYLE}</style><h1>{title}</h1>'
        f"<h2>Lowest accuracy, most frequent confusions</h2>{''.join(map(_table, tables))}"
        f"<h2>The {len(figures)} images with the largest loss, as the model sees them</h2>"
        '<p><span class="wrong">predicted class</span>, <span class="true">true class</span>, their probabilities</p>'
        f'<div class="images">{"".join(figures)}</div>\n'
    )


def _table(rows: Sequence[dict[str, Any]]) -> str:
    def cell(value: Any) -> str:
        return f"{value:.2f}" if isinstance(value, float) else "-" if value is None else escape(str(value))

    head = "".join(f"<th>{name}" for name in rows[0]) if rows else ""
    body = "".join("<tr>" + "".join(f"<td>{cell(value)}" for value in row.values()) for row in rows[:_LISTED])
    return f"<table><tr>{head}{body}</table>"


def _figure(row: npt.NDArray[np.float64], index: int, data: Data, names: Sequence[str]) -> str:
    label, predicted, probability, loss = row[:4]
    classes = [("wrong", predicted, probability)] if label != predicted else []
    lines = "".join(
        f'<div class="{style}">{escape(names[int(number)])} {100 * share:.1f} %</div>'
        for style, number, share in [*classes, ("true", label, np.exp(-loss))]
    )
    name, image = "", '<div class="none"></div>'
    if index >= 0:
        assert isinstance(data, ImageData)
        name, image = data.validation_name(index), _thumbnail(data.validation_pixels(index))
    short = escape("/".join(Path(name).parts[-2:]))
    return f'<figure title="{escape(name)}">{image}{lines}loss {loss:.3f}<div class="name">{short}</div></figure>'


def _thumbnail(pixels: Pixels) -> str:
    buffer = io.BytesIO()
    picture = Image.fromarray(pixels)
    picture.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX))
    picture.save(buffer, "JPEG", quality=85)
    return f'<img src="data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}">'
