"""The arguments of the commands other than train, and the help page of every command."""

import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from cl_train.config.fields import setting_fields, suggest
from cl_train.config.schema import CHOSEN_BY_GROUP, OPTIMIZERS
from cl_train.config.start_file import StartFile, refuse_code
from cl_train.config.validation import T, from_mapping, kind_of, show

# What a command takes from `config=`: not the layout, which these commands vary themselves.
_OF_RUN = "model precision batch_size compile cuda_graph device conversion select data.image_size"


def settings_from_arguments(schema: type[T], arguments: Sequence[str]) -> T:
    """Returns the key=value arguments of a command line as a dataclass; lists are written a,b,c.

    Raises ConfigError: every problem found.
    """
    fields = setting_fields(schema)
    problems: list[str] = []
    values: dict[str, Any] = {}
    for word in arguments:
        key, equals, text = word.partition("=")
        name = key.lstrip("-").replace("-", "_")
        item = fields.get(key)
        if not equals or name != key:
            hint = f"key=value{suggest(name, fields)}"
            if name in fields:
                hint = f"{name}="
            elif name == word and "model" in fields:
                hint = f"key=value, such as model={word}"
            problems.append(f"{word}: write {hint}")
        elif item and not text and not item.optional and item.default:
            default = show(item.default)
            problems.append(f"{word} is empty: give a value, or leave it out for {default}")
        elif item and item.list_depth and text and "" in text.split(","):
            problems.append(f"{word}: an item is empty; leave out its comma")
        elif item and item.list_depth and not text.startswith("["):
            values[key] = [_value_of(part) for part in text.split(",")] if text else []
        else:
            values[key] = _value_of(text)
    if "config" in fields:
        values = {k: v for k, v in _of_run(values).items() if k in fields} | values
    for key, item in fields.items():
        if item.required and key not in values:
            problems.append(f"{key}=... is missing: {item.help}")
    return from_mapping(schema, values, problems)


def _of_run(typed: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of the run or file that `config=` names. Raises ConfigError."""
    start = StartFile.of({"config": typed.get("config")})
    if start is None:
        return {}
    settings = start.settings(typed)
    found = {key: settings[key] for key in _OF_RUN.split() if key in settings}
    if settings.get("optim") in OPTIMIZERS:
        found["optimizer"] = settings["optim"]
    if not start.is_trusted and ":" in str(found.get("model")):
        refuse_code(start.path, [f"model={found['model']}"])
    return found


def is_setting(word: str) -> bool:
    """Whether an argument is key=value (or an option), rather than a file or folder."""
    return re.fullmatch(r"-.*|[\w.]+=.*", word, flags=re.S) is not None


def _value_of(text: str) -> Any:
    """Reads `text` as YAML; returns it unchanged if it is none, such as a shell pattern."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def command_help(
    usage: str, doc: str, settings: Mapping[str, type], choices: Sequence[str] = ()
) -> str:
    """Returns the help page of a command.

    Args:
        doc: the docstring of its module: a summary, a blank line, then examples and notes.
        settings: dataclasses by the title of their section; one in another has its own section.
        choices: the groups of settings, one line each.
    """
    width = max(60, min(120, shutil.get_terminal_size((120, 24)).columns))
    indent = "\n" + " " * 34  # of the meanings
    sections: dict[str, list[str]] = {}
    if choices:
        title = "groups of settings (conf/<group>/<choice>.yaml)"
        sections[title] = [f"  {line}" for line in choices]
    for title, schema in settings.items():
        for key, item in setting_fields(schema).items():
            if key in CHOSEN_BY_GROUP:
                continue
            group = key.rpartition(".")[0]
            of_group = schema.__annotations__.get(group)
            section = f"{group}: {of_group.__doc__}" if of_group else title
            required = ", required" if item.required else ""
            default = "..." if required else "" if item.default == [] else show(item.default)
            name = f"  {key}={default}"
            first = f"{name:34}" if len(name) < 34 else name + indent
            meaning = f"{item.help} [{kind_of(item)}{required}]"
            lines = textwrap.wrap(meaning, width - 34, break_on_hyphens=False)
            sections.setdefault(section, []).append(first + indent.join(lines))
    summary, _, examples = doc.strip().partition("\n\n")
    texts = ["\n".join([title, *rows]) for title, rows in sections.items()]
    summary = textwrap.fill(" ".join(summary.split()), width)
    return "\n\n".join([f"usage: {usage}", summary, *texts, f"examples:\n{examples.rstrip()}"])
