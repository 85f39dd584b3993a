"""The size of a model and of a draft head: weights by part, and cache bytes and operations per token.

Parameters are counted on the model that transformers builds from the configuration on the meta device. Cache and
attention are computed by formulas for the supported kinds of attention.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from toolkit.errors import PlanError
from toolkit.head_kinds import HEAD_KINDS
from toolkit.heads.draft_head import DraftHead, build_head, head_class
from toolkit.heads.head_config import HeadConfig
from toolkit.targets.facts import NATIVE_MTP_KEYS
from toolkit.targets.load import load_config, split_revision, stated_quantization
from toolkit.train_settings import HeadSettings

CACHE_BYTES = 2  # bf16
USUAL_VOCABULARY = 32_000  # of EAGLE-3 heads
MOE = {
    "n_experts": ("n_routed_experts", "num_experts", "num_local_experts"),
    "chosen": ("num_experts_per_tok", "num_experts_per_token", "moe_top_k"),
}


@dataclass(frozen=True)
class Attention:
    """`layers` layers with cache and attention of one kind.

    token_bytes: cache bytes of a layer per token. flops: operations of a layer for one query token per token of
    context, in decode; prefill_flops: in prefill. window: the tokens that a query sees at most.
    """

    layers: float
    token_bytes: float
    flops: float
    prefill_flops: float
    window: float = math.inf


@dataclass(frozen=True)
class Cache:
    """Cache and attention of all layers.

    shards: the number of GPUs over which the cache of a token can be split (1 for multi-head latent attention, which
    stores one vector for all heads).
    """

    parts: tuple[Attention, ...]
    shards: int

    def bytes(self, context: float) -> float:
        """Return the cache bytes of one request with `context` tokens."""
        return sum(one.layers * one.token_bytes * min(context, one.window) for one in self.parts)

    def operations(self, context: float) -> float:
        """Return the attention operations of one query token after `context` tokens."""
        return sum(one.layers * one.flops * min(context, one.window) for one in self.parts)

    def prefill_operations(self, tokens: float) -> float:
        """Return the attention operations of a prompt: half of a causal square of the window, and then all of it."""
        seen = [(one, min(tokens, one.window)) for one in self.parts]
        return sum(one.layers * one.prefill_flops * (tokens * w - w * w / 2) for one, w in seen)

    def of_one_layer(self, layers: int) -> Cache:
        """Return the mean of all `layers`."""
        return replace(self, parts=tuple(replace(one, layers=one.layers / layers) for one in self.parts))


@dataclass(frozen=True)
class ModelSize:
    """Parameters by part.

    body: the layers without routed experts. experts: all routed experts; a token uses `chosen` of `n_experts` in each
    of `moe_layers`. head: the output matrix. embedding: 0 if tied to it. bits: per weight of body and experts; head and
    embedding have 16. shared_head: the output matrix is the target's, which is read in every pass but not stored again.
    one_pass: of a head, whether one pass drafts all levels. max_context: max_position_embeddings of the configuration.
    """

    name: str
    hidden_size: int
    heads: int
    layers: int
    body: float
    head: float
    embedding: float
    cache: Cache
    bits: float = 16
    experts: float = 0.0
    n_experts: int = 0
    chosen: int = 0
    moe_layers: int = 0
    experts_bits: float | None = None
    native_mtp: int = 0
    shared_head: bool = False
    one_pass: bool = False
    max_context: int | None = None

    @property
    def parameters(self) -> float:
        return self.body + self.experts + self.head + self.embedding

    @property
    def active(self) -> float:
        """Parameters that one token uses."""
        return self.body + self.head + (self.experts * self.chosen / self.n_experts if self.n_experts else 0.0)

    @property
    def body_bytes(self) -> float:
        return self.body * self.bits / 8

    @property
    def expert_bytes(self) -> float:
        return self.experts * (self.bits if self.experts_bits is None else self.experts_bits) / 8


def target_size(name: str, weight_bits: float | None = None) -> tuple[ModelSize, Any, str, str | None]:
    """Return size, text configuration, source and revision of a target.

    name: a hub id (org/name@revision), a directory, or the path of a config.json. weight_bits: bits of the layers'
    weights, which override the configuration. Raises `PlanError` for attention or quantization that is not supported
    and for bits out of range, `TargetError` when it is no causal LM.
    """
    if Path(name).name == "config.json":
        name = str(Path(name).expanduser().parent)
    name, revision = split_revision(name)
    full_config, source, resolved = load_config(name, revision)
    config: Any = full_config.get_text_config(decoder=True)
    bits = weight_bits_of(stated_quantization(full_config), name, weight_bits)
    return size_of_config(config, name, *bits), config, source, None if Path(source).is_dir() else resolved


def size_of_config(config: Any, name: str, bits: float = 16, experts_bits: float | None = None) -> ModelSize:
    """Return the size of a text configuration whose layers' weights have `bits`. Raises `PlanError`."""
    counts = count_parameters(config)
    stated = {key: next((n for one in names if (n := getattr(config, one, None))), 0) for key, names in MOE.items()}
    if counts["experts"] and not all(stated.values()):
        raise PlanError(f"{name} has experts, but its configuration lacks their number or the number per token")
    return ModelSize(
        name=name,
        hidden_size=config.hidden_size,
        heads=config.num_attention_heads,
        layers=config.num_hidden_layers,
        cache=cache_of(config, name),
        bits=bits,
        experts_bits=experts_bits,
        native_mtp=next((n for one in NATIVE_MTP_KEYS if (n := getattr(config, one, None))), 0),
        max_context=getattr(config, "max_position_embeddings", None),
        **(counts | (stated if counts["experts"] else {})),
    )


def count_parameters(config: Any) -> dict[str, int]:
    """Count parameters by part, on the model that transformers builds for this configuration on the meta device."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    experts, layers = 0, set()
    for name, value in model.named_parameters():
        before, inside, _ = name.partition(".experts.")
        if inside and "shared" not in before:
            experts += value.numel()
            layers.add(before)
    total = sum(value.numel() for value in model.parameters())
    own = 0 if embedding is head else embedding.numel()
    return {
        "experts": experts,
        "moe_layers": len(layers),
        "head": head.numel(),
        "embedding": own,
        "body": total - experts - head.numel() - own,
    }


def cache_of(config: Any, name: str) -> Cache:
    """Return cache and attention of a text configuration. Raises `PlanError` for attention that is not supported."""
    if getattr(config, "index_topk", None):
        raise PlanError(f"{name} has sparse attention (index_topk), which is not supported; plan another target")
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    rank = getattr(config, "kv_lora_rank", None)
    if rank:
        return _latent_cache(config, layers, heads, rank)
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) or 0
    kinds = list(kinds or ["sliding_attention" if window else "full_attention"] * layers)
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise PlanError(f"{name} has layers of {', '.join(unknown)}; supported are full and sliding attention and MLA")
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    layer = Attention(0, 2 * kv_heads * size * CACHE_BYTES, 4 * heads * size, 4 * heads * size)
    parts = {"full_attention": layer, "sliding_attention": replace(layer, window=window)}
    return Cache(tuple(replace(parts[kind], layers=kinds.count(kind)) for kind in dict.fromkeys(kinds)), kv_heads)


def _latent_cache(config: Any, layers: int, heads: int, rank: int) -> Cache:
    """Return the cache of multi-head latent attention (arXiv 2405.04434): one latent and one rotary key for all heads.

    In decode, all heads read the latent as key and value; in prefill, keys and values are expanded.
    """
    rope = config.qk_rope_head_dim
    expanded = config.qk_nope_head_dim + rope + config.v_head_dim
    layer = Attention(layers, (rank + rope) * CACHE_BYTES, 2 * heads * (2 * rank + rope), 2 * heads * expanded)
    return Cache((layer,), shards=1)


def weight_bits_of(quantization: Any, name: str, given: float | None = None) -> tuple[float, float | None]:
    """Return the bits per weight of the layers, and of experts if they differ; or the `given` ones, of --weight-bits.

    Raises `PlanError` if they are unknown or out of range."""
    if given is not None and not 0 < given <= 32:
        raise PlanError(f"--weight-bits is {given:g}; expected a number above 0 and up to 32, such as 4, 8 or 16")
    if given is not None:
        return given, None
    if quantization is None:
        return 16, None
    stated = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method = stated.get("quant_method")
    if method in ("fp8", "fbgemm_fp8"):
        return 8, None
    if method in ("gptq", "awq") and stated.get("bits"):
        return float(stated["bits"]), None
    if method == "mxfp4":
        return 16, 4.25  # OCP microscaling: one 8-bit scale per 32 values; attention stays in bf16
    raise PlanError(f"{name}: the number of bits of {method!r} weights is unknown; give --weight-bits")


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


def check_accept_lengths(lengths: Mapping[int, float]) -> dict[int, float]:
    """Return accept_lengths by drafts in order of the drafts. Raises `PlanError` for impossible ones."""
    ordered = dict(sorted(lengths.items()))
    values = list(ordered.values())
    if not all(1 <= value <= drafts + 1 for drafts, value in ordered.items()) or values != sorted(values):
        raise PlanError(
            f"accept lengths by drafts are {ordered}; expected 1 to DRAFTS + 1 tokens, at least as many for more "
            "drafts, such as 1:1.7,2:2.18,3:2.44"
        )
    return ordered


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
        cache=size.cache.of_one_layer(layers),
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
    layers = config.mtp_layers * config.layers
    flops = 4 * config.num_attention_heads * config.head_dim
    token_bytes = 2 * config.num_key_value_heads * config.head_dim * CACHE_BYTES
    return ModelSize(
        name="the head",
        hidden_size=config.hidden_size,
        heads=config.num_attention_heads,
        layers=layers,
        body=own - matrix - tables,
        head=matrix or size.head,
        embedding=float(tables),
        cache=Cache((Attention(layers, token_bytes, flops, flops),), config.num_key_value_heads),
        shared_head=not matrix,
        one_pass=bool(config.drafts_at_once),
    )
