"""`--help`, generated from the settings: name, default, meaning, type, range and choices."""

import shutil
import textwrap
from collections.abc import Iterable, Mapping

from cl_train.config.schema import CHOSEN_BY_GROUP, Config
from cl_train.config.validation import Setting, kind_of, setting_fields, show

_KEY_WIDTH = 34


def command_help(usage: str, doc: str, settings: Mapping[str, type]) -> str:
    """The help page of a command.

    Args:
        doc: the docstring of its module: a summary, a blank line, then examples and notes.
        settings: dataclasses of settings by the title of their section.
    """
    return _page(usage, doc, {title: setting_fields(schema).values() for title, schema in settings.items()})


def train_help(usage: str, doc: str, groups: Mapping[str, list[str]]) -> str:
    """The help page of train.py: the choices of the groups, then the settings by group."""
    choices = [f"\n  {group}={'|'.join(names)}" for group, names in groups.items()]
    sections: dict[str, list[Setting]] = {f"groups of settings (conf/<group>/<choice>.yaml){''.join(choices)}": []}
    for setting in setting_fields(Config).values():
        group = setting.key.rpartition(".")[0]
        title = f"{group}: {Config.__annotations__[group].__doc__}" if group else "settings"
        if setting.key not in CHOSEN_BY_GROUP:
            sections.setdefault(title, []).append(setting)
    return _page(usage, doc, sections)


def _page(usage: str, doc: str, sections: Mapping[str, Iterable[Setting]]) -> str:
    summary, _, examples = doc.strip().partition("\n\n")
    width = max(60, min(120, shutil.get_terminal_size((120, 24)).columns))
    texts = ["\n".join([title, *(_row(item, width) for item in settings)]) for title, settings in sections.items()]
    summary = textwrap.fill(" ".join(summary.split()), width)
    return "\n\n".join([f"usage: {usage}", summary, *texts, f"examples:\n{examples.rstrip()}"])


def _row(setting: Setting, width: int) -> str:
    default = "..." if setting.metadata["required"] else "" if setting.default == [] else show(setting.default)
    name = f"  {setting.key}={default}"
    text = f"{setting.metadata['help']} [{kind_of(setting)}{', required' if setting.metadata['required'] else ''}]"
    first = name.ljust(_KEY_WIDTH) if len(name) < _KEY_WIDTH else f"{name}\n{' ' * _KEY_WIDTH}"
    lines = textwrap.wrap(text, width - _KEY_WIDTH, break_on_hyphens=False)
    return first + f"\n{' ' * _KEY_WIDTH}".join(lines)
