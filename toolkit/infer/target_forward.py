"""Runs the target's own Hugging Face layers over the engine's cache.

The engine registers one attention function with transformers; a forward's plan (cache, places, masks) reaches it as a
plain keyword of the body's forward. No mask function is registered under that name, so transformers builds no mask.

Shapes: B rows, N tokens a row, H hidden size, V vocabulary, Hq/Hkv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from toolkit.infer.attention_plan import AttentionPlan, PromptPlan, TreePlan
from toolkit.infer.kernels.reference import attend_causal
from toolkit.infer.kv_cache import KVCache, KVShape
from toolkit.target.load import Target, TargetError

ATTENTION = "toolkit"
PROBE_TOKENS = 8
# Keywords that say nothing about who attends to whom; any other one that is set is refused.
HARMLESS = frozenset(
    {"position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states", "return_dict"}
    | {"output_router_logits", "position_embeddings", "num_items_in_batch", "is_causal"}
)
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


class UnsupportedTargetError(TargetError):
    """The target's attention does something that the engine's does not, so its answers would not be the target's."""


def _planned_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    plan: AttentionPlan | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls in every layer; query [B, Hq, N, D], key and value [B, Hkv, N, D]."""
    unknown = [name for name, setting in others.items() if setting is not None and name not in HARMLESS]
    if unknown or plan is None or attention_mask is not None or dropout:
        raise UnsupportedTargetError(
            f"{type(module).__name__} calls its attention with {', '.join(unknown) or 'a mask, dropout or no plan'}, "
            "which the engine does not implement; use a target without it, or Hugging Face's generate"
        )
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    return plan.attend(module.layer_idx, query, key, value, scaling, sliding_window, softcap), None


AttentionInterface.register(ATTENTION, _planned_attention)


class _ShapeProbe:
    """A plan that caches nothing and writes down what each layer brings."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, tuple[int, int], torch.dtype]] = []

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None, softcap: float | None
    ) -> Tensor:
        if q.shape[-1] != v.shape[-1] or k.shape != v.shape or q.shape[1] % k.shape[1]:
            raise UnsupportedTargetError(
                f"layer {layer} has queries {tuple(q.shape)}, keys {tuple(k.shape)} and values {tuple(v.shape)} "
                "[rows, heads, tokens, width]; the engine needs equal widths, and query heads a multiple of key heads"
            )
        self.seen.append((layer, (k.shape[1], k.shape[3]), k.dtype))
        return attend_causal(q, k, v, scaling=scaling)


class TargetForward:
    """The target's body on the engine's attention. Other users of the model keep their own attention setting.

    Raises UnsupportedTargetError at construction if a layer's attention is not reached or does something unknown, or
    if the engine's logits differ from the model's own.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self._configs = _attention_configs(target.body)
        self.kv_shape = self._probe_shapes()
        self.max_context = _context_limit(target)
        self._compare_logits()

    def __call__(self, input_ids: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        """input_ids and positions [B, N] -> last hidden state after the final norm [B, N, H]."""
        with self._own_attention():
            out = self.target.body(input_ids=input_ids, position_ids=positions, use_cache=False, plan=plan)
        return out.last_hidden_state

    @contextmanager
    def _own_attention(self) -> Iterator[None]:
        before = [config._attn_implementation_internal for config in self._configs]
        for config in self._configs:
            config._attn_implementation_internal = ATTENTION
        try:
            yield
        finally:
            for config, setting in zip(self._configs, before, strict=True):
                config._attn_implementation_internal = setting

    def _probe_shapes(self) -> KVShape:
        probe = _ShapeProbe()
        device = self.target.device
        ids = torch.zeros(1, 2, dtype=torch.long, device=device)
        self(ids, torch.arange(2, device=device)[None], probe)
        layers = [layer for layer, _, _ in probe.seen]
        kinds = {kind for _, kind, _ in probe.seen}
        if layers != list(range(self.target.n_layers)) or len(kinds) != 1:
            raise UnsupportedTargetError(
                f"{type(self.target.model).__name__}: the engine's attention was called for layers {layers} with "
                f"(key heads, width) {sorted(kinds)}; it needs one call in each of {self.target.n_layers} layers, all "
                "of one shape"
            )
        (kv_heads, head_dim), dtype = probe.seen[0][1], probe.seen[0][2]
        return KVShape(self.target.n_layers, kv_heads, head_dim, dtype, device)

    def _compare_logits(self) -> None:
        """Half the tokens as a prompt, half as nodes behind it, against the model's own forward."""
        device = self.target.device
        ids = (torch.arange(PROBE_TOKENS, device=device) * 7919 % self.target.vocab_size)[None]
        at, half = torch.arange(PROBE_TOKENS, device=device)[None], PROBE_TOKENS // 2
        cache = KVCache(self.kv_shape)
        chain = torch.ones(1, half, half, dtype=torch.bool, device=device).tril()
        first = self(ids[:, :half], at[:, :half], PromptPlan(cache, 0, 1, half))
        rest = self(ids[:, half:], at[:, half:], TreePlan(cache, [half], chain, at[:, :half]))
        ours = self.target.logits(torch.cat((first, rest), dim=1)).float()
        theirs = self.target.model(input_ids=ids, use_cache=False).logits.float()
        difference = ((ours - theirs).norm() / theirs.norm()).item()
        allowed = 1e-3 if self.target.dtype == torch.float32 else 1e-1
        if not difference <= allowed:
            raise UnsupportedTargetError(
                f"{type(self.target.model).__name__}: the engine's logits differ from the model's own by "
                f"{difference:.2g} of their size (allowed: {allowed:g}); this family has an attention the engine does "
                "not reproduce"
            )


def _attention_configs(body: nn.Module) -> list[Any]:
    """The distinct configs inside the body whose attention setting its layers read."""
    configs = [getattr(module, "config", None) for module in body.modules()]
    return list({id(config): config for config in configs if hasattr(config, "_attn_implementation_internal")}.values())


def _context_limit(target: Target) -> int:
    """Positions the target can be used for; ropes that change with the length end where they would change."""
    config = target.config
    ropes = getattr(config, "rope_parameters", None) or {}
    every = [ropes, *(inner for inner in ropes.values() if isinstance(inner, dict))]
    if any(rope.get("rope_type") in LENGTH_DEPENDENT_ROPE for rope in every):
        name = "original_max_position_embeddings"
        stated = [rope.get(name) for rope in every] + [getattr(config, name, None)]
        return min([target.max_context, *(value for value in stated if value)])
    return target.max_context
