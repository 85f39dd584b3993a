"""Tensors in nested containers and dataclasses, as operations and ops take and return them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor


def leaves(value: Any) -> Iterator[Any]:
    """What is in nested containers and dataclasses."""
    if isinstance(value, list | tuple):
        for one in value:
            yield from leaves(one)
    elif isinstance(value, dict):
        yield from leaves(list(value.values()))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from leaves([getattr(value, one.name) for one in fields(value)])
    else:
        yield value


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same containers with `change` of everything in them."""
    if isinstance(value, list | tuple):
        made = [mapped(one, change) for one in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if isinstance(value, dict):
        return {name: mapped(one, change) for name, one in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: mapped(getattr(value, one.name), change) for one in fields(value)})
    return change(value)


def tensors_in(value: Any) -> Iterator[Tensor]:
    return (one for one in leaves(value) if isinstance(one, Tensor))
