"""Classify a folder of images with saved weights: an evaluation whose results are a table of its
predictions.

    cl-train predict weights=outputs/RUN data.root=photos out=predictions.csv    the best checkpoint
    cl-train predict weights=resnet50.safetensors data.root=D out=out.csv     D/val, or all below D
    cl-train predict model=resnet50 weights=DEFAULT data.root=photos out=predictions.csv
    cl-train predict weights=outputs/RUN entry=average data.root=D out=out.csv    the EMA

Weights saved by cl_train carry what is needed: model, classes, preprocessing, layout. A line has
the file of an image below data.root, its label if the folder of the image is named like a class,
and the five most probable classes, or the `error` of a damaged one. Exit codes: 0 written; 1 no
image can be read, or outputs are not finite; 2 wrong usage or unreadable weights.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cl_train.config import schema
from cl_train.config.arguments import settings_from_arguments
from cl_train.config.fields import Range
from cl_train.config.schema import DataConfig, OnDevice, setting
from cl_train.config.validation import flatten, read_yaml
from cl_train.errors import ConfigError
from cl_train.system.files import output_file
from cl_train.system.run_folder import CONFIG
from cl_train.system.tables import counted, write_csv


@dataclass
class PredictSettings(OnDevice):
    """The weights, the images and the file to write."""

    weights: str = setting("", "run, file, or with model=NAME weights by name", required=True)
    root: str = setting("", "folder of images, or of val or test", required=True, key="data.root")
    csv: str | None = setting(None, "file with a column path, of the images below", key="data.csv")
    out: str = setting("", "file to write: a table as CSV", required=True)
    overwrite: bool = setting(False, schema.OVERWRITE_HELP)
    model: str | None = setting(None, f"null = the one that the weights name; {schema.MODEL_HELP}")
    entry: str | None = setting(None, "entry of a checkpoint that holds the weights: average = EMA")
    image_size: int | None = setting(
        None, "pixels, if weights record none", Range(8), key="data.image_size"
    )
    extensions: list[str] = setting(
        [],
        "extensions of image files; empty = those of the run",
        choices=tuple(schema.IMAGE_FORMATS),
        key="data.extensions",
    )
    batch_size: int = setting(64, "images per batch", Range(1))
    precision: str | None = setting(None, "null = as the run, or auto", choices=schema.PRECISIONS)
    channels_last: bool | None = setting(None, "memory format; null = the recorded one")
    evaluate_flip: bool = setting(False, "average the logits of each image and of its mirror image")
    workers: int | None = setting(None, "processes; null = cores", Range(0), key="data.workers")
    exif: str = setting(
        "apply", "orientation in EXIF", choices=("apply", "ignore"), key="data.exif"
    )
    on_bad_image: str = setting(
        "skip", "skip = leave damaged out", choices=("error", "skip"), key="data.on_bad_image"
    )


USAGE = "weights=RUN|FILE data.root=FOLDER out=FILE.csv [key=value ...]"
SETTINGS = {"settings": PredictSettings}


def main(words: list[str]) -> int:
    settings = settings_from_arguments(PredictSettings, words)
    from cl_train.training.console import describe_failure

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
    """Writes the table; returns the number of images, the accuracy, and what was left out."""
    import torch

    from cl_train.data.build import images_of_folder
    from cl_train.data.device import DeviceFormat
    from cl_train.data.loader_report import first_reasons
    from cl_train.errors import BadImageError
    from cl_train.models.load import load_saved
    from cl_train.step.precision import kernel_selection, resolve_precision
    from cl_train.system.distributed import Dist, choose_device
    from cl_train.system.machine import keep_freed_memory
    from cl_train.training.evaluation import outputs

    formats = {True: torch.channels_last, False: torch.contiguous_format, None: None}
    model, saved, memory_format = load_saved(
        settings.model or settings.weights,
        # Weights of that model; else the file or run names its own.
        weights=settings.weights if settings.model else None,
        entry=settings.entry,
        memory_format=formats[settings.channels_last],
    )
    card = saved.card
    print(f"weights: {saved.file or settings.weights}")
    device = choose_device(settings.device)
    keep_freed_memory(device)
    named = settings.precision or card.precision or "auto"
    precision = resolve_precision(named, device).for_fp32_weights
    cfg = _data_settings(settings, card)
    data = images_of_folder(cfg, card.classes, settings.batch_size, Dist(0, 1, device))
    batches = data.validation(DeviceFormat(device, precision.input_dtype, memory_format))
    flip = settings.evaluate_flip
    logits_and_labels = outputs(model.to(device), batches, precision, flip=flip)
    with kernel_selection(tf32=precision.tf32, autotune=False):
        rows, outputs_count = _rows(logits_and_labels, card.classes, data.val_images)
    bad = data.bad_images.reasons
    if not rows:
        raise BadImageError(f"none of the {len(bad)} images could be decoded: {first_reasons(bad)}")
    files = [data.validation_name(index) for index in data.validation_indices()]
    table = [{"file": name, **row} for name, row in zip(files, rows, strict=True)]
    table += [{"file": name, "error": reason} for name, reason in bad.items()]
    for row in table:  # the table stays true where the folder is moved
        if Path(row["file"]).is_relative_to(settings.root):
            row["file"] = str(Path(row["file"]).relative_to(settings.root))
    write_csv(file, table, [*table[0], "error"])
    data.close()

    summary = [counted(len(rows), "image")]
    correct = [row["label"] == row["class1"] for row in rows if row["label"]]
    if correct:
        share_pct = 100 * sum(correct) / len(correct)
        summary[0] += f", {share_pct:.3f} % of {len(correct)} with a label are correct"
        if _is_data_of_run(settings):
            summary.append("the run was trained on images of this folder, so new ones may do worse")
    if bad:
        summary.append(f"{len(bad)} left out: {first_reasons(bad)}")
    if card.preprocessing and card.preprocessing.exif not in (None, settings.exif):
        summary.append(f"the run had data.exif={card.preprocessing.exif}")
    if 0 < len(card.classes) < outputs_count:
        summary.append(f"the weights name {len(card.classes)} classes of {outputs_count} outputs")
    return "; ".join([*summary, *data.notes])


def _is_data_of_run(settings: PredictSettings) -> bool:
    """Whether the run that `weights` names took its training images from this folder."""
    from cl_train.models.files import weights_path

    file = weights_path(settings.weights)
    config = file.parent.parent / CONFIG if file else Path()
    if not config.is_file():
        return False
    of_run = dict(flatten(read_yaml(config)))
    root = Path(str(of_run["data.root"])).resolve()
    return bool(of_run["data.val_fraction"]) and root == Path(settings.root).resolve()


def _data_settings(settings: PredictSettings, card: Any) -> DataConfig:
    from cl_train.data.images import EXTENSIONS
    from cl_train.models.card import Preprocessing

    preprocessing = card.preprocessing
    if preprocessing is None:
        if settings.image_size is None:
            what = f"weights={settings.weights} record no preprocessing"
            raise ConfigError(f"{what}: data.image_size=224 is ImageNet's")
        preprocessing = Preprocessing.of(DataConfig(image_size=settings.image_size))
    return DataConfig(
        name="folder",
        root=settings.root,
        csv=settings.csv,
        workers=settings.workers,
        on_bad_image=settings.on_bad_image,
        extensions=settings.extensions or list(card.extensions or EXTENSIONS),
        **preprocessing.settings() | {"exif": settings.exif},
    )


def _rows(
    logits_and_labels: Iterable[Any], classes: Sequence[str], images: int
) -> tuple[list[dict[str, str]], int]:
    """Returns label, best classes and their probabilities of each image, and the number of outputs;
    those without a class are named by their numbers.

    Raises ConfigError: there are more classes than outputs.
    """
    from cl_train.step.train_step import labels_and_top5
    from cl_train.training.console import progress_bar
    from cl_train.training.evaluation import check_evaluation

    rows: list[dict[str, str]] = []
    count = 0
    with progress_bar("images", images, shown=True) as bar:
        for logits, targets in logits_and_labels:
            count = logits.shape[1]
            if len(classes) > count:
                what = f"the weights name {len(classes)} classes, and the model has {count} outputs"
                raise ConfigError(f"{what}: the names are those of another model")
            names = [*classes, *map(str, range(len(classes), count))]
            labels, best = labels_and_top5(logits, targets)
            shares = logits.softmax(1).gather(1, best)
            check_evaluation(float(shares.sum()))
            for label, *outcome in zip(
                labels.tolist(), best.tolist(), shares.tolist(), strict=True
            ):
                row = {"label": names[label] if label >= 0 else ""}
                for rank, (number, share) in enumerate(zip(*outcome, strict=True), start=1):
                    row |= {f"class{rank}": names[number], f"probability{rank}": f"{share:.6f}"}
                rows.append(row)
            bar.update(len(labels))
    return rows, count
