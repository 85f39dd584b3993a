"""The attention functions that transformers calls in every layer. Only this module handles their keywords.

For torch.compile attention is one opaque operator, which reads the forward's metadata from this module. So a compiled
body depends on its input sizes only, not on context, pages or mask.

Shapes: B rows, N tokens per row, Hq/Hkv heads, D head dim of queries and keys, Dv of values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from toolkit.infer.attention.metadata import AttentionMetadata
from toolkit.infer.kernels.paged_reference import Scoring

# layer module, q [B, Hq, N, D], k [B, Hkv, N, D], v [B, Hkv, N, Dv], scoring, other keywords of the call, those of the
# model's forward among them -> [B, N, Hq, Dv]
LayerAttention = Callable[[Any, Tensor, Tensor, Tensor, Scoring, dict[str, Any]], Tensor]


def register_attention(name: str, attend: LayerAttention) -> None:
    """Register `attend` with transformers as the attention implementation `name`.

    torch.compile and torch.export can trace through it.
    """

    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        *,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        scoring = Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
        return attend(module, query, key, value, scoring, {"attention_mask": attention_mask} | others), None

    AttentionInterface.register(name, attention)


COMPILED = "toolkit-compiled"  # its name in transformers' AttentionInterface


class _Forward(threading.local):
    """The forward that runs in this thread: its metadata, and the numbers of the layers that have not attended yet."""

    metadata: AttentionMetadata
    layers: Iterator[int]


_forward = _Forward()


@contextmanager
def attending(metadata: AttentionMetadata) -> Iterator[None]:
    """Context manager around one forward of a compiled body: its layers attend by `metadata`, in order."""
    _forward.metadata, _forward.layers = metadata, count()
    try:
        yield
    finally:
        del _forward.metadata


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """q [B, Hq, N, D], k [B, Hkv, N, D], v [B, Hkv, N, Dv] -> [B, N, Hq, Dv]."""
    scoring = Scoring(scaling, window, softcap, sinks)
    return _forward.metadata.attend(next(_forward.layers), q, k, v, scoring).contiguous()


def _shape(q: Tensor, k: Tensor, v: Tensor, *_scoring: Any) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


_library = torch.library.Library("toolkit", "FRAGMENT")
_library.define(
    "attend(Tensor q, Tensor k, Tensor v, float scaling, int? window, float? softcap, Tensor? sinks) -> Tensor"
)
_library.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("toolkit::attend", _shape)


def _opaque(_module: Any, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, _others: Any) -> Tensor:
    return torch.ops.toolkit.attend(q, k, v, *scoring)


register_attention(COMPILED, _opaque)
