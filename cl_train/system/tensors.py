"""The tensors in nested values: batches, the outputs of models, the arguments of operators."""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors at any depth of mappings, lists, tuples and dataclasses."""
    if isinstance(value, torch.Tensor):
        return [value]
    items: Iterable[Any] = ()
    if isinstance(value, list | tuple | deque):
        items = value
    elif isinstance(value, Mapping):
        items = value.values()
    elif is_dataclass(value):
        items = [getattr(value, field.name, None) for field in fields(value)]
    return [tensor for item in items for tensor in tensors_in(item)]


def strided_tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in `value` that have strides, which sparse ones do not."""
    return [tensor for tensor in tensors_in(value) if tensor.layout == torch.strided]


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Applies `function` to the tensors at any depth of `value`; all else stays the same object."""
    return map_leaves(lambda one: function(one) if isinstance(one, torch.Tensor) else one, value)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Returns new dicts, lists and tuples, at any depth, with `function` of all that they hold."""
    if isinstance(value, tuple):
        items = [map_leaves(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if not isinstance(value, dict | list | deque):
        return function(value)
    mapped: Any = copy.copy(value)  # of the same type, such as a defaultdict
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        mapped[key] = map_leaves(function, item)
    return mapped
