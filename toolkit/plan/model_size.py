"""The size of a model: weights by part, and cache bytes and operations per token.

Parameters are counted on the model that transformers builds from the configuration on the meta device. Cache and
attention are computed by formulas for the supported kinds of attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from toolkit.errors import PlanError
from toolkit.targets.facts import NATIVE_MTP_KEYS
from toolkit.targets.load import load_config, split_revision

CACHE_BYTES = 2  # bf16
MOE = {
    "n_experts": ("n_routed_experts", "num_experts", "num_local_experts"),
    "chosen": ("num_experts_per_tok", "num_experts_per_token", "moe_top_k"),
}


@dataclass(frozen=True)
class Cache:
    """Cache and attention of all layers.

    token_bytes: cache bytes per token in layers with full attention. window_bytes: the same in layers that attend to
    the last `window` tokens. shards: the number of GPUs over which the cache of a token can be split (1 for multi-head
    latent attention, which stores one vector for all heads). flops, window_flops: operations of one query token per
    token of context in decode. prefill_flops: the same in prefill.
    """

    token_bytes: float
    shards: int
    flops: float
    prefill_flops: float
    window: int = 0
    window_bytes: float = 0.0
    window_flops: float = 0.0

    def bytes(self, context: float) -> float:
        """Return the cache bytes of one request with `context` tokens."""
        return self.token_bytes * context + self.window_bytes * min(context, self.window)

    def operations(self, context: float) -> float:
        """Return the attention operations of one query token after `context` tokens."""
        return self.flops * context + self.window_flops * min(context, self.window)


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
        return self.body + self.head + self.active_experts

    @property
    def active_experts(self) -> float:
        return self.experts * self.chosen / self.n_experts if self.n_experts else 0.0

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
    if weight_bits is not None and not 0 < weight_bits <= 32:
        raise PlanError(f"--weight-bits is {weight_bits:g}; expected a number above 0 and up to 32, such as 4, 8 or 16")
    path = Path(name).expanduser()
    if path.suffix == ".json":
        if path.name != "config.json":
            raise PlanError(f"target is {name}; expected a model's config.json, its directory or its hub id")
        name = str(path.parent)
    name, revision = split_revision(name)
    full_config, source, resolved = load_config(name, revision)
    config: Any = full_config.get_text_config(decoder=True)
    quantization = getattr(full_config, "quantization_config", None) or getattr(config, "quantization_config", None)
    bits = (weight_bits, None) if weight_bits is not None else weight_bits_of(quantization, name)
    return size_of_config(config, name, *bits), config, source, None if Path(source).is_dir() else resolved


def size_of_config(config: Any, name: str, bits: float = 16, experts_bits: float | None = None) -> ModelSize:
    """Return the size of a text configuration whose layers' weights have `bits`. Raises `PlanError`."""
    counts = _count(config)
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


def _count(config: Any) -> dict[str, int]:
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
    full, sliding = kinds.count("full_attention"), kinds.count("sliding_attention")
    a_layer, flops = 2 * kv_heads * size * CACHE_BYTES, 4 * heads * size
    return Cache(
        token_bytes=full * a_layer,
        shards=kv_heads,
        flops=full * flops,
        prefill_flops=full * flops,
        window=window if sliding else 0,
        window_bytes=sliding * a_layer,
        window_flops=sliding * flops,
    )


def _latent_cache(config: Any, layers: int, heads: int, rank: int) -> Cache:
    """Return the cache of multi-head latent attention (arXiv 2405.04434): one latent and one rotary key for all heads.

    In decode, all heads read the latent as key and value; in prefill, keys and values are expanded.
    """
    rope = config.qk_rope_head_dim
    expanded = config.qk_nope_head_dim + rope + config.v_head_dim
    return Cache(
        token_bytes=layers * (rank + rope) * CACHE_BYTES,
        shards=1,
        flops=layers * 2 * heads * (2 * rank + rope),
        prefill_flops=layers * 2 * heads * expanded,
    )


def weight_bits_of(quantization: Any, name: str) -> tuple[float, float | None]:
    """Return the bits per weight of the layers, and of experts if they differ. Raises `PlanError` if unknown."""
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
