"""The draft head in a plan: its accept_length by draft length, and its size, which determines the cost of a pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from toolkit.errors import PlanError
from toolkit.head_kinds import HEAD_KINDS
from toolkit.heads.draft_head import DraftHead, build_head, head_class
from toolkit.heads.head_config import HeadConfig
from toolkit.plan.model_size import CACHE_BYTES, Cache, ModelSize
from toolkit.train_settings import HeadSettings

USUAL_VOCABULARY = 32_000  # of EAGLE-3 heads


@dataclass(frozen=True)
class DraftCost:
    """kind: the head's name in head_kinds.py. size: the head as a model. accept_length: by drafts in a chain.

    source: the origin of accept_length. path: the head's directory in launch lines; None: the target's own MTP layers.
    config: of a head that is at hand; DFlash and DSpark are one kind, which other engines tell apart.
    """

    kind: str
    size: ModelSize
    accept_length: Mapping[int, float]
    source: str
    path: str | None = None
    config: HeadConfig | None = None


def parse_accept_lengths(text: str) -> dict[int, float]:
    """Parse `1:1.7,2:2.18` to {1: 1.7, 2: 2.18}. Raises `PlanError` for impossible lengths."""
    found: dict[int, float] = {}
    for pair in text.split(","):
        length, colon, value = pair.partition(":")
        try:
            drafts, committed = int(length), float(value)
        except ValueError:
            drafts, committed = 0, 0.0
        if not colon or drafts < 1 or not 1 <= committed <= drafts + 1 or drafts in found:
            raise PlanError(
                f"accept length is {pair!r}; expected DRAFTS:TOKENS, each DRAFTS once, TOKENS from 1 to DRAFTS + 1, "
                "such as 1:1.7,2:2.18,3:2.44"
            )
        found[drafts] = committed
    ordered = [found[drafts] for drafts in sorted(found)]
    if ordered != sorted(ordered):
        raise PlanError(f"accept lengths {text} decrease; a longer chain must commit at least as many tokens")
    return dict(sorted(found.items()))


def measured_accept_lengths(measured: Any) -> tuple[dict[int, float], str]:
    """Return the accept_length by draft length, and its source, from the content of measured.json.

    The values come from the measured chain with the most steps: a shorter chain commits what the longer one does up to
    its depth. Raises `PlanError` when no chain was measured.
    """
    rows = (measured or {}).get("rows") or [] if isinstance(measured, dict) else []
    fixed = [row for row in rows if row.get("shape") != "adaptive"]
    chains = [row for row in fixed if row.get("top_k") == 1 and row.get("accept_rate")]
    if not chains:
        raise PlanError("no chain was measured with this head; give --accept-lengths or run `toolkit bench acceptance`")
    row = max(chains, key=lambda row: row["num_steps"])
    found, reached, committed = {}, 1.0, 1.0
    for depth, rate in enumerate(row["accept_rate"], start=1):
        reached *= rate or 0.0
        committed += reached
        found[depth] = committed
    where = f"measured.json: a chain of {row['num_steps']}, temperature {row.get('temperature')}"
    return found, f"{where}, {row.get('verify_steps')} verify steps"


def native_mtp(size: ModelSize) -> ModelSize:
    """Return the size of the target's own MTP layer: one of its layers and a projection from 2 * hidden_size.

    Raises `PlanError` when the target has none.
    """
    if not size.native_mtp:
        raise PlanError(f"{size.name} has no MTP layers (num_nextn_predict_layers); choose another head")
    layers = size.layers
    experts = size.experts / size.moe_layers if size.moe_layers else 0.0
    return replace(
        size,
        name=f"MTP layer of {size.name}",
        layers=1,
        body=size.body / layers + 2 * size.hidden_size**2,
        experts=experts,
        moe_layers=1 if experts else 0,
        embedding=0.0,
        cache=_one_layer(size.cache, layers),
        shared_head=True,
    )


def usual_head(kind: str, config: Any, size: ModelSize) -> ModelSize:
    """Return the size of a head of this kind, with one layer, for the target of this text configuration."""
    settings = HeadSettings(kind, aux_layer_ids=(0, 1, 2))  # their number decides the size
    sizes = {"vocab_size": config.vocab_size, "draft_vocab_size": USUAL_VOCABULARY, "n_layers": size.layers}
    shape = head_class(kind).config_class.from_settings(settings, config, **sizes)
    with torch.device("meta"):
        head = build_head(replace(shape, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}))
    return head_size(head, size)


def usual_draft(kind: str | None, config: Any, size: ModelSize, accept_length: Mapping[int, float]) -> DraftCost:
    """Return a head without a directory. kind None: the target's own layers, else the first kind of the registry."""
    in_target = {name: head_class(name).config_class.in_target for name in HEAD_KINDS}
    kind = kind or next(name for name, own in in_target.items() if own == bool(size.native_mtp))
    if in_target[kind]:
        return DraftCost(kind, native_mtp(size), accept_length, "as stated")
    return DraftCost(kind, usual_head(kind, config, size), accept_length, "as stated", "HEAD")


def head_size(head: DraftHead, size: ModelSize) -> ModelSize:
    """Return the size of a loaded head; its output matrix may be the target's."""
    config = head.config
    own = sum(parameter.numel() for parameter in head.parameters())
    tables = sum(part.weight.numel() for part in head.modules() if isinstance(part, nn.Embedding))  # read by rows
    matrix = config.output_size * config.hidden_size if config.own_vocabulary else 0
    layers = config.stages * config.layers
    cache = _plain_cache(config.num_attention_heads, config.num_key_value_heads, config.head_dim, layers)
    return ModelSize(
        name="the head",
        hidden_size=config.hidden_size,
        heads=config.num_attention_heads,
        layers=layers,
        body=own - matrix - tables,
        head=matrix or size.head,
        embedding=float(tables),
        cache=cache,
        shared_head=not matrix,
        one_pass=bool(config.drafts_at_once),
    )


def _plain_cache(heads: int, kv_heads: int, head_dim: int, layers: int = 1) -> Cache:
    flops = 4 * layers * heads * head_dim
    return Cache(2 * layers * kv_heads * head_dim * CACHE_BYTES, kv_heads, flops, flops)


def _one_layer(cache: Cache, layers: int) -> Cache:
    return replace(
        cache,
        token_bytes=cache.token_bytes / layers,
        flops=cache.flops / layers,
        prefill_flops=cache.prefill_flops / layers,
        window_bytes=cache.window_bytes / layers,
        window_flops=cache.window_flops / layers,
    )
