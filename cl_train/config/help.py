"""`--help`, generated from the settings: name, default, meaning, type, range and choices."""

from __future__ import annotations

import shutil
import textwrap
import typing
from collections.abc import Mapping

from cl_train.config.schema import CHOSEN_BY_GROUP, Config
from cl_train.config.validation import Setting, kind_of, setting_fields, show

_KEY_WIDTH = 34


def command_help(usage: str, doc: str, settings: Mapping[str, type]) -> str:
    """The help page of a command.

    Args:
        doc: the docstring of its module: a summary, a blank line, then examples and notes.
        settings: dataclasses of settings by the title of their section.
    """
    summary, _, examples = doc.strip().partition("\n\n")
    sections = [f"{title}\n{describe(schema)}" for title, schema in settings.items()]
    return "\n\n".join([f"usage: {usage}", _wrapped(summary), *sections, f"examples:\n{examples.rstrip()}"])


def train_help(usage: str, doc: str, groups: Mapping[str, list[str]]) -> str:
    """The help page of train.py, with the settings listed by group."""
    choices = [f"  {group}={'|'.join(names)}" for group, names in groups.items()]
    pages = ["groups of settings, one file each (conf/<group>/<choice>.yaml)\n" + "\n".join(choices)]
    rows: dict[str, list[str]] = {}
    for setting in setting_fields(Config).values():
        if setting.key not in CHOSEN_BY_GROUP:
            rows.setdefault(setting.key.rpartition(".")[0], []).append(_row(setting))
    hints = typing.get_type_hints(Config)
    for group, lines in rows.items():
        title = f"{group}: {hints[group].__doc__}" if group else "settings"
        pages.append("\n".join([title, *lines]))
    summary, _, examples = doc.strip().partition("\n\n")
    return "\n\n".join([f"usage: {usage}", _wrapped(summary), *pages, f"examples:\n{examples.rstrip()}"])


def describe(schema: type) -> str:
    """One or more lines for each setting of a dataclass."""
    return "\n".join(map(_row, setting_fields(schema).values()))


def _row(setting: Setting) -> str:
    default = "..." if setting.metadata["required"] else "" if setting.default == [] else show(setting.default)
    name = f"  {setting.key}={default}"
    text = f"{setting.metadata['help']} [{kind_of(setting)}{', required' if setting.metadata['required'] else ''}]"
    first = name.ljust(_KEY_WIDTH) if len(name) < _KEY_WIDTH else f"{name}\n{' ' * _KEY_WIDTH}"
    lines = textwrap.wrap(text, _width() - _KEY_WIDTH, break_on_hyphens=False)
    return first + f"\n{' ' * _KEY_WIDTH}".join(lines)


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(" ".join(text.split()), _width()))


def _width() -> int:
    return max(60, min(120, shutil.get_terminal_size((120, 24)).columns))
