"""The file that a run starts from, which `config=` or an evaluation names, and the code in it.

A file that the user names is trusted like a script; what a run left is data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cl_train.config.removed import was_default
from cl_train.config.schema import (
    CHOSEN_BY_GROUP,
    FIELDS,
    GROUPS,
    LAYOUT_NAMES,
    SETTINGS_OF_CODE,
)
from cl_train.config.validation import flatten, read_yaml, show
from cl_train.errors import ConfigError

# They tell how the run that left a file started, not what it trained.
_HOW_STARTED = ("config", "resume", "overwrite", "environment")


@dataclass(frozen=True)
class StartFile:
    """A file of settings; what is typed overrides them."""

    path: Path
    is_trusted: bool  # not the config.yaml of a run

    @classmethod
    def of(cls, typed: Mapping[str, Any]) -> "StartFile | None":
        """Returns the file that `config=` names, or that of the run to evaluate; None: neither.
        Raises ConfigError.
        """
        if typed.get("config") is not None:
            path = Path(str(typed["config"])).expanduser()
            is_run = path.is_dir()
            path = path / "config.yaml" if is_run else path
            if not path.is_file():
                what = "no such file, and no run folder with a config.yaml"
                raise ConfigError(f"config={typed['config']}: {what}")
            if typed.get("experiment"):
                raise ConfigError("config= and experiment= cannot be combined: leave out one")
            return cls(path, is_trusted=not is_run)

        resume = typed.get("resume")
        if typed.get("evaluate_only") is not True or typed.get("experiment") or not resume:
            return None
        run = Path(str(typed.get("hydra.run.dir", ".") if resume == "auto" else resume))
        run = run.expanduser()
        checkpoints = (run if run.is_dir() else run.parent).absolute()
        if checkpoints.name == "checkpoints":
            run = checkpoints.parent
        path = run / "config.yaml"
        return cls(path, is_trusted=False) if path.is_file() else None

    def settings(self, typed: Mapping[str, Any]) -> dict[str, Any]:
        """Returns its settings by full key, without those that are typed and those that tell how
        its own run started. A section of a group holds its choice: `optim: adamw`, or `optim:
        {name: adamw, ...}`.
        """
        settings: dict[str, Any] = {}
        evaluates = typed.get("evaluate_only")
        for key, value in sorted(flatten(self._read(), FIELDS)):  # optim.library before optim.name
            group = key.partition(".")[0]
            if key in _HOW_STARTED or was_default(key, value) or typed.keys() & {key, group}:
                continue
            if group == "hydra" and not self.is_trusted:  # a run does not say where others write
                continue
            if (key in GROUPS and value is None) or (key == "weights" and evaluates):
                continue
            if key == "channels_last" and value == "auto" and evaluates:
                value = self._trained_in()
            is_timms = key == "optim.name" and settings.get("optim") == "timm"
            if is_timms or key not in (*CHOSEN_BY_GROUP, "optim.name"):
                settings[key] = value
            elif value != "torch":
                settings[group] = value
        return settings

    def _trained_in(self) -> str:
        """Returns the choice of a run with channels_last=auto; auto if it left none."""
        try:
            memory_format = read_yaml(self.path.with_name("summary.json"))["memory_format"]
        except (OSError, ValueError, KeyError, TypeError):
            return "auto"
        names = {name: word for word, name in LAYOUT_NAMES.items()}
        return names.get(memory_format, "auto")

    def _read(self) -> dict[str, Any]:
        try:
            values = read_yaml(self.path, is_trusted=self.is_trusted) or {}
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path} cannot be read: {on_one_line(error)}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{self.path}: expected settings, key: value")
        return values


def on_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def code_named(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the settings that name code of the user's, with their values as they are typed."""
    values = dict(flatten(config, FIELDS))
    typed = {key: show(values[key]) for key in SETTINGS_OF_CODE}
    return {key: value for key, value in typed.items() if ":" in value}


def refuse_code(source: Path, words: Sequence[str]) -> None:
    """Raises ConfigError if `source`, which is data, names code: these `words`."""
    if words:
        what = "names code, and what a run left never runs any: to run it, repeat"
        raise ConfigError(f"{source} {what} {' '.join(words)}")
