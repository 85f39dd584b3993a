"""The function that transformers calls in every attention layer: the one place that knows its keywords.

Shapes: B rows, N tokens a row, Hq/Hkv heads, D head dim of queries and keys, Dv of values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from transformers import AttentionInterface

from toolkit.infer.kernels.paged_reference import Scoring


class LayerCall(NamedTuple):
    """What a layer hands on beside queries, keys, values and their scoring. others: keywords not known here, those of
    the model's own forward among them."""

    mask: Tensor | None
    dropout: float
    others: dict[str, Any]


# the layer, q [B, Hq, N, D], k [B, Hkv, N, D], v [B, Hkv, N, Dv], scoring, the call -> [B, N, Hq, Dv]
LayerAttention = Callable[[Any, Tensor, Tensor, Tensor, Scoring, LayerCall], Tensor]


def register_attention(name: str, attend: LayerAttention) -> None:
    """Targets whose attention setting is `name` attend by `attend`. torch.compile and torch.export trace through it."""

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
