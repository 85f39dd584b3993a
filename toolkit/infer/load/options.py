"""Fields of EngineConfig with their help texts, limits and former names."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

T = TypeVar("T")
LEAST = {
    "max_running_requests": 1,
    "dynamic_rows": 0,
    "context_length": 2,  # a prompt token and an answer token
    "chunked_prefill_size": 1,
    "tensor_parallel_size": 1,
    "max_total_tokens": 16,  # a page
    "cuda_graph_max_bs": 1,
    "torch_compile_max_bs": 1,
}
RENAMED = {
    "max_batch": "max_running_requests",
    "max_context": "context_length",
    "mem_fraction": "mem_fraction_static",
}


def option(default: T, text: str, *, metavar: str | None = None, alias: str | None = None) -> T:
    """A field of EngineConfig with its help text. The text names other fields in backticks."""
    metadata = {"help": text, "metavar": metavar, "alias": alias}
    field: Any = dataclasses.field(default=default, metadata=metadata)
    return field
