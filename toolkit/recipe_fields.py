"""Fields of a recipe's sections with their meaning, and the constraints of their values."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeFloat

from toolkit.head_kinds import HEAD_KINDS

T = TypeVar("T")
LossName = Literal["soft_cross_entropy", "hard_cross_entropy", "total_variation", "lk_hybrid", "dspark"]
Beta = Annotated[float, Field(ge=0, lt=1)]


def setting(default: T, meaning: str, *, not_in_fingerprint: bool = False) -> T:
    """Return a field with its meaning, which the recipe reference prints. not_in_fingerprint: it does not affect the
    result of its stage."""
    key: Any = field(default=default, metadata={"meaning": meaning, "not_in_fingerprint": not_in_fingerprint})
    return key


def needs(valid: Callable[[Any], object], needed: str) -> AfterValidator:
    """Return a constraint: values for which `valid` is false are errors that say `needed`."""

    def checked(value: Any) -> Any:
        if not valid(value):
            raise ValueError(f"it must {needed}")
        return value

    checked.__doc__ = needed  # for the recipe reference
    return AfterValidator(checked)


def _one_or_some(given: Any) -> Any:
    """A text as the only one of its list. (After this a list is no longer JSON, and would be no tuple.)"""
    return (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list) else given


OneOrSome = Annotated[tuple[str, ...], BeforeValidator(_one_or_some)]
HeadName = Annotated[str, needs(HEAD_KINDS.__contains__, f"be one of {', '.join(HEAD_KINDS)}")]
Some = needs(len, "hold at least one value")
EachOnce = needs(lambda values: len(set(values)) == len(values), "hold each value once")
Shape = Annotated[
    str,
    needs(re.compile(r"\d+(,\d+,\d+)?").fullmatch, 'be "num_steps,top_k,num_draft_tokens" or "num_draft_tokens"'),
]
ShapeOrAdaptive = Annotated[
    str,
    needs(
        re.compile(r"adaptive|mtp-[34]|\d+(,\d+,\d+)?").fullmatch,
        'be "adaptive", "num_steps,top_k,num_draft_tokens" or "num_draft_tokens", or "mtp-3", "mtp-4"',
    ),
]
Shapes = Annotated[tuple[Shape, ...], Some, EachOnce]
Temperatures = Annotated[tuple[NonNegativeFloat, ...], Some]
