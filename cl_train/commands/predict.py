"""Classify a folder of images with saved weights: an evaluation whose results are a table of its predictions.

    cl-train predict weights=outputs/RUN data.root=photos out=predictions.csv          the best checkpoint of a run
    cl-train predict weights=resnet50.safetensors data.root=D out=predictions.csv      D/val, or all images below D
    cl-train predict model=resnet50 weights=DEFAULT data.root=photos out=predictions.csv

Weights saved by cl_train carry what is needed: model, classes, preprocessing, layout. A line has the file of an image,
its label if the folder that it is in is named like a class, and the five most probable classes.
Exit codes: 0 written; 1 an image cannot be read, or outputs are not finite; 2 wrong usage or unreadable weights.
"""

import csv
import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from cl_train.config.schema import DEVICES, MODEL_HELP, PRECISIONS, ConfigError, DataConfig, setting
from cl_train.config.validation import settings_from_arguments
from cl_train.system.files import output_file


@dataclass
class PredictSettings:
    """The weights, the images and the file to write."""

    weights: str = setting("", "run folder, file of weights, or with model=NAME weights by name", required=True)
    root: str = setting("", "folder of images; its folder val or test, if it has one", required=True, key="data.root")
    out: str = setting("", "file to write: a table as CSV", required=True)
    overwrite: bool = setting(False, "replace an existing file")
    model: str | None = setting(None, f"null = the one that the weights name; {MODEL_HELP}")
    image_size: int | None = setting(None, "pixels, if weights record none", minimum=8, key="data.image_size")
    batch_size: int = setting(64, "images per batch", minimum=1)
    device: str = setting("auto", "cuda if available, else cpu", choices=DEVICES)
    precision: str | None = setting(None, "null = that of the run, or auto", choices=PRECISIONS)
    channels_last: bool | None = setting(None, "memory format of the model and its input; null = the recorded one")
    evaluate_flip: bool = setting(False, "average the logits of each image and of its mirror image")
    workers: int | None = setting(None, "loader processes; null = the cores, at most 16", minimum=0, key="data.workers")
    on_bad_image: str = setting("error", "skip = leave damaged out", choices=("error", "skip"), key="data.on_bad_image")


USAGE = "weights=RUN|FILE data.root=FOLDER out=FILE.csv [key=value ...]"
SETTINGS = {"settings": PredictSettings}


def main(words: list[str]) -> int:
    settings = settings_from_arguments(PredictSettings, words)
    from cl_train.training.records import describe_failure

    try:
        with output_file(Path(settings.out), overwrite=settings.overwrite) as file:
            summary = predict(settings, file)
    except RuntimeError as error:
        if (reason := describe_failure(error)) is None:
            raise
        print(f"failed: {reason}", file=sys.stderr)
        return 1
    print(f"{summary}; written: {settings.out}")
    return 0


def predict(settings: PredictSettings, file: Path) -> str:
    """Write the table. Returns the number of images, the accuracy of those with labels, and what was left out."""
    import torch

    from cl_train.data.build import images_of_folder
    from cl_train.data.device import DeviceFormat
    from cl_train.data.loader import BadImageError, first_reasons
    from cl_train.models.convert_file import load_saved
    from cl_train.models.files import Preprocessing
    from cl_train.step.precision import kernel_selection, resolve_precision
    from cl_train.step.train_step import labels_and_top5
    from cl_train.system.distributed import Dist, choose_device
    from cl_train.system.machine import keep_freed_memory
    from cl_train.training.evaluation import check_evaluation, outputs
    from cl_train.training.records import progress_bar

    weights = settings.weights if settings.model else None  # of that model; else a file or run that names its own
    asked = {None: None, True: torch.channels_last, False: torch.contiguous_format}[settings.channels_last]
    model, card, memory_format = load_saved(settings.model or settings.weights, weights=weights, memory_format=asked)
    if card.preprocessing is None and settings.image_size is None:
        raise ConfigError(f"weights={settings.weights} record no preprocessing: data.image_size=224 is ImageNet's")
    preprocessing = card.preprocessing or Preprocessing.of(DataConfig(image_size=settings.image_size or 224))
    device = choose_device(settings.device)
    keep_freed_memory(device)
    precision = resolve_precision(settings.precision or card.precision or "auto", device).for_fp32_weights
    given = {name: getattr(settings, name) for name in ("root", "workers", "on_bad_image")}
    cfg = DataConfig(name="folder", **given, **preprocessing.settings())
    data = images_of_folder(cfg, card.classes, settings.batch_size, Dist(0, 1, device))
    form = DeviceFormat(device, precision.input_dtype, memory_format)
    rows: list[Any] = []
    bar = progress_bar("images", data.val_images, shown=True)
    with kernel_selection(tf32=precision.tf32, autotune=False), bar:
        for logits, targets in outputs(model.to(device), data.validation(form), precision, flip=settings.evaluate_flip):
            labels, best = labels_and_top5(logits, targets)
            shares = logits.softmax(1).gather(1, best)
            check_evaluation(float(shares.sum()))
            rows += zip(labels.tolist(), best.tolist(), shares.tolist(), strict=True)
            bar.update(len(labels))
    bad = data.bad_images.reasons
    if not rows:
        raise BadImageError(f"none of the {len(bad)} images could be decoded: {first_reasons(bad)}")
    names = [*card.classes, *map(str, range(len(card.classes), logits.shape[1]))]
    with file.open("w", newline="", encoding="utf-8", errors="surrogateescape") as opened:
        writer = csv.writer(opened)
        top = range(1, len(best[0]) + 1)
        writer.writerow(["file", "label", *(f"{what}{rank}" for rank in top for what in ("class", "probability"))])
        for index, (label, classes, probabilities) in zip(data.validation_indices(), rows, strict=True):
            found = [[names[number], f"{share:.6f}"] for number, share in zip(classes, probabilities, strict=True)]
            writer.writerow([data.validation_name(index), names[label] if label >= 0 else "", *chain(*found)])
    data.close()
    correct = [label == classes[0] for label, classes, _ in rows if label >= 0]
    share = f", {100 * sum(correct) / len(correct):.3f} % of {len(correct)} with a label are correct" if correct else ""
    return f"{len(rows)} images{share}" + (f"; {len(bad)} left out: {first_reasons(bad)}" if bad else "")
