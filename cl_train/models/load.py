"""Load a saved model: from a file, the checkpoint of a run, or the zoo."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cl_train.errors import ConfigError
from cl_train.memory_format.convert import convert
from cl_train.memory_format.layout import MEMORY_FORMATS
from cl_train.models import sources as models
from cl_train.models.card import ModelCard, Preprocessing
from cl_train.models.files import SavedModel, read_weights, weights_path
from cl_train.system.torch_state import own_torch_state


@own_torch_state
def load_model(
    file_or_run: str | Path,
    model: str | None = None,
    *,
    entry: str | None = None,
    trust: bool = False,
) -> tuple[nn.Module, Preprocessing | None, tuple[str, ...]]:
    """Load the model of a file or run folder, its preprocessing and the names of its classes.

    Args:
        file_or_run: a file of weights, a program, or a run folder, whose best checkpoint is read,
            or else its newest.
        model: the name of the model that the weights belong to; needed if the file has none, or
            names a function `package.module:function`: a file may not choose the code that runs.
        entry: the entry of a checkpoint that holds the weights; "average" is the EMA of a run.
        trust: load a TorchScript or exported program, which runs its code.

    Returns:
        The model in eval mode, fp32, on the CPU, in its recorded memory format (contiguous if that
        is unknown or mixed); its preprocessing, a function from a PIL image or uint8 [H, W, 3] to
        float32 [3, H, W], or None; and its classes, or ().

    Raises:
        ConfigError: `read_weights` refuses the file, or it has weights without a model.
    """
    if not isinstance(file_or_run, str | Path):
        raise ConfigError(f"load_model({file_or_run!r}): give a file or a run folder")
    if not isinstance(model, str | None):
        what = f"is a name, such as resnet50 or my_net:build, not a {type(model).__name__}"
        raise ConfigError(f"load_model: model {what}; it is built here, with the file's classes")
    loaded, saved, _ = load_saved(file_or_run, model=model, entry=entry, trust=trust)
    return loaded, saved.card.preprocessing, saved.card.classes


def load_saved(
    source: str | Path, *, memory_format: torch.memory_format | None = None, **reading: Any
) -> tuple[nn.Module, SavedModel, torch.memory_format]:
    """Loads a model from a file or run, or a zoo's with `weights`. memory_format=None: as recorded.

    Returns the model, what was read, and the model's memory format.
    """
    saved = read_saved(source, **reading)
    model = runnable(saved, saved.card.image_size)
    if model is None:
        raise ConfigError(f"{source}: {needed_model(saved)}")
    if memory_format is None:
        memory_format = MEMORY_FORMATS.get(str(saved.card.memory_format), torch.contiguous_format)
    convert(model, memory_format=memory_format)
    return model, saved, memory_format


def read_saved(
    source: str | Path, model: str | None = None, weights: str | None = None, **reading: Any
) -> SavedModel:
    """Reads a file, the checkpoint of a run folder, or `weights` of the model `source`."""
    path, name = weights_path(weights or source), str(source)
    if weights is not None and path is None:
        models.check_model(name, weights)
        num_classes, classes = models.zoo_classes(name, weights)
        state = models.build_model(name, num_classes=num_classes, weights=weights).state_dict()
        preprocessing = models.published_preprocessing(name, weights)
        card = ModelCard(model=name, classes=classes, preprocessing=preprocessing)
        return SavedModel("zoo", state, card)
    if path is None and (":" in name or name.startswith("timm/") or name in models.model_names()):
        raise ConfigError(f"{name} is a model: add weights=DEFAULT, another name, or a file")
    saved = read_weights(path or Path(source), **reading)
    recorded = saved.card.model or ""
    if ":" in recorded:  # a file may not choose the code that runs
        saved, recorded = replace(saved, code=recorded), ""
    return saved.with_card(model=model or (name if weights is not None else recorded) or None)


def needed_model(saved: SavedModel) -> str:
    """Returns why a file alone gives no model that can run, and what to add."""
    if saved.code is None:
        return "these are weights without a model: give model=NAME"
    what = f"its model is your code, {saved.code}, and no file may choose the code that runs"
    return f"{what}: give model={saved.code}"


def runnable(saved: SavedModel, image_size: int | None) -> nn.Module | None:
    """Returns the model of a file, in eval mode; None if only its weights are known."""
    if saved.program is not None:
        return saved.program.module() if saved.kind == "exported program" else saved.program.eval()
    if saved.card.model is None:
        return None
    build = partial(models.build_model, saved.card.model, image_size=image_size)
    model = build(num_classes=len(saved.card.classes) or 1000)
    other = [saved.tensors[key] for key in saved.names_of_other_shape(model)]
    # They are the classifier's; their first dimension is the number of classes.
    if other and other[0].dim() > 0:
        model = build(num_classes=len(other[0]))
    models.load_weights(model, saved, f"model={saved.card.model} does not fit the file")
    return model.eval()
