"""Checks once, at load, which attention a target's layers use, and raises an error if the engine does not support it.

transformers states the attention pattern twice: in the mask that it builds for each kind of layer, and in the layer's
keywords (`sliding_window`) for kernels without a mask. The engine uses the keywords. So the probe lets transformers
build its masks, takes their mask functions, and compares these with the keywords over the whole context. This finds a
chunked, bidirectional or missing window although the probe's forward has only a few tokens.

Shapes: B rows, N tokens per row, Hq/Hkv heads, D head dim of queries and keys, Dv of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionMaskInterface

from toolkit.infer.attention.layer_attention import register_attention
from toolkit.infer.cache.kv_cache import KVShape
from toolkit.infer.kernels.paged_reference import Scoring
from toolkit.infer.kernels.reference import attend_causal
from toolkit.infer.request.params import UnsupportedTargetError

PROBE = "toolkit-probe"
# Keywords without influence on the attention pattern; any other keyword that is set raises an error.
HARMLESS = frozenset(
    {"position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states", "return_dict"}
    | {"output_router_logits", "position_embeddings", "num_items_in_batch", "is_causal"}
)
SPREAD = 48  # positions of the context at which the masks are compared, besides those around a window's edge


class AttentionProbe:
    """Takes the place of attention metadata: caches nothing and records the shapes of each layer's keys and values.

    max_context: in tokens.
    """

    def __init__(self, max_context: int) -> None:
        self.max_context = max_context
        self.seen: list[tuple[int, tuple[int, int, int], torch.dtype]] = []  # layer, (Hkv, D, Dv), dtype
        self.scorings: dict[int, Scoring] = {}  # by layer

    def see(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> None:
        """Record a layer with q [B, Hq, N, D], k [B, Hkv, N, D], v [B, Hkv, N, Dv].

        Raises UnsupportedTargetError for other shapes.
        """
        sinks = scoring.sinks
        fits = q.shape[-1] == k.shape[-1] and k.shape[:3] == v.shape[:3] and q.shape[1] % k.shape[1] == 0
        if not fits or (sinks is not None and sinks.shape != (q.shape[1],)):
            sunk = "" if sinks is None else f" and sinks {tuple(sinks.shape)}"
            raise UnsupportedTargetError(
                f"layer {layer} has queries {tuple(q.shape)}, keys {tuple(k.shape)}, values {tuple(v.shape)}{sunk} "
                "[rows, heads, tokens, width]; the engine needs keys as wide as queries, as many values as keys, query "
                "heads a multiple of key heads, and one sink a query head"
            )
        self.seen.append((layer, (k.shape[1], k.shape[3], v.shape[3]), k.dtype))
        self.scorings[layer] = scoring

    def kv_shape(self, name: str, layers: Sequence[int], device: torch.device) -> KVShape:
        """Return the KV shape of a target whose attention layers have the numbers `layers`.

        Raises UnsupportedTargetError unless each of them called the attention once and all have one shape.
        """
        called = [layer for layer, _, _ in self.seen]
        kinds = {kind for _, kind, _ in self.seen}
        if called != list(layers) or len(kinds) != 1:
            raise UnsupportedTargetError(
                f"{name}: the engine's attention was called for layers {called} with (key heads, key width, value "
                f"width) {sorted(kinds)}; the engine needs one call in each of {len(layers)} layers, all of one shape"
            )
        (kv_heads, key_dim, value_dim), dtype = self.seen[0][1], self.seen[0][2]
        return KVShape(len(layers), kv_heads, key_dim, dtype, device, value_dim)


def _probe(module: Any, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, others: dict[str, Any]) -> Tensor:
    """Record a layer's call. Raises UnsupportedTargetError if the probe does not reach the layer, for a keyword that is
    neither in `scoring` nor HARMLESS, and for an unsupported mask."""
    name, mask, dropout = type(module).__name__, others.pop("attention_mask"), others.pop("dropout", 0.0)
    metadata: AttentionProbe | None = others.pop("attention_metadata", None)
    if metadata is None:
        raise UnsupportedTargetError(
            f"{name} does not hand the keywords of the model's forward on to its attention, so the engine's cache does "
            "not reach it; use a target of another family, or Hugging Face's generate"
        )
    unknown = [key for key, setting in others.items() if setting is not None and key not in HARMLESS]
    if unknown or dropout:
        raise UnsupportedTargetError(
            f"{name} calls its attention with {', '.join(unknown) or f'dropout {dropout}'}, which the engine does "
            "not implement; use a target without it, or Hugging Face's generate"
        )
    _check_mask(module, mask, scoring.window, metadata.max_context)
    metadata.see(module.layer_idx, q, k, v, scoring)
    return attend_causal(q, k, v, scaling=scoring.scaling)


def _noted_mask(batch_size: int, q_length: int, kv_length: int, mask_function: Any, **settings: Any) -> Tensor:
    """Return an all-True mask with its mask function as `rule`; transformers calls this to build a layer's mask."""
    mask = torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool, device=settings.get("device"))
    mask.rule = mask_function  # type: ignore[attr-defined]
    return mask


register_attention(PROBE, _probe)
AttentionMaskInterface.register(PROBE, _noted_mask)


def _check_mask(module: Any, mask: Tensor | None, window: int | None, max_context: int) -> None:
    """Raise UnsupportedTargetError unless the model's mask equals the engine's: causal, less than `window` positions
    back."""
    name = type(module).__name__
    if mask is not None and not hasattr(mask, "rule"):
        raise UnsupportedTargetError(
            f"{name} attends under a mask of its own making, which the engine does not know; use a target whose masks "
            "are causal or sliding windows, or Hugging Face's generate"
        )
    at = _compared_positions(window, max_context)
    q, k = at[:, None], at[None, :]
    ours = (k <= q) & (q - k < (window or max_context))
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.long)
    theirs = k <= q if mask is None else mask.rule(zero, zero, q[None, None], k[None, None])
    if not torch.equal(ours, torch.as_tensor(theirs).expand(1, 1, *ours.shape)[0, 0]):
        kind = "causal attention" if window is None else f"a window of {window}"
        raise UnsupportedTargetError(
            f"layer {module.layer_idx} ({name}) says {kind}, but the model masks it in another way, which the engine "
            "does not implement; use a target whose masks are causal or sliding windows, or Hugging Face's generate"
        )


def _compared_positions(window: int | None, max_context: int) -> Tensor:
    """Return positions over the whole context, ascending, including pairs at a distance of about one window."""
    spread = torch.linspace(0, max_context - 1, SPREAD).long()
    edges = [spread] if window is None else [spread, *(spread + window + step for step in (-1, 0, 1))]
    at = torch.cat(edges)
    return at[at < max_context].unique()
