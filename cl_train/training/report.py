"""`report=true`: what an evaluation got wrong, as tables and as a page that needs no network."""

import base64
import io
import json
import logging
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from cl_train.data.build import Data, ImageData
from cl_train.data.decode import BadImage
from cl_train.errors import ConfigError
from cl_train.system.distributed import Dist, gather_objects
from cl_train.system.files import refuse_link, write_text
from cl_train.system.run_folder import finite_or_null
from cl_train.system.tables import write_csv

log = logging.getLogger(__name__)

_IMAGES, _CLASSES, _THUMBNAIL_PX = 100, 20, 160
Rows = npt.NDArray[np.float64]  # evaluation.COLUMNS and the image's index, or -1
Counts = npt.NDArray[np.int64]  # of images [true class, predicted class]


def write_report(
    predicted: torch.Tensor, data: Data, dist: Dist, run_folder: Path, about: str
) -> None:
    """Writes `report/` in the run folder on rank 0, which warns if it cannot. about: the model, its
    weights and the images, for the header of the page.
    """
    indices = data.validation_indices()
    if len(indices) != len(predicted):  # of an IterableDataset, or a file became unreadable
        indices = [-1] * len(predicted)
    rows = np.concatenate(gather_objects(np.column_stack((predicted.cpu().numpy(), indices)), dist))
    if not dist.is_main:
        return

    # A model may have more outputs than there are classes.
    outputs = max(len(data.classes), int(rows[:, 1].max(initial=0)) + 1)
    names = [*data.classes, *(f"output {n}" for n in range(len(data.classes), outputs))]
    counts = np.zeros((outputs, outputs), np.int64)
    np.add.at(counts, tuple(rows[:, :2].astype(int).T), 1)
    folder, classes = run_folder / "report", per_class(rows, counts, names)
    about += f"; evaluated {datetime.now().astimezone().isoformat(' ', 'minutes')}"
    page = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    try:
        refuse_link(folder).mkdir(exist_ok=True)
        write_csv(folder / "per_class.csv", classes, ["class"])
        header = ["true", "predicted", "images"]
        write_csv(folder / "confusions.csv", confusions(counts, names), header)
        shown = {"about": about, "table": classes, **page_data(rows, counts, data, names)}
        content = json.dumps(finite_or_null(shown))
        write_text(folder / "index.html", page.replace("DATA", content.replace("<", r"\u003c")))
    except (OSError, BadImage, ConfigError) as error:
        log.warning("the evaluation's report cannot be written: %s", error)
        return
    log.info("report: %s", folder / "index.html")


def per_class(rows: Rows, counts: Counts, names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns a row per class: recall (`top1`) and precision, percent, and mean loss; the lowest
    recall first.
    """
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
    wrong = counts - np.diag(np.diag(counts))
    table = [
        {"true": names[i], "predicted": names[j], "images": int(wrong[i, j])}
        for i, j in np.argwhere(wrong).tolist()
    ]
    return sorted(table, key=lambda row: -row["images"])


def page_data(rows: Rows, counts: Counts, data: Data, names: Sequence[str]) -> dict[str, Any]:
    """Returns what `report.html` shows: the classes with the most errors, wrong images by loss."""
    is_correct = rows[:, 0] == rows[:, 1]
    # Wrong images first, then the highest loss; NaN counts as the highest.
    worst = np.lexsort((-np.nan_to_num(rows[:, 4], nan=np.inf), is_correct))[:_IMAGES]
    used = counts.sum(0) + counts.sum(1)
    recalls = (np.diag(counts) / counts.sum(1).clip(1))[counts.sum(1) > 0]
    errors = used - 2 * np.diag(counts)
    shown = np.sort(np.lexsort((-used, -errors))[:_CLASSES])
    shown = shown[used[shown] > 0]
    return {
        "classes": names,
        "images": len(rows),
        "wrong": int((~is_correct).sum()),
        "top1": 100 * float(is_correct.mean()),
        "balanced_accuracy": 100 * float(recalls.mean()),
        "used": int(np.count_nonzero(used)),
        "shown": shown.tolist(),
        "counts": counts[np.ix_(shown, shown)].tolist(),
        "totals": counts.sum(1)[shown].tolist(),
        "figures": [_figure(row, data) for row in rows[worst]],
    }


def _figure(row: Rows, data: Data) -> dict[str, Any]:
    label, predicted, probability, of_label, loss, _, index = row.tolist()
    figure = {"true": int(label), "predicted": int(predicted), "loss": loss}
    figure |= {"probability": probability, "probability_of_label": of_label}
    if index < 0:
        return figure

    assert isinstance(data, ImageData)
    picture, buffer = Image.fromarray(data.validation_pixels(int(index))), io.BytesIO()
    picture.thumbnail((_THUMBNAIL_PX, _THUMBNAIL_PX))
    picture.save(buffer, "JPEG", quality=85)
    name = data.validation_name(int(index))
    url = Path(name).absolute().as_uri() if Path(name).is_file() else None
    return figure | {"name": name, "url": url, "jpeg": base64.b64encode(buffer.getvalue()).decode()}
