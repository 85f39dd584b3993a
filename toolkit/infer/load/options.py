"""Fields of EngineConfig: their help texts and limits, and the error for their values."""

from __future__ import annotations

import dataclasses
import typing
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:  # the command line reads the options without torch
    from toolkit.infer.request.draft_tree import DraftShape

T = TypeVar("T")
LEAST = {
    "max_running_requests": 1,
    "draft_confidence": 0,
    "context_length": 2,  # a prompt token and an answer token
    "chunked_prefill_size": 1,
    "tensor_parallel_size": 1,
    "max_total_tokens": 16,  # a page
    "cuda_graph_max_bs": 1,
    "torch_compile_max_bs": 1,
}


def option(default: T, text: str, *, metavar: str | None = None, alias: str | None = None) -> T:
    """A field of EngineConfig with its help text. The text names other fields in backticks."""
    metadata = {"help": text, "metavar": metavar, "alias": alias}
    field: Any = dataclasses.field(default=default, metadata=metadata)
    return field


def choices_of(hint: Any) -> tuple[str, ...]:
    """The values of a Literal; empty for another type."""
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else ()


class ConfigError(ValueError):
    """Options of an engine that are unknown, out of range or incompatible with each other.

    Messages name options as fields in backticks (`draft`); commands print them as flags (--draft).
    """


def parse_shape(text: str, where: str) -> DraftShape:
    """Parse a shape. Raises ConfigError that begins with `where`, the source of the text."""
    from toolkit.infer.request.draft_tree import DraftShape
    from toolkit.infer.request.params import DraftShapeError

    try:
        return DraftShape.parse(text)
    except DraftShapeError as error:
        raise ConfigError(f"{where}: {error}") from error
