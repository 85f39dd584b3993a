"""A head as a plan sees it: how many tokens a round commits by draft length, and what a pass of it costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from toolkit.heads.draft_head import DraftHead
from toolkit.plan.errors import PlanError
from toolkit.plan.model_size import CACHE_BYTES, Cache, ModelSize

USUAL_VOCABULARY = 32_000  # of EAGLE-3 heads


@dataclass(frozen=True)
class Draft:
    """kind: its name in heads/registry.py. size: the head as a model. accept_length: by tokens drafted in a chain.
    source: where those are from. path: what a launch line calls its directory; None: the target's own layers.
    """

    kind: str
    size: ModelSize
    accept_length: Mapping[int, float]
    source: str
    path: str | None = None

    def committed(self, drafts: int) -> float:
        """Tokens a round of so many drafts commits; a plain step one."""
        return self.accept_length[drafts] if drafts else 1.0


def parse_accept_lengths(text: str) -> dict[int, float]:
    """`1:1.7,2:2.18` -> {1: 1.7, 2: 2.18}. Raises `PlanError` for lengths that cannot be."""
    found: dict[int, float] = {}
    for pair in text.split(","):
        length, colon, value = pair.partition(":")
        try:
            drafts, committed = int(length), float(value)
        except ValueError:
            drafts, committed = 0, 0.0
        if not colon or drafts < 1 or not 1 <= committed <= drafts + 1 or drafts in found:
            raise PlanError(
                f"accept lengths {pair!r}: DRAFTS:TOKENS is needed, each length once, tokens from 1 to DRAFTS + 1, "
                "such as 1:1.7,2:2.18,3:2.44"
            )
        found[drafts] = committed
    ordered = [found[drafts] for drafts in sorted(found)]
    if ordered != sorted(ordered):
        raise PlanError(f"accept lengths {text}: a longer chain commits no fewer tokens; these fall")
    return dict(sorted(found.items()))


def measured_accept_lengths(measured: Any) -> tuple[dict[int, float], str]:
    """By draft length, from the chain with most steps in measured.json: a shorter chain commits what the longer one
    does up to its depth. Raises `PlanError` when no chain was measured."""
    rows = (measured or {}).get("rows") or [] if isinstance(measured, dict) else []
    chains = [row for row in rows if row.get("top_k") == 1 and row.get("accept_rate")]
    if not chains:
        raise PlanError("no chain was measured with this head; give --accept-lengths, or `toolkit bench acceptance`")
    row = max(chains, key=lambda row: row["num_steps"])
    found, reached, committed = {}, 1.0, 1.0
    for depth, rate in enumerate(row["accept_rate"], start=1):
        reached *= rate or 0.0
        committed += reached
        found[depth] = committed
    where = f"measured.json: a chain of {row['num_steps']}, temperature {row.get('temperature')}"
    return found, f"{where}, {row.get('verify_steps')} verify steps"


def native_mtp(size: ModelSize) -> ModelSize:
    """The target's own MTP layer: one of its layers (with experts where it has them), and two widths into one."""
    if not size.native_mtp:
        raise PlanError(f"{size.name} states no MTP layers of its own (num_nextn_predict_layers); choose another head")
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


def usual_eagle3(config: Any, size: ModelSize) -> ModelSize:
    """An EAGLE-3 head of the usual form for the target of this text configuration: no directory is at hand."""
    heads = config.num_attention_heads
    latent = size.cache.shards == 1 and getattr(config, "kv_lora_rank", None)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = heads if latent else (getattr(config, "num_key_value_heads", None) or heads)
    return _eagle3(size, config.intermediate_size, heads, kv_heads, head_dim, 3 * size.hidden_size, USUAL_VOCABULARY)


# By kind, a head of which no directory is at hand: its size, and what a launch line calls its directory (None: the
# target's own layers).
USUAL: dict[str, tuple[Callable[[Any, ModelSize], ModelSize], str | None]] = {
    "eagle3": (usual_eagle3, "HEAD"),
    "mtp": (lambda _config, size: native_mtp(size), None),
}


def usual_draft(kind: str | None, config: Any, size: ModelSize, accept_length: Mapping[int, float]) -> Draft:
    """A head of this kind for the target of this text configuration; None: its own MTP layers, or else EAGLE-3."""
    kind = kind or ("mtp" if size.native_mtp else "eagle3")
    build, path = USUAL[kind]
    return Draft(kind, build(config, size), accept_length, "as stated", path)


def head_size(head: DraftHead, size: ModelSize) -> ModelSize:
    """A loaded head as a model; its output matrix may be the target's."""
    config = head.config
    own = sum(parameter.numel() for parameter in head.parameters())
    matrix = config.output_size * config.hidden_size if config.own_vocabulary else 0
    layers = config.stages * config.layers
    cache = _plain_cache(config.num_attention_heads, config.num_key_value_heads, config.head_dim, layers)
    return ModelSize(
        name="the head",
        hidden_size=config.hidden_size,
        heads=config.num_attention_heads,
        layers=layers,
        body=own - matrix,
        head=matrix or size.head,
        embedding=0.0,
        cache=cache,
        shared_head=not matrix,
    )


def _eagle3(
    size: ModelSize, intermediate: int, heads: int, kv_heads: int, head_dim: int, features: int, vocabulary: int
) -> ModelSize:
    hidden = size.hidden_size
    attention = 2 * hidden * (heads + 2 * kv_heads) * head_dim + heads * head_dim * hidden
    return ModelSize(
        name="an EAGLE-3 head of the usual form",
        hidden_size=hidden,
        heads=heads,
        layers=1,
        body=features * hidden + attention + 3 * hidden * intermediate,
        head=vocabulary * hidden,
        embedding=0.0,
        cache=_plain_cache(heads, kv_heads, head_dim),
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
