"""Strict YAML: read a mapping into a tree of frozen dataclasses; errors have the key and what is needed."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import typing
from collections.abc import Hashable, Iterable, Mapping
from operator import attrgetter
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

T = TypeVar("T")


class RecipeError(ValueError):
    """A recipe file or an override is not valid."""


Rule = tuple[str, bool, str]  # key, whether its value is valid, what is needed


def check(section: object, place: str, rules: Iterable[Rule]) -> None:
    """Raise `RecipeError` with one line per rule that `section` breaks. place: the section's key and a dot, or ""."""
    wrong = [(key, needed) for key, right, needed in rules if not right]
    if wrong:
        lines = (f"{place}{key} = {attrgetter(key)(section)!r}, but {needed} is needed" for key, needed in wrong)
        raise RecipeError("\n".join(lines))


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 2e-3 as a number (a string in YAML 1.1) and rejects repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise yaml.MarkedYAMLError(problem=f"key given twice: {', '.join(twice)}", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep=deep)


_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def parse_yaml(text: str, where: str) -> Any:
    """Parse a YAML value. Raises `RecipeError` with `where`, the source of the text."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise RecipeError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from None


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one `section.key=value` in `tree`; `build` detects unknown keys."""
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise RecipeError(f"override {override!r} is not of the form section.key=value, e.g. train.max_steps=20")
    *sections, last = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise RecipeError(
                f"override {override!r}: {section} = {tree!r} has no keys of its own; it must be a mapping"
            )
    tree[last] = parse_yaml(text, f"override {override!r}")


def build(cls: type[T], tree: Mapping[str, Any], section: str = "") -> T:
    """Build the dataclass `cls` from a mapping. Integers become floats and lists tuples; other types must match.

    section: the key of `cls` in a recipe, for messages. Raises `RecipeError` with one line per problem.
    """
    try:
        return TypeAdapter(cls).validate_json(json.dumps(tree))  # in JSON mode a list is valid for a tuple
    except TypeError as error:
        raise RecipeError(f"{error}: write dates and the like in quotes") from None
    except ValidationError as error:
        raise RecipeError("\n".join(_problem(cls, one, section) for one in error.errors())) from None


# In place of pydantic's messages, which name JSON types.
_WORDS = {
    "bool_type": "it must be true or false",
    "dataclass_type": "it must be a mapping of keys",
    "tuple_type": "it must be a list",
    "string_type": "it must be text",
}


def _problem(cls: type, error: ErrorDetails, section: str) -> str:
    """Return one line: the key, what was given, what is needed."""
    loc, given, context = error["loc"], error["input"], error.get("ctx", {})
    if isinstance(context.get("error"), RecipeError):  # from the check of a section; it contains the keys
        return str(context["error"])
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc]
    key = (section + "".join(parts)).removeprefix(".")
    if error["type"] == "missing":
        return f"{key} is missing; it has no default"
    if error["type"] == "unexpected_keyword_argument":
        for name in loc[:-1]:
            cls = typing.get_type_hints(cls)[str(name)]
        known = _keys_below(cls, key.removesuffix(str(loc[-1])))
        leaves = {name.rpartition(".")[2]: name for name in reversed(known)}
        near = difflib.get_close_matches(str(loc[-1]), leaves, n=1, cutoff=0.5)
        return f"unknown key {key}; " + (
            f"did you mean {leaves[near[0]]}?" if near else f"known keys: {', '.join(typing.get_type_hints(cls))}"
        )
    wanted = _WORDS.get(error["type"]) or error["msg"].removeprefix("Value error, ").replace("Input should", "it must")
    quoted = f' (write it in quotes: "{given}")' if error["type"] == "string_type" and given is not None else ""
    return f"{key} = {given!r}: {wanted}{quoted}"


def _keys_below(cls: type, prefix: str) -> list[str]:
    """Return the dotted names of all keys of a section, those of its own before those of its sections."""
    hints = typing.get_type_hints(cls)
    inner = [(name, hint) for name, hint in hints.items() if dataclasses.is_dataclass(hint)]
    below = [key for name, hint in inner for key in _keys_below(typing.cast(type, hint), f"{prefix}{name}.")]
    return [prefix + name for name in hints] + below
