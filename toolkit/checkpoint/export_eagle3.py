"""EAGLE-3 heads for SGLang, vLLM, speculators, SafeAILab's own code and llama.cpp.

Read in SGLang 0.5.23, vLLM 0.32.0, speculators 0.9.0, SafeAILab/EAGLE and the llama.cpp of llama-cpp-python 0.3.36: a
key that one of them would skip, or a parameter that it would leave unset, is refused here, since none of them says so.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from toolkit.checkpoint.draft_dir import DraftCheckpoint, dtype_of
from toolkit.checkpoint.errors import ExportError
from toolkit.checkpoint.exported import (
    NO_BIAS,
    NO_WINDOW,
    Builder,
    Exported,
    layer_keys,
    map_tensors,
    plain_rope,
    speculators_keys,
)
from toolkit.checkpoint.files import PICKLE
from toolkit.checkpoint.gguf_head import MODEL_FILE
from toolkit.checkpoint.import_eagle3 import AUX_KEY, EMBEDDING
from toolkit.errors import TargetError
from toolkit.heads.eagle3 import Eagle3Config
from toolkit.targets.facts import TargetFacts, is_sharded, target_embedding

# Variants of an EAGLE-3 head that each loader has no place for, and what it would do instead.
REFUSED: dict[str, dict[str, str]] = {
    "sglang": {
        "norm_before_residual": "SGLang ignores it and would serve the head without it",
        "qk_norm": "SGLang's LlamaForCausalLMEagle3 has no query and key norms and skips their tensors",
        "fc_bias": NO_BIAS,
        "attention_bias": NO_BIAS,
        "sliding_window": NO_WINDOW,
        "num_hidden_layers": "SGLang has one layer; its own form of further layers lacks the first one's residual",
    },
    "vllm": {
        "qk_norm": "vLLM's LlamaForCausalLMEagle3 has no query and key norms; --to speculators writes its Qwen3 form",
        "fc_bias": NO_BIAS,
        "attention_bias": NO_BIAS,
    },
    "speculators": {"fc_bias": NO_BIAS, "attention_bias": NO_BIAS},
    "eagle": {"sliding_window": NO_WINDOW, "num_hidden_layers": "SafeAILab's EAGLE-3 model has one layer"}
    | dict.fromkeys(
        ("norm_before_residual", "qk_norm", "fc_bias", "attention_bias", "fc_norm", "norm_before_fc", "norm_output"),
        "SafeAILab's EAGLE-3 model does not support it and drops the tensors",
    ),
    "gguf": {
        "norm_output": "llama.cpp hands the state before the final norm to the next step",
        "sliding_window": NO_WINDOW,
        "num_hidden_layers": "llama.cpp's EAGLE-3 model has one layer",
        "fc_norm": "llama.cpp has one norm before fc, over all auxiliary layers",
    }
    | dict.fromkeys(("qk_norm", "fc_bias", "attention_bias"), "llama.cpp's EAGLE-3 model has no such tensors"),
}
# Families of transformers whose hidden states llama.cpp can read. It stops where a graph has none.
LLAMA_CPP_FAMILIES = ("llama", "mistral", "qwen3", "qwen3_moe", "qwen3_next", "gpt_oss", "gemma4", "minimax_m2")


def _refuse_variants(config: Eagle3Config, to: str) -> None:
    usual = {one.name: one.default for one in fields(config)}
    for key, why in REFUSED[to].items():
        value = getattr(config, key)
        if value != usual[key]:
            said = key if value is True else f"{key} {value}"
            raise ExportError(f"the head has {said}, which cannot be written for {to}: {why}")


def _eagle3_tensors(draft: DraftCheckpoint, prefix: str = "midlayer.") -> dict[str, torch.Tensor]:
    """The head's tensors and its token map."""
    state = {
        (prefix + name.removeprefix("midlayer.")) if name.startswith("midlayer.") else name: value
        for name, value in draft.head.state_dict().items()
    }
    return state | map_tensors(draft)


def _norm_keys(config: Eagle3Config) -> dict[str, Any]:
    # norm_output is written only where it is true: SpecForge gives the word another meaning.
    return {key: True for key in ("fc_norm", "norm_before_fc", "norm_output") if getattr(config, key)}


def _eagle3_for_engines(to: str) -> Builder:
    """SGLang and vLLM read the same file, with the auxiliary layers in both conventions, each under its own key."""

    def build(draft: DraftCheckpoint, config: Eagle3Config, facts: TargetFacts, _tokens: int) -> Exported:
        _refuse_variants(config, to)
        ids = config.aux_layer_ids
        if to == "sglang" and (ids[0] < 1 or ids[-1] >= facts.n_layers):
            raise ExportError(f"aux_layer_ids {list(ids)}: SGLang supports only ids from 1 to {facts.n_layers - 1}")
        return Exported(
            {
                "architectures": ["LlamaForCausalLMEagle3"],
                **layer_keys(config, dtype_of(draft.head.state_dict())),
                "draft_vocab_size": config.draft_vocab_size,
                "target_hidden_size": config.target_hidden_size,
                "norm_before_residual": config.norm_before_residual,
                **_norm_keys(config),
                "num_aux_hidden_states": len(ids),
                AUX_KEY: list(ids),
                "eagle_config": {AUX_KEY: [i - 1 for i in ids], "use_aux_hidden_state": True},
            },
            _eagle3_tensors(draft),
            config,
            notes=[
                f"auxiliary layers: {AUX_KEY} {list(ids)} (inputs of layers, vLLM's meaning) and in eagle_config "
                f"{[i - 1 for i in ids]} (outputs, SGLang's)"
            ],
        )

    return build


def _eagle3_for_speculators(
    draft: DraftCheckpoint, config: Eagle3Config, facts: TargetFacts, draft_tokens: int
) -> Exported:
    _refuse_variants(config, "speculators")
    layer = layer_keys(config, dtype_of(draft.head.state_dict()))
    if config.qk_norm:
        layer["model_type"] = "qwen3"
    if len(config.aux_layer_ids) != 3:
        layer["num_aux_hidden_states"] = len(config.aux_layer_ids)
    try:
        added = {EMBEDDING: target_embedding(facts)}
        notes = [f"{EMBEDDING} is the target's, as speculators' own loader requires"]
    except TargetError as error:
        added, notes = (
            {},
            [f"{EMBEDDING} is left out ({error}): vLLM reads the target's, speculators' own loader needs it"],
        )
    return Exported(
        {
            "architectures": ["Eagle3Speculator"],
            **speculators_keys("eagle3", facts, draft_tokens),
            "transformer_layer_config": layer,
            "draft_vocab_size": config.draft_vocab_size,
            "target_hidden_size": config.target_hidden_size,
            "norm_before_residual": config.norm_before_residual,
            "norm_before_fc": config.norm_before_fc,
            "fc_norm": config.fc_norm,
            "norm_output": config.norm_output,
            "embed_requires_grad": False,
            "tie_word_embeddings": False,
            AUX_KEY: list(config.aux_layer_ids),
            "torch_dtype": layer["torch_dtype"],
        },
        {**_eagle3_tensors(draft, "layers.0."), **added},
        config,
        added=added,
        notes=notes,
    )


def _eagle3_for_eagle(draft: DraftCheckpoint, config: Eagle3Config, facts: TargetFacts, _tokens: int) -> Exported:
    _refuse_variants(config, "eagle")
    usual = (2, facts.n_layers // 2, facts.n_layers - 3)
    if config.aux_layer_ids != usual:
        raise ExportError(
            f"aux_layer_ids {list(config.aux_layer_ids)}: SafeAILab's code always uses {list(usual)} for {facts.name}"
        )
    keys = plain_rope(config, layer_keys(config, dtype_of(draft.head.state_dict())))
    added, notes = _embedding_for_eagle(facts)
    if added:
        keys["target_hidden_size"] = config.target_hidden_size
    return Exported(
        {"architectures": ["LlamaForCausalLM"], **keys, "draft_vocab_size": config.draft_vocab_size},
        {**_eagle3_tensors(draft), **added},
        config,
        PICKLE,
        added,
        notes,
    )


def _eagle3_for_llama_cpp(draft: DraftCheckpoint, config: Eagle3Config, facts: TargetFacts, _tokens: int) -> Exported:
    """The settings and tensors as vLLM has them; gguf_head.py writes them under llama.cpp's names."""
    _refuse_variants(config, "gguf")
    ids = config.aux_layer_ids
    if len(ids) != 3 or ids[-1] >= facts.n_layers:
        raise ExportError(f"aux_layer_ids {list(ids)}: llama.cpp reads three, each below {facts.n_layers}")
    notes = []
    if facts.model_type not in LLAMA_CPP_FAMILIES:
        notes.append(
            f"llama.cpp may hand out no hidden states of {facts.model_type} targets; then it stops at the load"
        )
    return Exported(
        {
            **layer_keys(config, dtype_of(draft.head.state_dict())),
            "target_hidden_size": config.target_hidden_size,
            "norm_before_residual": config.norm_before_residual,
            "norm_before_fc": config.norm_before_fc,
            AUX_KEY: list(ids),
        },
        _eagle3_tensors(draft),
        config,
        MODEL_FILE,
        notes=notes,
    )


def _embedding_for_eagle(facts: TargetFacts) -> tuple[dict[str, torch.Tensor], list[str]]:
    """SafeAILab's model reads the target's embedding by its index of shards, or, with target_hidden_size, brings it."""
    if is_sharded(facts):
        return {}, []
    note = f"{EMBEDDING} is the target's: SafeAILab's code reads it from weights with an index of shards only"
    return {EMBEDDING: target_embedding(facts)}, [note]


BUILDERS: dict[str, Builder] = {
    "sglang": _eagle3_for_engines("sglang"),
    "vllm": _eagle3_for_engines("vllm"),
    "speculators": _eagle3_for_speculators,
    "eagle": _eagle3_for_eagle,
    "gguf": _eagle3_for_llama_cpp,
}
