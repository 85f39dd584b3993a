"""EAGLE-3 heads of other projects: SafeAILab, SpecForge, SGLang's and vLLM's forms, AngelSlim, ModelOpt, speculators.

Shapes: D draft vocabulary, V target vocabulary, H head hidden size, Ht target hidden size, A auxiliary layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from toolkit.checkpoint.errors import DraftDirError
from toolkit.checkpoint.import_parts import Tensors, check_aux_layers, read_token_map, renamed, target_width
from toolkit.checkpoint.layer_settings import layer_settings, note_embedding, note_unread, q_rows, refuse_unless
from toolkit.checkpoint.recognise import eagle3_name
from toolkit.checkpoint.resolution import Resolver
from toolkit.heads.eagle3 import Eagle3Config
from toolkit.targets.facts import TargetFacts
from toolkit.tokenmap.token_map import TokenMap
from toolkit.weights import WeightsError

AUX_KEY = "eagle_aux_hidden_state_layer_ids"
EMBEDDING = "embed_tokens.weight"
# Of the target, or computed anew from the config.
DROPPED = (
    "verifier_lm_head.weight",
    "verifier_norm.weight",
    "rotary_emb.inv_freq",
    "midlayer.self_attn.rotary_emb.inv_freq",
)
READ = frozenset(
    {"num_hidden_layers", "target_hidden_size", "draft_vocab_size", "eagle_config", AUX_KEY, "num_aux_hidden_states"}
    | {"fc_norm", "use_aux_norm", "norm_before_fc", "norm_before_residual", "norm_output", "bias", "attention_bias"}
    | {"qkv_bias", "tie_word_embeddings", "sliding_window", "use_sliding_window", "layer_types", "parallel_drafting"}
    | {"speculators_model_type", "speculators_config", "speculators_version", "transformer_layer_config"}
    | {"embed_requires_grad", "head_type"}
)  # fmt: skip
READ_NESTED = frozenset(
    {AUX_KEY, "use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm"}
    | {"fc_norm", "use_aux_norm", "norm_before_fc", "norm_before_residual", "norm_output", "bias", "attention_bias"}
)  # fmt: skip


def import_eagle3(
    config: Mapping[str, Any], stored: Mapping[str, torch.Tensor], resolver: Resolver, facts: TargetFacts | None
) -> tuple[Eagle3Config, Tensors, TokenMap, torch.Tensor | None]:
    """Config, the head's tensors, token map, and the embedding that came with the checkpoint (None without one).

    `facts` of the target are needed only where the checkpoint does not state its auxiliary layers. Raises
    `DraftDirError`, `WeightsError`, `TokenMapError`.
    """
    speculators = "transformer_layer_config" in config
    layer = {**config["transformer_layer_config"]} if speculators else dict(config)
    tensors = renamed(stored, eagle3_name, DROPPED, resolver)
    embedding = tensors.pop(EMBEDDING, None)
    note_embedding(embedding, resolver)
    _check_structure(config, layer, tensors, resolver)
    shapes = layer_settings(layer, q_rows(tensors, "midlayer."), resolver)
    target_hidden = target_width(config, shapes)
    token_map = read_token_map(config, shapes["vocab_size"], tensors, resolver)
    settings = {
        **shapes,
        "target_hidden_size": target_hidden,
        "draft_vocab_size": token_map.size,
        "aux_layer_ids": _aux_layer_ids(config, tensors, target_hidden, resolver, facts),
        **_variants(config, tensors, speculators, resolver),
        "num_hidden_layers": _layers(layer, stored, tensors, resolver),
    }
    note_unread(config if not speculators else {**layer, **config}, READ, resolver, READ_NESTED)
    try:
        return Eagle3Config(**settings), tensors, token_map, embedding
    except ValueError as error:
        raise DraftDirError(str(error)) from error


def _check_structure(config: Mapping[str, Any], layer: Mapping[str, Any], tensors: Tensors, resolver: Resolver) -> None:
    """Raises `DraftDirError` for a first layer that is not built as EAGLE-3's, `WeightsError` without an lm_head."""
    eagle_config = config.get("eagle_config") or {}
    for key in ("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm"):
        if key in eagle_config:
            refuse_unless(eagle_config, key, True)
    refuse_unless(eagle_config, "use_mtp_layernorm", False)
    if "lm_head.weight" not in tensors:
        raise WeightsError(
            "missing: lm_head.weight. An EAGLE-3 head needs its own output matrix: export it again with it. SGLang "
            "would use a random one (accept_length 1.00), or, with draft_vocab_size null, the target's"
        )
    if layer.get("tie_word_embeddings"):
        resolver.note(
            "tie_word_embeddings", True, "not read: the checkpoint's own lm_head scores the tokens", warning=True
        )


def _layers(layer: Mapping[str, Any], stored: Iterable[str], tensors: Tensors, resolver: Resolver) -> int:
    """Decoder layers, by the weights. Raises `DraftDirError` where the config states others and may be right."""
    if any(name.startswith("additional_layers.") for name in tensors):
        raise DraftDirError(
            "it has additional_layers, SGLang's own form of further layers, in which the first layer's residual is "
            "missing; only the form of speculators and vLLM is supported (layers.1, layers.2, ..)"
        )
    found = 1 + len({name.split(".")[1] for name in tensors if name.startswith("layers.")})
    stated = layer.get("num_hidden_layers")
    if stated in (None, found):
        return found
    if found > 1 or not any("midlayer." in name for name in stored):
        raise DraftDirError(f"config.json: num_hidden_layers is {stated}, the weights have {found}")
    resolver.note(
        "num_hidden_layers",
        found,
        f"a head with a midlayer and no layers.1 has one layer; the config's {stated} (its target's?) is not read, "
        "though vLLM would build so many and leave them unset",
        warning=True,
    )
    return found


def _aux_layer_ids(
    config: Mapping[str, Any], tensors: Tensors, target_hidden: int, resolver: Resolver, facts: TargetFacts | None
) -> tuple[int, ...]:
    """As indices into HF hidden_states, our convention (id k = input of layer k)."""
    as_input = tuple(config.get(AUX_KEY) or ())
    as_output = tuple((config.get("eagle_config") or {}).get(AUX_KEY) or ())
    default = None if facts is None else (2, facts.n_layers // 2, facts.n_layers - 3)
    if as_input and as_output and as_input != tuple(i + 1 for i in as_output):
        if not resolver.overridden("aux_layer_ids"):
            raise DraftDirError(
                f"config.json: {AUX_KEY} is {list(as_input)} (input ids, as vLLM reads it) and in eagle_config "
                f"{list(as_output)} (output ids, as SGLang reads it, one less), which are different layers; give the "
                "right ones with --set aux_layer_ids=a,b,c (id k = input of layer k)"
            )
    if as_input:
        ids, rule = as_input, f"{AUX_KEY}, as speculators and vLLM mean it: id k is the input of layer k"
    elif as_output:
        ids = tuple(i + 1 for i in as_output)
        rule = (
            f"eagle_config.{AUX_KEY} {list(as_output)}, as SGLang, SpecForge and ModelOpt mean it: outputs, so plus 1"
        )
    elif default is not None or resolver.overridden("aux_layer_ids"):
        ids, rule = default or (), "not stated: (2, n//2, n-3), which every engine takes then"
    else:
        raise DraftDirError(
            "config.json does not state the auxiliary layers, and the usual (2, n//2, n-3) depend on the target: name "
            "it with `target`"
        )
    shifted = default in [tuple(i + by for i in ids) for by in (-1, 1)]
    if shifted:
        usual = ",".join(map(str, default or ()))
        rule += (
            f". This target's usual ones are {usual}: these look off by one, as if written in the other convention; "
            f"try --set aux_layer_ids={usual}"
        )
    ids = tuple(resolver.settle("aux_layer_ids", ids, rule, warning=shifted))
    check_aux_layers(ids, tensors, target_hidden, facts)
    return ids


def _variants(config: Mapping[str, Any], tensors: Tensors, speculators: bool, resolver: Resolver) -> dict[str, bool]:
    """The variants: by tensors where a variant has some, else by key."""
    found: dict[str, bool] = {}
    table: tuple[tuple[str, str, tuple[str, ...]], ...] = (
        ("fc_norm", "fc_norm.0.weight", ("fc_norm", "use_aux_norm")),
        ("norm_before_fc", "input_norm.weight", ("norm_before_fc",)),
        ("fc_bias", "fc.bias", ("bias",)),
        ("attention_bias", "midlayer.self_attn.q_proj.bias", ("attention_bias",)),
        ("qk_norm", "midlayer.self_attn.q_norm.weight", ()),
    )
    for key, tensor, keys in table:
        nested = config.get("eagle_config") or {}
        stated = any(bool(config.get(name) or nested.get(name)) for name in keys)
        found[key] = tensor in tensors
        if found[key]:
            rule = f"the checkpoint has {tensor}"
            lost = bool(keys) and not stated
            if lost:
                rule += f", though its config does not set {keys[0]}: other engines would leave the tensor out"
            resolver.note(key, True, rule, warning=lost)
        elif stated and key in ("fc_norm", "norm_before_fc"):
            raise WeightsError(f"missing: {tensor}. The config sets {key}")
        elif stated and not speculators:
            resolver.note(key, False, f"the config sets {key}, but there is no {tensor}", warning=True)
    before, where = _stated(config, "norm_before_residual")
    if before is None:
        rule = (
            "not stated in a speculators checkpoint: true, as vLLM reads it (speculators' own default is false); if "
            "accept_length is near 1, try --set norm_before_residual=false"
            if speculators
            else "not stated: false, as every engine reads it"
        )
        before = resolver.settle("norm_before_residual", speculators, rule, warning=speculators)
    else:
        before = resolver.settle("norm_before_residual", bool(before), f"as stated{where}", warning=bool(where))
    after, where = _stated(config, "norm_output")
    rule = "not stated: false, the next step reads the state before the final norm"
    if after is not None:
        rule = (
            "as SGLang, vLLM and speculators mean it: whether the next step reads the state after the final norm"
            f"{where}"
        )
    doubtful = bool(after) and not speculators
    if doubtful:
        rule += (
            ". SpecForge's trainer means by true that the final norm stands before lm_head, and feeds back the state "
            "before it: for its heads say --set norm_output=false"
        )
    after = resolver.settle("norm_output", bool(after), rule, warning=doubtful or bool(where))
    return {**found, "norm_before_residual": bool(before), "norm_output": bool(after)}


def _stated(config: Mapping[str, Any], key: str) -> tuple[Any, str]:
    """A setting at the top, else in eagle_config, and a note on the place. Raises `DraftDirError` when both differ."""
    own, nested = config.get(key), (config.get("eagle_config") or {}).get(key)
    if nested is None or own == nested:
        return own, ""
    if own is not None:
        raise DraftDirError(f"config.json: {key} is {own}, and in eagle_config {nested}; leave the wrong one out")
    return nested, f"; it stands in eagle_config.{key}, where other engines may not look for it"
