"""Strict YAML: a mapping becomes a frozen dataclass tree, or an error with the key, what came and what is needed."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Hashable, Mapping
from typing import Any, Literal, TypeVar

import yaml

T = TypeVar("T")


class RecipeError(ValueError):
    """A recipe file or override that cannot be used as written."""


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 2e-3 as a number (YAML 1.1 calls it text) and refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise yaml.MarkedYAMLError(problem=f"key given twice: {', '.join(twice)}", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep=deep)


_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def parse_yaml(text: str, where: str) -> Any:
    """The YAML value in `text`. Raises `RecipeError` that names `where` it came from."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise RecipeError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from None


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one `section.key=value` in `tree`; whether the key exists is seen when the tree is built."""
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise RecipeError(f"override {override!r} is not of the form section.key=value, e.g. train.max_steps=20")
    *sections, last = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise RecipeError(f"override {override!r}: {section} is {kind_of(tree)}, it has no keys of its own")
    tree[last] = parse_yaml(text, f"override {override!r}")


def build_strictly(cls: type[T], tree: Mapping[Any, Any], prefix: str = "") -> T:
    """A frozen dataclass (nested ones too) from a mapping. Raises `RecipeError` for unknown, missing or unfit keys."""
    hints = typing.get_type_hints(cls)
    for key in tree:
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, n=1, cutoff=0.5)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known keys: {', '.join(hints)}"
            raise RecipeError(f"unknown key {prefix}{key}; {hint}")
    for entry in dataclasses.fields(cls):  # type: ignore[arg-type]
        required = entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
        if required and entry.name not in tree:
            raise RecipeError(f"{prefix}{entry.name} is missing; it has no default")
    return cls(**{key: _convert(hints[key], value, prefix + key) for key, value in tree.items()})


def _convert(hint: Any, value: Any, key: str) -> Any:
    """`value` as the type `hint`: an integer counts as a float, a list as a tuple, anything else must fit as it is."""
    wrong = RecipeError(
        f"{key} = {value!r} is {kind_of(value)}, but {_wanted(hint)} is needed{_quote_hint(hint, value)}"
    )
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise wrong
        return build_strictly(hint, value, f"{key}.")  # type: ignore[arg-type]
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _convert(next(arm for arm in inner if arm is not types.NoneType), value, key)
    if origin is Literal:
        if value not in inner:
            raise wrong
        return value
    if origin is tuple:
        fixed = Ellipsis not in inner
        if not isinstance(value, list) or (fixed and len(value) != len(inner)):
            raise wrong
        arms = inner if fixed else (inner[0],) * len(value)
        return tuple(_convert(arm, item, f"{key}[{i}]") for i, (arm, item) in enumerate(zip(arms, value, strict=True)))
    if hint is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if type(value) is not hint or hint is float:
        raise wrong
    return value


def kind_of(value: object) -> str:
    """What a YAML value is, in a user's words."""
    if isinstance(value, dict):
        return "a mapping"
    names = {bool: "true/false", int: "a whole number", float: "a number", str: "text", list: "a list"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")


def _wanted(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join("null" if arm is types.NoneType else _wanted(arm) for arm in inner)
    if origin is Literal:
        return "one of " + ", ".join(inner)
    if origin is tuple:
        return f"a list of {_wanted(inner[0])}" if Ellipsis in inner else f"a list of exactly {len(inner)} numbers"
    names = {str: "text", int: "a whole number", float: "a finite number", bool: "true or false"}
    return names.get(hint, "a mapping of keys")


def _quote_hint(hint: Any, value: object) -> str:
    wants_text = hint is str or str in typing.get_args(hint)
    return f' (write it in quotes: "{value}")' if wants_text and isinstance(value, int | float) else ""
