"""The page of all recipe keys: from the dataclasses."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from typing import Any

import annotated_types
import yaml
from pydantic import AfterValidator
from tables import code, plain, table

from toolkit.recipe import Recipe

INTRODUCTION = """# Recipe reference

After this page you can write a recipe: each key has its values, its default and its meaning here.

A recipe is a YAML file; the part of a key before a dot is a section of the file. An unknown key is an error that names
the nearest one. On the command line `key=value` replaces a value, and `--print-config` prints the result:

```bash
toolkit run recipes/smollm2-135m.yaml train.epochs=2 'bench.shapes=["3,1,4"]' --print-config
```

A stage whose keys change is redone, with all stages after it. Keys marked * do not affect the result of their stage: a
stage that was cut off continues with other values of them.
"""
BOUNDS = {annotated_types.Gt: ">", annotated_types.Ge: "≥", annotated_types.Lt: "<", annotated_types.Le: "≤"}
NAMES = {int: "integer", float: "number", str: "text", bool: "true or false"}


def page() -> str:
    return INTRODUCTION + "".join(_sections(Recipe, ""))


def _sections(cls: type, place: str) -> list[str]:
    """The tables of a section, then of the sections below it. place: the section's key and a dot, or ""."""
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = {key.name: key for key in dataclasses.fields(cls)}
    below = [name for name in fields if dataclasses.is_dataclass(hints[name])]
    rows = [
        (
            code(place + name) + ("\\*" if key.metadata.get("not_in_fingerprint") else ""),
            values(hints[name]),
            "required" if key.default is dataclasses.MISSING else code(as_yaml(key.default)),
            plain(key.metadata["meaning"]),
        )
        for name, key in fields.items()
        if name not in below
    ]
    heading = f"`{place.removesuffix('.')}`" if place else "The run"
    text = f"\n## {heading}\n\n{plain(inspect.cleandoc(cls.__doc__ or ''))}\n\n"
    text += table(("key", "values", "default", "meaning"), rows)
    return [text, *(part for name in below for part in _sections(hints[name], f"{place}{name}."))]


def values(hint: Any) -> str:
    """The values that a key takes, in words."""
    inside = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Annotated:
        needs = [one.func.__doc__ or "" for one in inside[1:] if isinstance(one, AfterValidator)]
        bounds = [one for note in inside[1:] for one in getattr(note, "metadata", [note])]
        limits = [f"{BOUNDS[type(one)]} {dataclasses.astuple(one)[0]:g}" for one in bounds if type(one) in BOUNDS]
        text = " ".join([values(inside[0]), ", ".join(limits)]).strip()
        return "; ".join([text, *(f"must {need}" for need in needs)])
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(code(as_yaml(value)) for value in inside)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join("`null`" if one is type(None) else values(one) for one in inside)
    if typing.get_origin(hint) is tuple:
        return f"list of {values(inside[0])}" if inside[-1] is ... else f"list of {len(inside)}: {values(inside[0])}"
    return NAMES[hint]


def as_yaml(value: Any) -> str:
    """A value as a recipe has it."""
    return yaml.safe_dump(value if not isinstance(value, tuple) else list(value), default_flow_style=True).split("\n")[
        0
    ]
