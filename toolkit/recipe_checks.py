"""What the settings of a recipe are checked with, each telling the key, what came and what is needed."""

from __future__ import annotations

import re
from dataclasses import field
from typing import Any

from toolkit.recipe_yaml import RecipeError


def passing(default: Any) -> Any:
    """A field that does not decide the result of its stage."""
    return field(default=default, metadata={"passing": True})


def need(ok: bool, key: str, value: object, needed: str) -> None:
    if not ok:
        raise RecipeError(f"{key} = {value!r}, but {needed} is needed")


def check_positive(settings: object, section: str, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        need(value is None or value > 0, f"{section}.{name}", value, "a number above 0")


def check_sampling(settings: object, section: str) -> None:
    temperature, top_p = settings.temperature, settings.top_p  # type: ignore[attr-defined]
    need(temperature >= 0, f"{section}.temperature", temperature, "0 (greedy) or more")
    need(0 < top_p <= 1, f"{section}.top_p", top_p, "a share above 0 and up to 1")


def check_shapes(shapes: tuple[str, ...], key: str) -> None:
    for shape in shapes:
        need(re.fullmatch(r"\d+,\d+,\d+", shape) is not None, key, shape, '"steps,top_k,nodes"')
    need(len(shapes) > 0, key, shapes, "at least one draft shape")
    need(len(set(shapes)) == len(shapes), key, shapes, "each draft shape once")
