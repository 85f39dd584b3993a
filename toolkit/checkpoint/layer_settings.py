"""The settings of a foreign checkpoint that fix the shapes and the rotation of its decoder layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from toolkit.checkpoint.errors import DraftDirError
from toolkit.checkpoint.resolution import Resolver

DEFAULT_THETA = 10000.0
REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
# Keys that transformers writes into every config.json and that do not change a draft head's arithmetic.
UNREAD = frozenset(
    """_name_or_path _attn_implementation architectures model_type torch_dtype dtype transformers_version use_cache
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id initializer_range pretraining_tp
    attention_dropout hidden_dropout classifier_dropout max_window_layers tie_encoder_decoder return_dict
    output_attentions output_hidden_states is_decoder is_encoder_decoder add_cross_attention auto_map id2label label2id
    chunk_size_feed_forward cross_attention_hidden_size problem_type prefix task_specific_params finetuning_task
    tf_legacy_loss torchscript use_bfloat16 pruned_heads begin_suppress_tokens forced_bos_token_id forced_eos_token_id
    suppress_tokens tokenizer_class bad_words_ids length_penalty no_repeat_ngram_size num_return_sequences temperature
    top_k top_p typical_p repetition_penalty remove_invalid_values max_length min_length num_beams num_beam_groups
    do_sample early_stopping diversity_penalty encoder_no_repeat_ngram_size exponential_decay_length_penalty
    output_scores return_dict_in_generate unsloth_fixed license base_model""".split()
)


def layer_settings(config: Mapping[str, Any], q_rows: int, resolver: Resolver) -> dict[str, Any]:
    """HeadConfig's fields. `q_rows`: rows of q_proj, which decide head_dim where the config is silent.

    Raises `DraftDirError` for settings that change the layer in ways the head has no part for.
    """
    lacking = [name for name in REQUIRED if config.get(name) is None]
    if lacking:
        raise DraftDirError(f"config.json lacks {', '.join(lacking)}; copy the file again from its source")
    refuse_unless(config, "hidden_act", "silu")
    refuse_unless(config, "mlp_bias", False)
    refuse_unless(config, "quantization_config", None)
    refuse_unless(config, "partial_rotary_factor", 1.0)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim")
    if head_dim is None:
        head_dim = resolver.settle("head_dim", q_rows // heads, "not in the config: q_proj's rows over the heads")
    eps = config.get("rms_norm_eps")
    if eps is None:
        eps = resolver.settle("rms_norm_eps", 1e-6, "not in the config: LlamaConfig's default")
    return {
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "rms_norm_eps": eps,
        "vocab_size": config["vocab_size"],
        "sliding_window": _window(config, resolver),
        **_rope(config, resolver),
    }


def _window(config: Mapping[str, Any], resolver: Resolver) -> int | None:
    """The sliding window of the head's attention. `sliding_window` alone is ignored: configs often copy a target's.

    Raises `DraftDirError` when layers differ in it.
    """
    window, kinds = config.get("sliding_window"), config.get("layer_types") or []
    if not window or not ("sliding_attention" in kinds if kinds else config.get("use_sliding_window")):
        return None
    if set(kinds) - {"sliding_attention"}:
        raise DraftDirError(f"config.json: layer_types {kinds} differ; a head whose layers all have a window is needed")
    return resolver.settle("sliding_window", window, f"stated by {'layer_types' if kinds else 'use_sliding_window'}")


def refuse_unless(config: Mapping[str, Any], key: str, value: Any) -> None:
    """Raises `DraftDirError` when `key` is stated and is not `value`."""
    stated = config.get(key)
    if stated is not None and stated != value:
        raise DraftDirError(f"config.json: {key} is {stated!r}; only {value!r} is supported")


def _rope(config: Mapping[str, Any], resolver: Resolver) -> dict[str, Any]:
    """rope_parameters as transformers 5 holds them, and max_position_embeddings."""
    stated, scaling = config.get("rope_parameters"), config.get("rope_scaling")
    old_theta = config.get("rope_theta")
    if stated:
        rope = dict(stated.get("full_attention", stated))
        rule = "the checkpoint's rope_parameters"
        differs = old_theta is not None and rope.get("rope_theta", old_theta) != old_theta
        if differs:
            rule += f" (its older rope_theta {old_theta} differs and is not read)"
        rope.setdefault("rope_theta", old_theta if old_theta is not None else DEFAULT_THETA)
    else:
        rope, differs = dict(scaling or {}), False
        if old_theta is not None:
            rope["rope_theta"], rule = (
                old_theta,
                "the checkpoint's rope_theta" + (" and rope_scaling" if scaling else ""),
            )
        else:
            rope.setdefault("rope_theta", DEFAULT_THETA)
            rule = f"no rope_theta: {rope['rope_theta']}, LlamaConfig's default, as every engine reads it"
    rope["rope_type"] = rope.pop("type", None) if rope.get("rope_type") is None else rope["rope_type"]
    rope["rope_type"] = rope["rope_type"] or "default"
    rope.pop("type", None)
    if rope.get("mrope_section"):
        raise DraftDirError("config.json: rope has an mrope_section (a head for images); a head for text is needed")
    rope["rope_theta"] = resolver.settle("rope_theta", rope["rope_theta"], rule, warning=differs)
    if rope["rope_type"] != "default":
        resolver.note("rope_type", rope["rope_type"], f"the checkpoint's: {rope}")
    longest = config.get("max_position_embeddings")
    rule = "as stated; no limit here, the rotation is computed for every position"
    if longest is None:
        longest, rule = 2048, "not in the config: LlamaConfig's default; no limit here"
    longest = resolver.settle("max_position_embeddings", longest, rule)
    return {"rope_parameters": rope, "max_position_embeddings": longest}


def note_unread(
    config: Mapping[str, Any], read: frozenset[str], resolver: Resolver, read_nested: frozenset[str] = frozenset()
) -> None:
    """Note a warning with the config keys that no rule reads: one of them may change the head's arithmetic.

    read_nested: the keys that are read in `eagle_config`.
    """
    known = read | UNREAD | {
        *REQUIRED, "head_dim", "rms_norm_eps", "num_key_value_heads", "hidden_act", "mlp_bias", "quantization_config",
        "partial_rotary_factor", "rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings",
    }  # fmt: skip
    nested = {f"eagle_config.{key}": value for key, value in (config.get("eagle_config") or {}).items()}
    known |= {f"eagle_config.{key}" for key in read_nested}
    unknown = sorted(
        key for key, value in {**config, **nested}.items() if key not in known and value not in (None, False, [], {})
    )
    if unknown:
        resolver.note(
            "unknown keys",
            ", ".join(unknown),
            "no rule reads them; one that changes the arithmetic would cost accept_length (never exactness)",
            warning=True,
        )


def q_rows(tensors: Mapping[str, torch.Tensor], prefix: str) -> int:
    """Rows of the layer's q_proj. Raises `DraftDirError` when it is absent."""
    name = f"{prefix}self_attn.q_proj.weight"
    if name not in tensors:
        raise DraftDirError(f"its weights lack {name}; a Llama-like attention with q_proj is needed")
    return tensors[name].shape[0]


def note_embedding(embedding: torch.Tensor | None, resolver: Resolver) -> None:
    """Note that the embedding of a checkpoint is left out."""
    if embedding is not None:
        rule = "the target's is read in its place; they must be equal, and are compared where the target is at hand"
        resolver.note("embed_tokens.weight", "left out", rule)
