"""What a setting is: its description, the leaves of a dataclass of settings, the nearest name."""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal

# Words of other training programs, and the settings here that mean the same.
_OF_OTHER_PROGRAMS = {
    "amp": "precision",
    "arch": "model",
    "batch": "batch_size",
    "data_dir": "root",
    "data_path": "root",
    "img_size": "image_size",
    "learning_rate": "lr",
    "num_workers": "workers",
    "pretrained": "weights",
    "wd": "weight_decay",
}


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers that a setting may have. Whole ones up to 2**62 fit into an int64 of torch."""

    least: float = -(2.0**62)
    most: float = 2.0**62
    above: float = -math.inf  # not this number itself

    def __contains__(self, number: float) -> bool:
        return self.least <= number <= self.most and number > self.above

    def __str__(self) -> str:
        """As in --help: `0 to 1`, `>= 1`, `> 0 <= 1`; empty for all numbers."""
        has_most = self.most != Range.most
        if self.above > -math.inf:
            return f"> {self.above}" + (f" <= {self.most}" if has_most else "")
        if self.least == Range.least:
            return ""
        return f"{self.least} to {self.most}" if has_most else f">= {self.least}"


def setting(default: Any, help: str, range: Range = Range(), **details: Any) -> Any:
    """Returns a dataclass field; `range` is that of a number, `details` are fields of `Setting`."""
    help = f"multirun: {help}" if details.get("multirun") else help
    metadata = {"default": default, "help": help, "range": range, **details}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


loss_setting = partial(setting, affects="loss")  # changes the losses of a run, not its speed
neutral_setting = partial(setting, affects="nothing")  # changes neither
multirun_setting = partial(neutral_setting, multirun=True)


@dataclasses.dataclass(frozen=True)
class Setting:
    base_type: type  # bool, int, float or str: of the value, or of the items of a list
    list_depth: int  # 0: one value, 1: a list, 2: a list of lists
    optional: bool  # null is allowed
    default: Any
    help: str
    range: Range
    choices: Collection[str] = ()  # the allowed values of a setting of type str
    null_word: str | None = None  # what users write for null: repeats=auto
    # In what runs with different values cannot be compared; "speed" includes the loss.
    affects: Literal["speed", "loss", "nothing"] = "speed"
    multirun: bool = False  # of a whole sweep, not of each of its runs
    required: bool = False  # the user must give a value; the default is not used
    key: str = ""  # what users write, if it is not the field's name: `data.root` for a field `root`


def setting_fields(schema: type, prefix: str = "") -> dict[str, Setting]:
    """Returns every setting in a dataclass by its full key: required ones first, inherited last."""
    leaves: dict[str, Setting] = {}
    own = {name: number for number, name in enumerate(schema.__annotations__)}

    def place(item: Any) -> tuple[bool, int]:
        return not item.metadata.get("required"), own.get(item.name, len(own))

    for item in sorted(dataclasses.fields(schema), key=place):
        hint: Any = item.type
        key = prefix + (item.metadata.get("key") or item.name)
        if dataclasses.is_dataclass(hint):
            leaves |= setting_fields(hint, f"{key}.")  # type: ignore[arg-type]
            continue
        optional, list_depth = isinstance(hint, types.UnionType), 0
        hint = typing.get_args(hint)[0] if optional else hint
        while typing.get_origin(hint) is list:
            hint, list_depth = typing.get_args(hint)[0], list_depth + 1
        leaves[key] = Setting(hint, list_depth, optional, **item.metadata)
    return leaves


def suggest(name: str, names: Iterable[str]) -> str:
    """Returns `; did you mean a, b?` for the nearest of the `names`, or an empty string."""
    names = sorted(names)
    last = name.rpartition(".")[2]
    last = _OF_OTHER_PROGRAMS.get(last, last)
    near = [full for full in names if full == last or full.endswith(f".{last}")][:3]
    near = near or difflib.get_close_matches(name, names, cutoff=0.65)
    return f"; did you mean {', '.join(near)}?" if near else ""


def suggest_path(path: Path) -> str:
    """Returns the end of a message about a `path` that does not exist: similar names beside it."""
    beside = [] if path.exists() or not path.parent.is_dir() else path.parent.iterdir()
    return suggest(path.name, [other.name for other in beside])
