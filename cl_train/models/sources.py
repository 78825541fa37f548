"""Models by name: torchvision's classification zoo, timm's, or the user's own function; their
weights, and the preprocessing that these were published with. Copies of a model.
"""

import copy
import inspect
import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn

from cl_train.config.schema import DataConfig
from cl_train.config.validation import optional_module, show, suggest, user_function
from cl_train.data.class_names import matched
from cl_train.errors import ConfigError
from cl_train.memory_format.layout import refuse_lazy, uncompiled
from cl_train.models.card import Preprocessing
from cl_train.models.files import SavedModel, load_state, read_weights, weights_path
from cl_train.system.failures import explain_failure

log = logging.getLogger(__name__)

_NETWORK = ("httpx", "huggingface_hub", "requests")  # modules of errors that are no OSError
# Settings of `data` that belong together.
_TOGETHER = (("image_size", "val_size", "val_resize"), ("val_interpolation",), ("mean", "std"))


def model_names() -> list[str]:
    return torchvision.models.list_models(module=torchvision.models)


def video_model_names() -> list[str]:
    """Returns all models of torchvision for video; some accept one size only."""
    return torchvision.models.list_models(module=torchvision.models.video)


def timm_model_names() -> list[str]:
    """Returns all models of timm, which must be installed, as `timm/<name>`."""
    return [f"timm/{name}" for name in optional_module("timm", "timm/").list_models()]


def usual_image_size(name: str) -> int:
    """Returns height and width in pixels that a model was designed for."""
    return 299 if name == "inception_v3" else 224


def check_model(name: str, weights: str | None = None) -> None:
    """Raises ConfigError: unknown model or weights, with the nearest known names."""
    if ":" in name:
        user_function("model", name)
    elif name.startswith("timm/"):
        timm = optional_module("timm", f"model={name}")
        if not timm.is_model(name.removeprefix("timm/").split(".")[0]):
            near = suggest(name, timm_model_names())
            raise ConfigError(f"model={name}: timm has no such model{near}")
    elif name not in (*model_names(), *video_model_names()):
        own = ":".join(name.rsplit(".", 1)) if "." in name else "package.module:function"
        others = f"timm's are model=timm/<name>, your own model={own}"
        near = suggest(name, model_names())
        raise ConfigError(f"model={name}: torchvision has no such model{near} ({others})")
    if path := weights and weights_path(weights):
        if not path.is_file():
            raise ConfigError(f"weights={weights}: no such file or folder")
    elif weights and ":" in name:
        raise ConfigError(f"weights={weights}: your own model has no named weights; give a file")
    elif weights and not name.startswith("timm/"):
        torchvision_weights(name, weights)


def build_model(
    name: str,
    *,
    num_classes: int,
    classes: Sequence[str] = (),
    weights: str | None = None,
    image_size: int | None = None,
    drop_path: float | None = None,
    keep_classifier: bool = False,
    entry: str | None = None,
) -> nn.Module:
    """Returns a model with `num_classes` outputs, fp32, contiguous, on the CPU, in training mode.

    drop_path: the rate of Huang et al. 2016. image_size: the pixels that vision transformers are
    built for. If the weights have another number of classes, the classifier is new, which
    `keep_classifier` refuses; it takes the rows of the `classes` that a file names. Raises
    ConfigError: a name is unknown, or the model cannot be built or take the weights.
    """
    check_model(name, weights)
    file = weights_path(weights) if weights is not None else None
    published = weights if file is None else None
    try:
        model = _built(name, num_classes, published, image_size, drop_path)
    except ConfigError:
        raise
    except Exception as error:  # of the user's own code, of an image size that cannot be divided
        is_network = isinstance(error, OSError) or type(error).__module__.startswith(_NETWORK)
        if published is not None and is_network:
            reason = str(error).partition("\n")[0] or type(error).__name__
            what = f"weights={published} of {name} cannot be loaded: {reason}"
            cache = "the cache of Hugging Face (HF_HOME)"
            if not name.startswith("timm/"):
                url = torchvision_weights(name, published).url
                cache = f"{Path(torch.hub.get_dir(), 'checkpoints', Path(url).name)} (TORCH_HOME)"
            advice = f"without a network copy the file to {cache}, or give weights=FILE"
            raise ConfigError(f"{what}; {advice}") from error
        what = f"model={name} cannot be built"
        what += f" with drop_path={drop_path}" if drop_path is not None else ""
        what += f" for images of {image_size} px" if image_size else ""
        raise ConfigError(f"{what}: {explain_failure(error)}") from error
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise ConfigError(f"model={name} returned a {kind}; it must return a torch.nn.Module")
    is_new = published is not None and num_classes != zoo_classes(name, published)[0]
    if file is not None:
        is_new = load_weights_file(model, file, entry, classes)
    if is_new and keep_classifier:
        what = f"another number of classes than the data ({num_classes})"
        raise ConfigError(f"weights={weights} have {what}")
    return model


def _built(
    name: str,
    num_classes: int,
    weights: str | None,
    image_size: int | None,
    drop_path: float | None,
) -> Any:
    is_own, is_timm = ":" in name, name.startswith("timm/")
    rate = "drop_path" if is_own else "drop_path_rate" if is_timm else "stochastic_depth_prob"
    options: dict[str, Any] = {} if drop_path is None else {rate: drop_path}
    if is_own:
        function = user_function("model", name)
        if _names_its_argument_otherwise(function, num_classes):
            return function(num_classes, **options)
        return function(num_classes=num_classes, **options)
    if weights is not None and not is_timm:
        published = torchvision_weights(name, weights)
        model = torchvision.models.get_model(name, weights=published, **options)
        replace_classifier(model, num_classes)
        return model
    options |= {"num_classes": num_classes, **_size_options(name, image_size)}
    if is_timm:
        timm = optional_module("timm", f"model={name}")
        own_name = name.removeprefix("timm/")
        return timm.create_model(own_name, pretrained=weights is not None, **options)
    if name in ("inception_v3", "googlenet"):  # torchvision warns without it
        options["init_weights"] = True
    return torchvision.models.get_model(name, **options)


def _names_its_argument_otherwise(function: Callable[..., Any], num_classes: int) -> bool:
    try:
        signature = inspect.signature(function)
        signature.bind_partial(num_classes)
    except (TypeError, ValueError):  # none, or a type written in C, which has no signature
        return False
    try:
        signature.bind_partial(num_classes=num_classes)
    except TypeError:
        return True
    return False


def _timm_facts(name: str) -> dict[str, Any]:
    timm = optional_module("timm", f"model={name}")
    recorded = timm.get_pretrained_cfg(name.removeprefix("timm/"), allow_unregistered=True)
    return recorded.to_dict() if recorded else {}


def _size_options(name: str, image_size: int | None) -> dict[str, int]:
    if image_size is None:
        return {}
    if not name.startswith("timm/"):
        return {"image_size": image_size} if name.startswith("vit_") else {}
    return {"img_size": image_size} if _timm_facts(name).get("fixed_input_size") else {}


def zoo_classes(name: str, weights: str) -> tuple[int, tuple[str, ...]]:
    """Returns the number of classes of a zoo's weights, and their names, which timm lacks."""
    if name.startswith("timm/"):
        return int(_timm_facts(name)["num_classes"]), ()
    names = torchvision_weights(name, weights).meta["categories"]
    return len(names), tuple(names)


def torchvision_weights(name: str, weights: str) -> Any:
    choices = torchvision.models.get_model_weights(name).__members__  # DEFAULT is one
    if weights not in choices:
        near, names = suggest(weights, choices), ", ".join(sorted(choices))
        what = f"not a file, nor weights of {name}{near}"
        raise ConfigError(f"weights={weights}: {what} (there are {names})")
    return choices[weights]


def replace_classifier(model: nn.Module, num_classes: int) -> None:
    for path, layer in _classifiers(model).items():
        if len(layer.weight) == num_classes:
            continue
        if isinstance(layer, nn.Linear):
            new: nn.Module = nn.Linear(layer.in_features, num_classes, bias=layer.bias is not None)
        else:
            new = nn.Conv2d(layer.in_channels, num_classes, kernel_size=1)
        model.set_submodule(path, new)
    if hasattr(model, "num_classes"):
        model.num_classes = num_classes  # type: ignore[assignment]


def _classifiers(model: nn.Module) -> dict[str, nn.Linear | nn.Conv2d]:
    """Returns the last Linear (SqueezeNet: 1x1 Conv2d) by path, then the auxiliary heads'."""
    last: dict[str, tuple[str, Any]] = {}  # by the auxiliary part of the model; "": the main part
    for path, module in model.named_modules():
        part = path.split(".")[0] if path.startswith(("AuxLogits.", "aux1.", "aux2.")) else ""
        is_pointwise = isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1)
        if isinstance(module, nn.Linear) or (is_pointwise and type(model).__name__ == "SqueezeNet"):
            last[part] = path, module
    return dict(last[part] for part in sorted(last))


def head_parameters(model: nn.Module) -> set[str]:
    layers = _classifiers(model).items()
    return {f"{path}.{name}".lstrip(".") for path, layer in layers for name in layer.state_dict()}


def classes_of(weights: str | None) -> tuple[str, ...]:
    """Returns the class names of a file or run; () if it has none, or `weights` is no file."""
    path = weights_path(weights) if weights else None
    return read_weights(path).card.classes if path else ()


def load_weights_file(
    model: nn.Module, path: Path, entry: str | None = None, classes: Sequence[str] = ()
) -> bool:
    """Loads a file of weights into `model`, which has `classes`; returns whether its classifier is
    new, but for the rows of the classes that the file names.
    """
    weights = read_weights(path, entry=entry)
    if weights.origin:
        log.info("weights=%s: %s", path, weights.origin)
    head, known = head_parameters(model), weights.card.classes
    places = matched(classes, known) if classes and known else [*range(len(known))]
    is_same = places == [*range(len(known))]
    new_head = set(weights.names_of_other_shape(model)) if is_same else head & weights.state.keys()
    if not new_head <= head:
        new_head = set()  # loading them fails
    load_weights(model, weights, f"weights={path} do not fit the model", without=new_head)
    if not is_same:
        _take_rows(model, weights, new_head, places)
    if new_head:
        taken = sum(place >= 0 for place in places)
        rows = "" if is_same else f", but for the rows of {taken} of {len(places)} classes"
        log.info("weights=%s: the classifier is new%s", path, rows)
    return bool(new_head)


def _take_rows(
    model: nn.Module, weights: SavedModel, head: Collection[str], places: Sequence[int]
) -> None:
    own, count = model.state_dict(), len(weights.card.classes)
    rows = [row for row, place in enumerate(places) if place >= 0]
    for name in head:
        saved = weights.state[name]
        if len(own[name]) == len(places) and len(saved) == count:
            own[name][rows] = saved[[places[row] for row in rows]]


def load_weights(
    model: nn.Module, weights: SavedModel, what: str, without: Collection[str] = frozenset()
) -> None:
    """Copies weights, but for `without`, into `model`. Raises ConfigError: "`what`: reason"."""
    missing, unexpected = load_state(model, weights.state, what, without)
    absent = sorted(set(missing) - set(without))
    if not absent and not unexpected:
        return
    longer = [name for name in unexpected if absent and name.endswith(f".{absent[0]}")]
    prefix = longer[0].removesuffix(absent[0]) if longer else "..."
    lacks = f"the file lacks {len(absent)} of its tensors ({', '.join(absent[:3])})"
    has = f"has {len(unexpected)} others ({', '.join(unexpected[:3])})"
    advice = f"cl-train convert FILE out=... entry=... prefix={prefix} selects them"
    raise ConfigError(f"{what}: {lacks} and {has}; {advice}")


# --- preprocessing --------------------------------------------------------------------------------


@cache  # an evaluation asks twice: to follow it, and to log it
def published_preprocessing(
    model: str, weights: str, entry: str | None = None
) -> Preprocessing | None:
    """Returns the preprocessing of torchvision's weights, of timm's at their test size, or of a
    file. None: unknown, or no centre crop after a resize of the short side.
    """
    if path := weights_path(weights):
        return read_weights(path, entry=entry).card.preprocessing if path.is_file() else None
    if not model.startswith("timm/"):
        published = torchvision_weights(model, weights).transforms()
        sizes = published.resize_size[0], published.crop_size[0]
        statistics = tuple(published.mean), tuple(published.std)
        return Preprocessing(*sizes, published.interpolation.value, *statistics)
    timm = optional_module("timm", f"model={model}")
    data = timm.data.resolve_data_config(pretrained_cfg=_timm_facts(model), use_test_size=True)
    _, size, width = data["input_size"]
    is_centre_crop = size == width and data["crop_mode"] == "center"
    if not is_centre_crop or data["interpolation"] not in ("bilinear", "bicubic"):
        return None
    resize = math.floor(size / data["crop_pct"])
    statistics = tuple(data["mean"]), tuple(data["std"])
    return Preprocessing(resize, size, data["interpolation"], *statistics)


def follow_published_preprocessing(
    data: DataConfig, model: str, weights: str, keys: Collection[str], entry: str | None = None
) -> DataConfig:
    """Returns `data` with the preprocessing of `weights`, if known; settings in `keys`, such as
    `data.image_size`, stay as they are, and so do those that belong to them.
    """
    published = published_preprocessing(model, weights, entry)
    settings = {**published.settings(), "val_size": None} if published else {}
    for names in _TOGETHER:
        if any(f"data.{name}" in keys for name in names):
            settings = {name: settings[name] for name in settings.keys() - {*names}}
    return replace(data, **settings)


def log_preprocessing(
    data: DataConfig,
    model: str,
    weights: str,
    entry: str | None = None,
    names: Collection[str] | None = None,
) -> None:
    """Warns if the settings of these `names` (None: all) are not those of the published weights."""
    published = published_preprocessing(model, weights, entry)
    used = Preprocessing.of(data).settings()
    settings = published.settings() if published else used
    checked = {name: settings[name] for name in (names or used) if name in settings}
    other = {name: value for name, value in checked.items() if value != used[name]}
    if other:
        shown = " ".join(f"data.{name}={show(value)}" for name, value in other.items())
        log.warning("weights=%s were published with other settings: %s", weights, shown)


# --- copies ---------------------------------------------------------------------------------------


def copy_model(model: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """Returns a deep, eager copy on `device` (None: each tensor stays where it is; "meta": shapes
    and strides only). A result kept as an attribute (`torch.nn.utils.weight_norm`'s weight), which
    `copy.deepcopy` refuses, is copied as a constant. Raises ConfigError: the model is lazy, or
    cannot be copied.
    """
    model = uncompiled(model)
    refuse_lazy(model)
    memo: dict[int, object] = {}
    try:
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):  # it copies itself, and has no "meta"
                continue
            tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
            for value in (*tensors, *vars(module).values()):
                if isinstance(value, torch.Tensor) and id(value) not in memo:
                    copied = value.detach().to(device or value.device, copy=True)
                    if isinstance(value, nn.Parameter):
                        copied = nn.Parameter(copied, False)
                    memo[id(value)] = copied.requires_grad_(value.requires_grad and value.is_leaf)
        with torch.no_grad():  # else a scripted module's parameters would have an autograd graph
            copied_model = copy.deepcopy(model, memo)
        for new, parameter in zip(copied_model.parameters(), model.parameters(), strict=True):
            new.requires_grad_(parameter.requires_grad)
        return copied_model if device in (None, "meta") else copied_model.to(device)
    except Exception as error:  # the attributes of a user's module may raise any exception
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise ConfigError(f"the model cannot be copied ({what})") from error


def dtype_of(model: nn.Module) -> torch.dtype:
    """Returns the dtype of the first floating-point parameter; float32 if there is none."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
