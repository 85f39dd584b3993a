"""The attention functions that transformers calls in every layer. Only this module handles their keywords.

Shapes: B rows, N tokens per row, Hq/Hkv heads, D head dim of queries and keys, Dv of values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import AttentionInterface

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
