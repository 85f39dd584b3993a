"""DFlash and DSpark heads: z-lab's, DeepSpec's, SGLang's, vLLM's and speculators' forms.

Read in SGLang 0.5.23, vLLM 0.32.0 and speculators 0.9.0. What `DSparkHead` has no part for, or what one of them would
skip or compute another way, is refused by name, since none of them says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from toolkit.checkpoint.formats import Exported, Format, Reading, Resolver, Tensors, speculators_keys
from toolkit.checkpoint.launch_lines import is_dflash
from toolkit.errors import DraftDirError, ExportError, TargetError
from toolkit.heads.dspark import DSparkConfig
from toolkit.targets.facts import TargetFacts, target_embedding, target_output
from toolkit.weights import WeightsError

MATRIX, MASK = "lm_head.weight", "mask_embedding"
W1, CONFIDENCE = "markov_head.markov_w1.weight", "confidence_head.proj.weight"
# Settings of the Markov bias and the confidence -> our fields.
BIAS_KEYS = {
    "markov_rank": "markov_rank",
    "enable_confidence_head": "confidence",
    "confidence_head_with_markov": "confidence_with_markov",
}
# Whether blocks are causal: as JetSpec, vLLM and NeMo AutoModel, and ASpec write it.
CAUSAL_KEYS = ("causal_head", "causal", "is_causal")
BIAS_TYPE = {"markov_head_type": "vanilla"}
LAYERS_OF = ("qwen3", "llama")  # some writers leave the target's here; the norms of queries and keys decide
# Families whose embeddings transformers scales inside the embedding, and vLLM after it.
SCALED = ("gemma3", "gemma4")

# -- read --------------------------------------------------------------------------------------------------------------


def _variants(reading: Reading) -> dict[str, Any]:
    said, layer, resolver = reading.said, reading.layer, reading.resolver
    if layer.get("model_type") not in (None, *LAYERS_OF):
        raise DraftDirError(f"config.json: model_type is {layer['model_type']!r}; layers of Qwen3's form are needed")
    mask = said.get("mask_token_id")
    if mask is None and not resolver.overridden("mask_token_id"):
        raise DraftDirError(
            "config.json states no mask_token_id, whose embedding the masks are; give it with --set mask_token_id=ID"
        )
    mask = resolver.settle("mask_token_id", mask or 0, "as stated")
    _check_mask(reading.tensors.pop(MASK, None), mask, reading.embedding, reading.facts)
    own_output = MATRIX in reading.tensors
    if not own_output:
        resolver.note(MATRIX, "the target's", "absent: the target's output matrix scores the tokens")
    found = {"mask_token_id": mask, "own_output": own_output, "causal": _causal({**layer, **said}, resolver)}
    return found | _block(reading) | _bias(reading)


def _block(reading: Reading) -> dict[str, Any]:
    """The size of the block, and whether its first place drafts."""
    said, resolver, speculators = reading.said, reading.resolver, reading.speculators
    words = (said.get("speculators_model_type") or "") + " ".join(said.get("architectures") or ())
    dspark = "dspark" in words.lower() or W1 in reading.tensors
    anchor = said.get("sample_from_anchor")
    if anchor is None:
        doubt = dspark and speculators
        rule = f"not stated: {'DSpark drafts' if dspark else 'DFlash does not draft'} from the first place"
        if doubt:
            rule += "; vLLM reads false: if accept_length is near 1, try --set sample_from_anchor=false"
        anchor = resolver.settle("sample_from_anchor", dspark, rule, warning=doubt)
    bonus = said.get("dspark_bonus_anchor")
    if bonus is not None and bool(bonus) == anchor:
        raise DraftDirError(f"config.json: sample_from_anchor and dspark_bonus_anchor are both {anchor}; one is wrong")
    block = said.get("block_size")
    if block is None:
        raise DraftDirError("config.json states no block_size; copy the file again from its source")
    if dspark and not anchor and not speculators:
        resolver.note("block_size", block + 1, f"SGLang and vLLM count drafts, {block}; the first place drafts nothing")
        block += 1
    return {"block_size": block, "sample_from_anchor": bool(anchor)}


def _causal(said: Mapping[str, Any], resolver: Resolver) -> bool:
    """Whether a place of the block sees no later one. Raises `DraftDirError` where two keys differ."""
    stated = {key: said[key] for key in CAUSAL_KEYS if said.get(key) is not None}
    if len(set(stated.values())) > 1 and not resolver.overridden("causal"):
        words = " and ".join(f"{key} is {value}" for key, value in stated.items())
        raise DraftDirError(f"config.json: {words}; give the right one with --set causal=true or false")
    jetspec = "JetSpecDraftModel" in (said.get("architectures") or ())
    rule = f"not stated: {'JetSpec is causal' if jetspec else 'places see their whole block'}"
    key, value = next(iter(stated.items()), ("", jetspec))
    return resolver.settle("causal", value, f"as {key} states" if key else rule)


def _bias(reading: Reading) -> dict[str, Any]:
    """The Markov bias and the confidence, by their tensors. Raises `WeightsError` where the config states others."""
    said, tensors, width = reading.said, reading.tensors, reading.shapes["hidden_size"]
    rank = tensors[W1].shape[-1] if W1 in tensors else 0
    columns = tensors[CONFIDENCE].shape[-1] if CONFIDENCE in tensors else 0
    with_markov = bool(rank) and columns == width + rank
    if columns not in (0, width, width + rank) and said.get("markov_rank") in (None, rank):
        raise WeightsError(f"wrong shape: {CONFIDENCE} reads {columns} values, not {width} or {width + rank}")
    for key, value, given in (("markov_rank", rank, True), ("confidence_head_with_markov", with_markov, columns)):
        if given and said.get(key) not in (None, value):
            raise WeightsError(f"config.json: {key} is {said[key]}, but by the tensors {value}")
    if not columns and said.get("enable_confidence_head"):
        reading.resolver.note("confidence", False, "the config has it, the weights have not", warning=True)
    return {"markov_rank": rank, "confidence": columns > 0, "confidence_with_markov": with_markov}


def _check_mask(own: torch.Tensor | None, mask: int, embedding: torch.Tensor | None, facts: TargetFacts | None) -> None:
    """Raises `DraftDirError` for a mask embedding that is not the vocabulary's row, or cannot be compared with it."""
    if own is None:
        return
    rows = embedding
    if rows is None and facts is not None:
        with suppress(TargetError):
            rows = target_embedding(facts)
    if rows is None or mask >= len(rows) or not torch.equal(own.flatten().to(rows.dtype), rows[mask]):
        raise DraftDirError(
            f"it has a {MASK} of its own, which is not the embedding of token {mask} as far as can be seen here; masks "
            "that are the target's embedding of a token are needed"
        )


# -- write -------------------------------------------------------------------------------------------------------------


def _refuse(config: DSparkConfig, to: str, facts: TargetFacts) -> None:
    """Raises `ExportError` for a head that `to` would not draft with as it is."""
    family = str(getattr(facts.config, "model_type", ""))
    ids, last = config.aux_layer_ids, facts.n_layers - (to == "sglang")
    why = None
    if config.correction not in ("markov", "none"):
        why = f"its correction is {config.correction}, which no other engine computes; serve it with `toolkit serve`, "
        why += "or train one with train.head.correction=markov"
    elif config.causal and to != "vllm":
        engine = {"sglang": "SGLang", "speculators": "speculators"}[to]
        why = f"its blocks are causal, and {engine} lets each place see its whole block: other, worse drafts; --to vllm"
        why += " is possible"
    elif not config.markov_rank and config.sample_from_anchor:
        why = "it has no Markov bias and drafts from its first place; DFlash drafts from the masks alone"
    elif not config.markov_rank and config.confidence:
        why = "it has a confidence and no Markov bias; DFlash has no confidence"
    elif to != "sglang" and family.startswith(SCALED):
        why = (
            f"vLLM scales the embeddings of a {family} target outside of the module that the head shares, so the head "
            "would read other ones; --to sglang is possible"
        )
    elif ids[0] < 1 or ids[-1] > last:
        why = f"aux_layer_ids are {list(ids)}, and {to} supports only ids from 1 to {last}"
    if why is not None:
        raise ExportError(f"the head cannot be written for {to}: {why}")


def _check_matrix(state: Tensors, config: DSparkConfig, facts: TargetFacts) -> None:
    """Raises `ExportError` unless the head's output matrix is the target's, which SGLang takes for every head."""
    if config.draft_vocab_size == config.vocab_size:
        with suppress(TargetError):
            if torch.equal(state[MATRIX].cpu(), target_output(facts).to(state[MATRIX].dtype)):
                return
    raise ExportError(
        "the head has an output matrix of its own, which cannot be written for sglang: SGLang's DFlash and DSpark "
        "models skip it and score all ids by the target's. Train a head with train.head.lm_head=frozen and a token map "
        "of all ids for it, or write this one with --to vllm or speculators"
    )


def _begun(made: Exported, to: str, facts: TargetFacts) -> DSparkConfig:
    """Add the keys that every engine reads, the layers' own among them; returns the head's configuration."""
    config = made.config_of_head
    assert isinstance(config, DSparkConfig)
    _refuse(config, to, facts)
    # Without layer_types a loader could take a window from a default.
    made.config |= {
        "model_type": "qwen3",
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
    }
    if not config.confidence:
        config = replace(config, confidence_with_markov=False)  # nothing says what it would read
    made.config_of_head = config
    return config


def _own_keys(config: DSparkConfig) -> dict[str, Any]:
    own: dict[str, Any] = {key: getattr(config, key) for key in ("draft_vocab_size", "target_hidden_size")}
    own |= {"block_size": config.block_size, "mask_token_id": config.mask_token_id}
    if not is_dflash(config):
        own |= {**BIAS_TYPE, "sample_from_anchor": config.sample_from_anchor}
        own |= {key: getattr(config, name) for key, name in BIAS_KEYS.items()}
    return own


def _sglang(made: Exported, facts: TargetFacts, _tokens: int) -> None:
    config = _begun(made, "sglang", facts)
    if config.own_output:
        _check_matrix(made.tensors, config, facts)
        config = made.config_of_head = replace(config, own_output=False)
        made.left_out = (MATRIX,)
        del made.tensors[MATRIX]
    _for_engines(made, config, facts)
    if config.markov_rank and not config.confidence:
        made.notes.append(
            "it has no confidence, which SGLang wants unless SGLANG_RAGGED_VERIFY_MODE is static, its default"
        )


def _vllm(made: Exported, facts: TargetFacts, _tokens: int) -> None:
    _for_engines(made, _begun(made, "vllm", facts), facts)


def _for_engines(made: Exported, config: DSparkConfig, facts: TargetFacts) -> None:
    """SGLang and vLLM read the same file, with the auxiliary layers in both conventions, each under its own key."""
    inputs, outputs = list(config.aux_layer_ids), [i - 1 for i in config.aux_layer_ids]
    nested = {"mask_token_id": config.mask_token_id, "target_layer_ids": outputs}
    made.config |= {**_own_keys(config), "num_target_layers": facts.n_layers, "architectures": ["DFlashDraftModel"]}
    made.config |= {**nested, "eagle_aux_hidden_state_layer_ids": inputs, "dflash_config": nested}
    if config.causal:
        made.config["dflash_config"] = {**nested, "causal": True}
    if not is_dflash(config):
        made.config |= {"architectures": ["Qwen3DSparkModel"], "dspark_bonus_anchor": not config.sample_from_anchor}
        made.config["block_size"] = config.drafts_at_once  # there without a first place that drafts nothing
    made.notes.append(
        f"auxiliary layers: eagle_aux_hidden_state_layer_ids {inputs} (inputs) and target_layer_ids {outputs} (outputs)"
    )


def _speculators(made: Exported, facts: TargetFacts, _tokens: int) -> None:
    config = _begun(made, "speculators", facts)
    dflash, layer = is_dflash(config), made.config
    if config.own_output and config.draft_vocab_size == config.vocab_size:
        made.notes.append(
            "lm_head is the head's own, which vLLM reads; speculators' own trainer puts the target's in its place"
        )
    made.config = {
        "architectures": ["DFlashDraftModel" if dflash else "DSparkDraftModel"],
        **speculators_keys("dflash" if dflash else "dspark", facts, config.drafts_at_once),
        "transformer_layer_config": layer,
        **_own_keys(config),
        "aux_hidden_state_layer_ids": list(config.aux_layer_ids),
        "sample_from_anchor": config.sample_from_anchor,
        # Of windows only, and there are none; but vLLM makes all of a DFlash head causal where this is false.
        "sliding_window_non_causal": True,
        "tie_word_embeddings": False,
        "torch_dtype": layer["torch_dtype"],
    }


FORMAT = Format(
    config=DSparkConfig,
    first_layer="layers.0.",
    variants=_variants,
    names={"draft_id_to_target_id": "d2t"},
    nested=("dflash_config", "dspark_config"),
    # The one value that the head computes.
    fixed={
        **BIAS_TYPE,
        **dict.fromkeys(("attention_bias", "qkv_bias", "attention_sink_bias", "use_swa"), False),
        **dict.fromkeys(("use_gemma_norm", "add_swa_attention_sink_bias", "gating", "shift_label"), False),
        **dict.fromkeys(("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"), 0),
        **dict.fromkeys(("output_multiplier", "logit_scale", "attention_value_scale"), 1.0),
        **dict.fromkeys(("rope_is_neox_style", "is_neox_style", "use_aux_hidden_state"), True),
        **dict.fromkeys(("projector_type", "quantization_config"), None),
        "final_logit_softcapping": 0,
    },
    keys={*BIAS_KEYS, *CAUSAL_KEYS}
    | {
        "block_size", "mask_token_id", "mask_token", "num_target_layers", "sample_from_anchor", "dspark_bonus_anchor",
        "swa_window_size", "sliding_window_non_causal", "has_embed_tokens", "has_lm_head",
    },
    aux={"aux_hidden_state_layer_ids": 0, "eagle_aux_hidden_state_layer_ids": 0, "target_layer_ids": 1},
    writers={"sglang": _sglang, "vllm": _vllm, "speculators": _speculators},
    why_not="SafeAILab's code has no such model, and llama.cpp's own converter reads what --to vllm writes; "
    "--to sglang, vllm and speculators are possible",
)  # fmt: skip
