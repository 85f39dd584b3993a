"""The engine's attention as compilers see it: one opaque operator, which finds the forward's metadata in this module.

So what is compiled depends on the sizes of a layer's input alone, never on context, pages or mask.

Shapes: B rows, N tokens a row, Hq/Hkv heads, D head dim of queries and keys, Dv of values.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from toolkit.infer.attention.layer_attention import LayerCall, register_attention
from toolkit.infer.attention.metadata import AttentionMetadata
from toolkit.infer.kernels.paged_reference import Scoring

COMPILED = "toolkit-compiled"  # the name under which transformers finds it


class Now(threading.local):
    """The layer that runs in this thread: what the operator cannot be handed through compiled code."""

    plan: AttentionMetadata
    layer: int


now = Now()


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """q [B, Hq, N, D], k [B, Hkv, N, D], v [B, Hkv, N, Dv] -> [B, N, Hq, Dv]."""
    return now.plan.attend(now.layer, q, k, v, Scoring(scaling, window, softcap, sinks)).contiguous()


def _shape(q: Tensor, k: Tensor, v: Tensor, *_scoring: Any) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


_library = torch.library.Library("toolkit", "FRAGMENT")
_library.define(
    "attend(Tensor q, Tensor k, Tensor v, float scaling, int? window, float? softcap, Tensor? sinks) -> Tensor"
)
_library.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("toolkit::attend", _shape)


def _opaque(_module: Any, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, _call: LayerCall) -> Tensor:
    return torch.ops.toolkit.attend(q, k, v, *scoring)


register_attention(COMPILED, _opaque)
