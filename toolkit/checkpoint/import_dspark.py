"""DFlash and DSpark heads of other projects: z-lab's, DeepSpec's, SGLang's, vLLM's and speculators' forms.

Read in SGLang 0.5.23, vLLM 0.32.0 and speculators 0.9.0. What `DSparkHead` has no part for is refused by name.
Shapes: H head hidden size, r rank of the Markov bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from toolkit.checkpoint.errors import DraftDirError
from toolkit.checkpoint.import_parts import Tensors, check_aux_layers, read_token_map, renamed, target_width
from toolkit.checkpoint.layer_settings import layer_settings, note_embedding, note_unread, q_rows, refuse_unless
from toolkit.checkpoint.recognise import plain_name
from toolkit.checkpoint.resolution import Resolver
from toolkit.errors import TargetError
from toolkit.heads.dspark import DSparkConfig
from toolkit.targets.facts import TargetFacts, target_embedding
from toolkit.tokenmap.token_map import TokenMap
from toolkit.weights import WeightsError

EMBEDDING, MASK = "embed_tokens.weight", "mask_embedding"
W1, CONFIDENCE = "markov_head.markov_w1.weight", "confidence_head.proj.weight"
DROPPED = ("verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq")
NESTED = ("dflash_config", "dspark_config")
# Where the ids of the target's layers stand, and what is added to reach ours.
LAYER_KEYS = {"aux_hidden_state_layer_ids": 0, "eagle_aux_hidden_state_layer_ids": 0, "target_layer_ids": 1}
READ = frozenset(
    {"num_hidden_layers", "target_hidden_size", "draft_vocab_size", "block_size", "mask_token_id", "mask_token"}
    | {"markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov", "num_target_layers"}
    | {"sample_from_anchor", "dspark_bonus_anchor", "use_aux_hidden_state", "num_aux_hidden_states"}
    | {"sliding_window", "use_sliding_window", "use_swa", "swa_window_size", "layer_types", "tie_word_embeddings"}
    | {"speculators_model_type", "speculators_config", "speculators_version", "transformer_layer_config"}
    | {"sliding_window_non_causal", "causal", "is_causal", "attention_bias", "qkv_bias", "has_embed_tokens"}
    | {"has_lm_head", "rope_is_neox_style", "is_neox_style", "output_multiplier", "logit_scale"}
    | {*LAYER_KEYS, *NESTED}
)  # fmt: skip
# Settings with the one value that the head computes.
PLAIN: dict[str, Any] = {
    **dict.fromkeys(
        ("is_causal", "causal", "causal_head", "attention_bias", "qkv_bias", "attention_sink_bias", "use_swa"), False
    ),
    **dict.fromkeys(("use_gemma_norm", "add_swa_attention_sink_bias", "gating", "shift_label"), False),
    **dict.fromkeys(("projector_type", "quantization_config"), None),
    **dict.fromkeys(("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"), 0),
    "final_logit_softcapping": 0,
    **dict.fromkeys(("output_multiplier", "logit_scale", "attention_value_scale"), 1.0),
    **dict.fromkeys(("rope_is_neox_style", "is_neox_style", "use_aux_hidden_state"), True),
    "markov_head_type": "vanilla",
}
# Parts of tensor names, and what they belong to.
OTHER_PARTS = {
    "qkv_proj": "a fused qkv_proj (Laguna's form); q_proj, k_proj and v_proj are needed",
    "g_proj": "gated attention (Laguna's form)",
    "aux_hidden_norms": "a norm of each auxiliary layer (Laguna's form)",
    "sink": "attention sinks",
    "_proj.bias": "biases in its attention",
    "markov_head.gate_proj": "a gated Markov bias",
    "markov_head.joint_proj": "a recurrent Markov bias",
    "prefix_gru": "Domino's projector",
    "embed_proj": "Domino's projector",
    "_conv.": "grouped convolutions (DFlash2)",
    "candidate_selector": "a selector of candidates (DFlash2)",
    "experts": "experts",
}
FAMILIES = ("qwen3", "llama")  # some writers leave the target's here; the norms of queries and keys decide


def import_dspark(
    config: Mapping[str, Any], stored: Mapping[str, torch.Tensor], resolver: Resolver, facts: TargetFacts | None
) -> tuple[DSparkConfig, Tensors, TokenMap, torch.Tensor | None]:
    """Config, the head's tensors, token map, and the embedding that came with the checkpoint (None without one).

    Raises `DraftDirError`, `WeightsError`, `TokenMapError`.
    """
    said = _flat(config)
    speculators = "transformer_layer_config" in config
    layer = {**config["transformer_layer_config"]} if speculators else said
    tensors = renamed(stored, _our_name, DROPPED, resolver)
    embedding = tensors.pop(EMBEDDING, None)
    note_embedding(embedding, resolver)
    _refuse_other_parts({**said, **layer}, tensors)
    shapes = layer_settings(layer, q_rows(tensors, "layers.0."), resolver)
    target_hidden = target_width(said, shapes)
    variants = _variants(said, tensors, shapes["hidden_size"], speculators, resolver)
    mask = said.get("mask_token_id")
    if mask is None and not resolver.overridden("mask_token_id"):
        raise DraftDirError(
            "config.json states no mask_token_id, whose embedding the masks are; give it with --set mask_token_id=ID"
        )
    mask = resolver.settle("mask_token_id", mask or 0, "as stated")
    _check_mask(tensors.pop(MASK, None), mask, embedding, facts)
    own_output = "lm_head.weight" in tensors
    if not own_output:
        resolver.note("lm_head.weight", "the target's", "absent: the target's output matrix scores the tokens")
    token_map = read_token_map(said, shapes["vocab_size"], tensors, resolver)
    ids = _layer_ids(said, resolver)
    check_aux_layers(ids, tensors, target_hidden, facts)
    note_unread({**layer, **said}, READ | PLAIN.keys(), resolver)
    try:
        return (
            DSparkConfig(
                **shapes,
                target_hidden_size=target_hidden,
                draft_vocab_size=token_map.size,
                aux_layer_ids=ids,
                num_hidden_layers=_layers(layer, tensors),
                mask_token_id=mask,
                own_output=own_output,
                **variants,
            ),
            tensors,
            token_map,
            embedding,
        )
    except ValueError as error:
        raise DraftDirError(str(error)) from error


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, with those of `dflash_config` and `dspark_config`. Raises `DraftDirError` where two differ."""
    flat = {key: value for key, value in config.items() if key not in NESTED}
    for place in NESTED:
        for key, value in (config.get(place) or {}).items():
            if flat.get(key) is not None and value is not None and flat[key] != value:
                raise DraftDirError(
                    f"config.json: {key} is {flat[key]}, and in {place} {value}; leave the wrong one out"
                )
            flat[key] = value if flat.get(key) is None else flat[key]
    return flat


def _our_name(name: str) -> str:
    return plain_name(name).replace("draft_id_to_target_id", "d2t")


def _refuse_other_parts(config: Mapping[str, Any], tensors: Tensors) -> None:
    """Raises `DraftDirError` for parts and settings that a DSpark head has no place for."""
    family = config.get("model_type")
    if family not in (None, *FAMILIES):
        raise DraftDirError(f"config.json: model_type is {family!r}; only layers of Qwen3's form are supported")
    for part, what in OTHER_PARTS.items():
        if any(part in name for name in tensors):
            raise DraftDirError(f"it has {what}, which a DSpark head has no place for")
    sliding = "sliding_attention" in (config.get("layer_types") or ())
    windowed = config.get("use_sliding_window") and config.get("sliding_window") and not config.get("layer_types")
    if sliding or windowed:
        raise DraftDirError(
            "config.json: its layers have a sliding window; a block of DFlash or DSpark here sees all its context"
        )
    for key, value in PLAIN.items():
        refuse_unless(config, key, value)
    if "layers.0.self_attn.q_norm.weight" not in tensors:
        raise DraftDirError("it lacks layers.0.self_attn.q_norm.weight; layers of Qwen3's form are needed")


def _variants(
    said: Mapping[str, Any], tensors: Tensors, width: int, speculators: bool, resolver: Resolver
) -> dict[str, Any]:
    """The size of the block, the Markov bias, and the confidence."""
    rank = tensors[W1].shape[-1] if W1 in tensors else 0
    stated = said.get("markov_rank")
    if stated is not None and stated != rank:
        raise WeightsError(
            f"config.json: markov_rank is {stated}, but {W1} {f'has {rank} columns' if rank else 'is absent'}"
        )
    words = (said.get("speculators_model_type") or "") + " ".join(said.get("architectures") or ())
    dspark = "dspark" in words.lower() or rank > 0
    anchor = said.get("sample_from_anchor")
    if anchor is None:
        doubt = "; vLLM reads an absent one as false: if accept_length is near 1, try --set sample_from_anchor=false"
        anchor = resolver.settle(
            "sample_from_anchor",
            dspark,
            f"not stated: {'DSpark drafts' if dspark else 'DFlash does not draft'} from the first place"
            + (doubt if dspark and speculators else ""),
            warning=dspark and speculators,
        )
    bonus = said.get("dspark_bonus_anchor")
    if bonus is not None and bool(bonus) == anchor:
        raise DraftDirError(f"config.json: sample_from_anchor and dspark_bonus_anchor are both {anchor}; one is wrong")
    block = said.get("block_size")
    if block is None:
        raise DraftDirError("config.json states no block_size; copy the file again from its source")
    if dspark and not anchor and not speculators:
        resolver.note("block_size", block + 1, f"SGLang and vLLM count drafts, {block}; the first place drafts nothing")
        block += 1
    return {"block_size": block, "markov_rank": rank, "sample_from_anchor": bool(anchor)} | _confidence(
        said, tensors, width, rank, resolver
    )


def _confidence(
    said: Mapping[str, Any], tensors: Tensors, width: int, rank: int, resolver: Resolver
) -> dict[str, bool]:
    """By its tensor. Raises `WeightsError` where it reads something else than a state and what the bias reads."""
    if CONFIDENCE not in tensors:
        if said.get("enable_confidence_head"):
            resolver.note("confidence", False, "the config has it, the weights have not", warning=True)
        return {"confidence": False, "confidence_with_markov": False}
    columns = tensors[CONFIDENCE].shape[-1]
    with_markov = bool(rank) and columns == width + rank
    if not with_markov and columns != width:
        raise WeightsError(f"wrong shape: {CONFIDENCE} reads {columns} values; {width} or {width + rank} are needed")
    stated = said.get("confidence_head_with_markov")
    if stated is not None and bool(stated) != with_markov:
        raise WeightsError(f"config.json: confidence_head_with_markov is {stated}, but {CONFIDENCE} reads {columns}")
    return {"confidence": True, "confidence_with_markov": with_markov}


def _check_mask(own: torch.Tensor | None, mask: int, embedding: torch.Tensor | None, facts: TargetFacts | None) -> None:
    """Raises `DraftDirError` for a mask embedding that is not the vocabulary's row, or cannot be compared with it."""
    if own is None:
        return
    try:
        rows = embedding if embedding is not None else None if facts is None else target_embedding(facts)
    except TargetError:
        rows = None
    if rows is None or mask >= len(rows) or not torch.equal(own.flatten().to(rows.dtype), rows[mask]):
        raise DraftDirError(
            f"it has a mask_embedding of its own, which is not the embedding of token {mask} as far as can be seen "
            "here; masks that are the target's embedding of a token are needed"
        )


def _layer_ids(said: Mapping[str, Any], resolver: Resolver) -> tuple[int, ...]:
    """As indices into HF hidden_states, our convention (id k = input of layer k)."""
    found = {key: tuple(i + by for i in said[key]) for key, by in LAYER_KEYS.items() if said.get(key)}
    if not found and not resolver.overridden("aux_layer_ids"):
        raise DraftDirError(
            "config.json states no layers of the target; give them with --set aux_layer_ids=a,b,c (id k = input of "
            "layer k, the output of layer k-1)"
        )
    if len(set(found.values())) > 1 and not resolver.overridden("aux_layer_ids"):
        raise DraftDirError(
            "config.json: "
            + " and ".join(f"{key} {list(said[key])}" for key in found)
            + " are different layers; give the right ones with --set aux_layer_ids=a,b,c (id k = input of layer k)"
        )
    key, ids = next(iter(found.items()), ("", ()))
    rule = "outputs, so plus 1" if LAYER_KEYS.get(key) else "id k is the input of layer k"
    return tuple(resolver.settle("aux_layer_ids", ids, f"{key} {list(said.get(key) or ())}: {rule}"))


def _layers(layer: Mapping[str, Any], tensors: Tensors) -> int:
    found = len({name.split(".")[1] for name in tensors if name.startswith("layers.")})
    stated = layer.get("num_hidden_layers")
    if stated not in (None, found):
        raise DraftDirError(f"config.json: num_hidden_layers is {stated}, the weights have {found}")
    return found
