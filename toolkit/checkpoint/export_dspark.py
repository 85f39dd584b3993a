"""DFlash and DSpark heads for SGLang, vLLM and speculators.

Read in SGLang 0.5.23, vLLM 0.32.0 and speculators 0.9.0: what one of them would skip, or compute another way, is
refused here, since none of them says so.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from toolkit.checkpoint.draft_dir import DraftCheckpoint, dtype_of
from toolkit.checkpoint.errors import ExportError
from toolkit.checkpoint.exported import Builder, Exported, layer_keys, map_tensors, speculators_keys
from toolkit.checkpoint.launch_lines import is_dflash
from toolkit.errors import TargetError
from toolkit.heads.dspark import DSparkConfig
from toolkit.targets.facts import TargetFacts, target_output

MATRIX = "lm_head.weight"
# Families whose embeddings transformers scales inside the embedding, and vLLM after it.
SCALED = ("gemma3", "gemma4")


def _qwen3_keys(draft: DraftCheckpoint, config: DSparkConfig) -> dict[str, Any]:
    """The layers' settings. Without layer_types a loader could take a window from a default."""
    return layer_keys(config, dtype_of(draft.head.state_dict())) | {
        "model_type": "qwen3",
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
    }


def _bias_keys(config: DSparkConfig) -> dict[str, Any]:
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence and config.confidence_with_markov,
    }


def _as_read(config: DSparkConfig) -> DSparkConfig:
    """Without a confidence nothing says what it would read."""
    return config if config.confidence else replace(config, confidence_with_markov=False)


def _refuse(config: DSparkConfig, to: str, facts: TargetFacts) -> None:
    """Raises `ExportError` for a head that `to` would not draft with as it is."""
    if not config.markov_rank and config.sample_from_anchor:
        raise ExportError(
            f"the head has no Markov bias and drafts from its first place, which cannot be written for {to}: DFlash "
            "drafts from the masks alone, and DSpark needs a bias"
        )
    if not config.markov_rank and config.confidence:
        raise ExportError(
            f"the head has a confidence and no Markov bias, which cannot be written for {to}: DFlash has no confidence"
        )
    family = str(getattr(facts.config, "model_type", ""))
    if to != "sglang" and family.startswith(SCALED):
        raise ExportError(
            f"the head cannot be written for {to}: vLLM scales the embeddings of a {family} target outside of the "
            "module that the head shares, so the head would read other ones; --to sglang is possible"
        )
    ids, last = config.aux_layer_ids, facts.n_layers - (to == "sglang")
    if ids[0] < 1 or ids[-1] > last:
        raise ExportError(f"aux_layer_ids {list(ids)}: {to} supports only ids from 1 to {last}")


def _check_matrix(draft: DraftCheckpoint, config: DSparkConfig, facts: TargetFacts) -> None:
    """Raises `ExportError` unless the head's output matrix is the target's, which SGLang takes for every head."""
    own = draft.head.state_dict()[MATRIX]
    if config.draft_vocab_size == config.vocab_size:
        with suppress(TargetError):
            if torch.equal(own.cpu(), target_output(facts).to(own.dtype)):
                return
    raise ExportError(
        "the head has an output matrix of its own, which cannot be written for sglang: SGLang's DFlash and DSpark "
        "models skip it and score all ids by the target's. Train a head with train.head.lm_head=frozen and a token map "
        "of all ids for it, or write this one with --to vllm or speculators"
    )


def _for_engines(to: str) -> Builder:
    """SGLang and vLLM read the same file, with the auxiliary layers in both conventions, each under its own key."""

    def build(draft: DraftCheckpoint, config: DSparkConfig, facts: TargetFacts, _tokens: int) -> Exported:
        _refuse(config, to, facts)
        state = draft.head.state_dict()
        left_out: tuple[str, ...] = ()
        if to == "sglang" and config.own_output:
            _check_matrix(draft, config, facts)
            config, left_out = replace(config, own_output=False), (MATRIX,)
        outputs = [i - 1 for i in config.aux_layer_ids]
        nested = {"mask_token_id": config.mask_token_id, "target_layer_ids": outputs}
        if is_dflash(config):
            own: dict[str, Any] = {"architectures": ["DFlashDraftModel"], "block_size": config.block_size}
        else:
            own = {
                "architectures": ["Qwen3DSparkModel"],
                "block_size": config.drafts_at_once,  # there without a first place that drafts nothing
                "sample_from_anchor": config.sample_from_anchor,
                "dspark_bonus_anchor": not config.sample_from_anchor,
                **_bias_keys(config),
            }
        notes = [
            f"auxiliary layers: eagle_aux_hidden_state_layer_ids {list(config.aux_layer_ids)} (inputs of layers) and "
            f"target_layer_ids {outputs} (outputs)"
        ]
        if to == "sglang" and config.markov_rank and not config.confidence:
            notes.append(
                "it has no confidence, which SGLang wants unless SGLANG_RAGGED_VERIFY_MODE is static, its default"
            )
        return Exported(
            {
                **_qwen3_keys(draft, config),
                "draft_vocab_size": config.draft_vocab_size,
                "target_hidden_size": config.target_hidden_size,
                "num_target_layers": facts.n_layers,
                **own,
                **nested,
                "eagle_aux_hidden_state_layer_ids": list(config.aux_layer_ids),
                "dflash_config": nested,
            },
            {name: value for name, value in state.items() if name not in left_out} | map_tensors(draft),
            _as_read(config),
            notes=notes,
            left_out=left_out,
        )

    return build


def _for_speculators(draft: DraftCheckpoint, config: DSparkConfig, facts: TargetFacts, _tokens: int) -> Exported:
    _refuse(config, "speculators", facts)
    dflash = is_dflash(config)
    name = "dflash" if dflash else "dspark"
    notes = []
    if config.own_output and config.draft_vocab_size == config.vocab_size:
        notes.append(
            "lm_head is the head's own, which vLLM reads; speculators' own trainer puts the target's in its place, as "
            "for every head of the whole vocabulary"
        )
    return Exported(
        {
            "architectures": ["DFlashDraftModel" if dflash else "DSparkDraftModel"],
            **speculators_keys(name, facts, config.drafts_at_once),
            "transformer_layer_config": _qwen3_keys(draft, config),
            "draft_vocab_size": config.draft_vocab_size,
            "target_hidden_size": config.target_hidden_size,
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "aux_hidden_state_layer_ids": list(config.aux_layer_ids),
            "sample_from_anchor": config.sample_from_anchor,
            # Of windows only, and there are none; but vLLM makes all of a DFlash head causal where this is false.
            "sliding_window_non_causal": True,
            **({} if dflash else _bias_keys(config)),
            "tie_word_embeddings": False,
            "torch_dtype": str(dtype_of(draft.head.state_dict())).removeprefix("torch."),
        },
        draft.head.state_dict() | map_tensors(draft),
        _as_read(config),
        notes=notes,
    )


BUILDERS: dict[str, Builder] = {
    "sglang": _for_engines("sglang"),
    "vllm": _for_engines("vllm"),
    "speculators": _for_speculators,
}
