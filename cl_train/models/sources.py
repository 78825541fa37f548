"""Models by name: torchvision's classification zoo, timm's, or the user's own function; their weights, and the
preprocessing that these were published with. Copies of a model.
"""

import copy
import io
import logging
import math
import warnings
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn

from cl_train.config.schema import ConfigError, DataConfig
from cl_train.config.validation import optional_module, show, suggest, user_function
from cl_train.memory_format.layout import refuse_lazy
from cl_train.memory_format.model_call import explain_failure
from cl_train.models.files import Preprocessing, read_weights, weights_path

log = logging.getLogger(__name__)

_NETWORK = ("httpx", "huggingface_hub", "requests")  # modules of errors that are no OSError
_TOGETHER = (("image_size", "val_size", "val_resize"), ("val_interpolation",), ("mean", "std"))  # settings of `data`


def model_names() -> list[str]:
    """All classification models of torchvision."""
    return torchvision.models.list_models(module=torchvision.models)


def usual_image_size(name: str) -> int:
    """Height and width in pixels that a model was designed for."""
    return 299 if name == "inception_v3" else 224


def check_model(name: str, weights: str | None = None) -> None:
    """Raises ConfigError: unknown model or weights, with the nearest known names."""
    if ":" in name:
        user_function("model", name)
    elif name.startswith("timm/"):
        timm = optional_module("timm", f"model={name}")
        if not timm.is_model(name.removeprefix("timm/").split(".")[0]):
            near = suggest(name, [f"timm/{known}" for known in timm.list_models()])
            raise ConfigError(f"model={name}: timm has no such model{near}")
    elif name not in model_names():
        others = "timm's are model=timm/<name>, your own model=package.module:function"
        raise ConfigError(f"model={name}: torchvision has no such model{suggest(name, model_names())} ({others})")
    if path := weights and weights_path(weights):
        if not path.is_file():
            raise ConfigError(f"weights={weights}: no such file")
    elif weights and ":" in name:
        raise ConfigError(f"weights={weights}: a model of your own has no named weights; give a file")
    elif weights and not name.startswith("timm/"):
        torchvision_weights(name, weights)


def build_model(
    name: str,
    *,
    num_classes: int,
    weights: str | None = None,
    image_size: int | None = None,
    drop_path: float | None = None,
    keep_classifier: bool = False,
) -> nn.Module:
    """Build a model with `num_classes` outputs, in fp32, contiguous, on the CPU, in training mode.

    A function of the user's gets `num_classes`, and `drop_path` (Huang et al., "Deep networks with stochastic depth",
    2016) if it is set. Vision transformers are built for `image_size`. A classifier of another number of classes than
    the weights is new, which `keep_classifier` refuses. Raises ConfigError: unknown names, weights that do not fit.
    """
    check_model(name, weights)
    file = weights_path(weights) if weights is not None else None
    zoo_weights = weights if file is None else None
    try:
        model = _built(name, num_classes, zoo_weights, image_size, drop_path)
    except ConfigError:
        raise
    except Exception as error:  # the user's own code; an image size that a transformer cannot divide; no network
        reason = explain_failure(error)
        if zoo_weights is not None and (isinstance(error, OSError) or type(error).__module__.startswith(_NETWORK)):
            reason = f"weights={zoo_weights} cannot be downloaded ({reason}); copy the file and give weights=FILE"
        what = f"model={name} cannot be built" + (f" with drop_path={drop_path}" if drop_path is not None else "")
        raise ConfigError(f"{what}{f' for images of {image_size} px' if image_size else ''}: {reason}") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model={name} returned a {type(model).__name__}; it must return a torch.nn.Module")
    is_new = zoo_weights is not None and num_classes != zoo_classes(name, zoo_weights)[0]
    if file is not None:
        is_new = load_weights_file(model, file)
    if is_new and keep_classifier:
        raise ConfigError(f"weights={weights} have another number of classes than the data ({num_classes})")
    return model


def _built(name: str, num_classes: int, weights: str | None, image_size: int | None, drop_path: float | None) -> Any:
    option = "drop_path" if ":" in name else "drop_path_rate" if name.startswith("timm/") else "stochastic_depth_prob"
    options: dict[str, Any] = {} if drop_path is None else {option: drop_path}
    if ":" in name:
        return user_function("model", name)(num_classes=num_classes, **options)
    if name.startswith("timm/"):
        timm, own_name = optional_module("timm", f"model={name}"), name.removeprefix("timm/")
        pretrained = timm.get_pretrained_cfg(own_name, allow_unregistered=True)
        if image_size is not None and pretrained is not None and pretrained.fixed_input_size:
            options["img_size"] = image_size
        return timm.create_model(own_name, pretrained=weights is not None, num_classes=num_classes, **options)
    if weights is not None:
        model = torchvision.models.get_model(name, weights=torchvision_weights(name, weights), **options)
        replace_classifier(model, num_classes)
        return model
    if name in ("inception_v3", "googlenet"):
        options |= {"init_weights": True, "aux_logits": True}  # torchvision warns if init_weights is not given
    elif name.startswith("vit_") and image_size is not None:
        options["image_size"] = image_size
    return torchvision.models.get_model(name, num_classes=num_classes, **options)


def zoo_classes(name: str, weights: str) -> tuple[int, tuple[str, ...]]:
    """The number of classes of a zoo's pretrained weights, and their names, which timm does not have."""
    if name.startswith("timm/"):
        timm = optional_module("timm", f"model={name}")
        return int(timm.get_pretrained_cfg(name.removeprefix("timm/")).num_classes), ()
    names = torchvision_weights(name, weights).meta["categories"]
    return len(names), tuple(names)


def torchvision_weights(name: str, weights: str) -> Any:
    choices = torchvision.models.get_model_weights(name).__members__  # DEFAULT is one
    if weights not in choices:
        near, known = suggest(weights, choices), ", ".join(sorted(choices))
        raise ConfigError(f"weights={weights}: not a file, nor weights of {name}{near} (there are {known})")
    return choices[weights]


def replace_classifier(model: nn.Module, num_classes: int) -> None:
    """Give every classifier of a pretrained zoo model `num_classes` outputs; a no-op if it already has them."""
    for path, layer in _classifiers(model).items():
        if isinstance(layer, nn.Linear) and len(layer.weight) != num_classes:
            model.set_submodule(path, nn.Linear(layer.in_features, num_classes, bias=layer.bias is not None))
        elif isinstance(layer, nn.Conv2d) and len(layer.weight) != num_classes:
            model.set_submodule(path, nn.Conv2d(layer.in_channels, num_classes, kernel_size=1))
    if hasattr(model, "num_classes"):
        model.num_classes = num_classes  # type: ignore[assignment] # a plain number; nn.Module declares another type


def _classifiers(model: nn.Module) -> dict[str, nn.Linear | nn.Conv2d]:
    """The last Linear (SqueezeNet: 1x1 Conv2d) by its path; then those of the auxiliary heads."""
    last: dict[str, tuple[str, Any]] = {}  # by the auxiliary part of the model; "": the main part
    for path, module in model.named_modules():
        part = path.split(".")[0] if path.startswith(("AuxLogits.", "aux1.", "aux2.")) else ""
        is_pointwise = isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1)
        if isinstance(module, nn.Linear) or (is_pointwise and type(model).__name__ == "SqueezeNet"):
            last[part] = path, module
    return dict(last[part] for part in sorted(last))


def head_parameters(model: nn.Module) -> set[str]:
    """The names of the parameters of `_classifiers`."""
    layers = _classifiers(model).items()
    return {f"{prefix}.{name}".removeprefix(".") for prefix, layer in layers for name in layer.state_dict()}


def load_weights_file(model: nn.Module, path: Path) -> bool:
    """Load a file of weights into `model`. Returns whether its classifier has another number of classes, and is new."""
    weights = read_weights(path)
    if weights.taken:
        log.info("weights=%s: %s", path, weights.taken)
    other_shape = weights.names_of_other_shape(model)
    new_head = set(other_shape) if head_parameters(model).issuperset(other_shape) else set[str]()
    state = {name: value for name, value in weights.state.items() if name not in new_head}
    load_state(model, state, f"weights={path} do not fit the model", may_lack=new_head)
    if new_head:
        log.info("weights=%s: new classifier, the number of classes differs (%s)", path, ", ".join(sorted(new_head)))
    return bool(new_head)


def load_state(model: nn.Module, state: Mapping[str, Any], what: str, may_lack: Collection[str] = frozenset()) -> None:
    """`model.load_state_dict`. Raises ConfigError: "`what`: reason", other shapes, missing or unexpected names."""
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise ConfigError(f"{what}: {' '.join(str(error).split())[:300]}") from error
    absent = sorted(set(missing) - set(may_lack))
    if not absent and not unexpected:
        return
    cuts = ((name, dot + 1) for name in unexpected for dot, letter in enumerate(name) if letter == ".")
    prefixes = Counter(name[:cut] for name, cut in cuts if name[cut:] in absent).most_common(1)
    advice = f"prefix={prefixes[0][0]}" if prefixes else "entry=... prefix=..."
    raise ConfigError(
        f"{what}: the file lacks {len(absent)} of its tensors ({', '.join(absent[:3])}) and has {len(unexpected)} "
        f"others ({', '.join(unexpected[:3])}); cl-train convert FILE out=... {advice} selects them"
    )


# --- preprocessing ----------------------------------------------------------------------------------------------------


@cache  # an evaluation follows it, and then logs it
def published_preprocessing(model: str, weights: str) -> Preprocessing | None:
    """That of torchvision's weights, of timm's at their test size, or what a file of weights records.

    None if unknown, or no centre crop after a resize of the short side (timm's crop modes "squash" and "border").
    """
    if path := weights_path(weights):
        return read_weights(path).card.preprocessing if path.is_file() else None
    if not model.startswith("timm/"):
        published = torchvision_weights(model, weights).transforms()
        sizes = published.resize_size[0], published.crop_size[0]
        return Preprocessing(*sizes, published.interpolation.value, tuple(published.mean), tuple(published.std))
    timm = optional_module("timm", f"model={model}")
    cfg = timm.get_pretrained_cfg(model.removeprefix("timm/"))
    found = timm.data.resolve_data_config(pretrained_cfg=cfg.to_dict() if cfg else {}, use_test_size=True)
    _, size, width = found["input_size"]
    if size != width or found["crop_mode"] != "center" or found["interpolation"] not in ("bilinear", "bicubic"):
        return None
    resize = math.floor(size / found["crop_pct"])
    return Preprocessing(resize, size, found["interpolation"], tuple(found["mean"]), tuple(found["std"]))


def follow_published_preprocessing(data: DataConfig, model: str, weights: str, given: Collection[str]) -> DataConfig:
    """`data` with the preprocessing of `weights`, if it is known. A setting in `given`, such as `data.image_size`, is
    kept, and so are those that belong to it: the sizes of crop and resize, mean and standard deviation.
    """
    published = published_preprocessing(model, weights)
    settings = {**published.settings(), "val_size": None} if published else {}
    kept = {name for names in _TOGETHER if any(f"data.{name}" in given for name in names) for name in names}
    return replace(data, **{name: value for name, value in settings.items() if name not in kept})


def log_preprocessing(data: DataConfig, model: str, weights: str, *, evaluate_only: bool) -> None:
    """Log a warning if the settings (of training: mean and std) are not those that the weights were published with."""
    published, used = published_preprocessing(model, weights), Preprocessing.of(data).settings()
    settings = published.settings() if published else used
    names = used if evaluate_only else ("mean", "std")
    words = " ".join(f"data.{name}={show(settings[name])}" for name in names if settings[name] != used[name])
    if words:
        log.warning("weights=%s were published with other settings: %s", weights, words)


# --- copies -----------------------------------------------------------------------------------------------------------


def copy_model(model: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """A deep copy of `model`, eager, on `device` (None: each tensor where it is; "meta": shapes and strides only).

    A result that a module keeps as an attribute (`torch.nn.utils.weight_norm`'s weight), which `copy.deepcopy` refuses,
    is copied as a constant. Raises ConfigError: lazy modules, or an attribute that cannot be copied.
    """
    model = getattr(model, "_orig_mod", model)
    refuse_lazy(model)
    memo: dict[int, object] = {}
    try:
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                if id(module) not in memo:
                    # By a file: `copy.deepcopy` returns parameters with an autograd graph. There is no meta device.
                    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
                        torch.jit.save(module, buffer := io.BytesIO())
                        buffer.seek(0)
                        memo[id(module)] = torch.jit.load(buffer, None if str(device) == "meta" else device)
                continue
            for value in [*module.parameters(recurse=False), *module.buffers(recurse=False), *vars(module).values()]:
                if isinstance(value, torch.Tensor) and id(value) not in memo:
                    copied = value.detach().to(device or value.device, copy=True)
                    copied = nn.Parameter(copied, False) if isinstance(value, nn.Parameter) else copied
                    memo[id(value)] = copied.requires_grad_(value.requires_grad and value.is_leaf)
        return copy.deepcopy(model, memo)
    except Exception as error:  # the attributes of a user's module may raise any exception
        raise ConfigError(f"the model cannot be copied ({type(error).__name__}: {str(error)[:200]})") from error
