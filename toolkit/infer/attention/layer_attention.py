"""The attention function that transformers calls in every layer. Only this module handles its keywords.

Shapes: B rows, N tokens per row, Hq/Hkv heads, D head dim of queries and keys, Dv of values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from transformers import AttentionInterface

from toolkit.infer.kernels.paged_reference import Scoring


class LayerCall(NamedTuple):
    """Arguments of a layer's attention call other than queries, keys, values and scoring. others: keywords that this
    module does not know, including those of the model's own forward."""

    mask: Tensor | None
    dropout: float
    others: dict[str, Any]


# layer module, q [B, Hq, N, D], k [B, Hkv, N, D], v [B, Hkv, N, Dv], scoring, call -> [B, N, Hq, Dv]
LayerAttention = Callable[[Any, Tensor, Tensor, Tensor, Scoring, LayerCall], Tensor]


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
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        scoring = Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
        return attend(module, query, key, value, scoring, LayerCall(attention_mask, dropout, others)), None

    AttentionInterface.register(name, attention)
