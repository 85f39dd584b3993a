"""EAGLE-3 heads of other projects: SafeAILab, SpecForge, SGLang's and vLLM's forms, AngelSlim, ModelOpt, speculators,
and llama.cpp, whose file `gguf_head.py` writes.

Read in SGLang 0.5.23, vLLM 0.32.0, speculators 0.9.0, SafeAILab/EAGLE and the llama.cpp of llama-cpp-python 0.3.36: a
key that one of them would skip, or a parameter that it would leave unset, is refused here, since none of them says so.
"""

from __future__ import annotations

from typing import Any

from toolkit.checkpoint.files import PICKLE
from toolkit.checkpoint.formats import (
    EMBEDDING,
    NO_BIAS,
    NO_WINDOW,
    Exported,
    Format,
    Reading,
    plain_rope,
    speculators_keys,
)
from toolkit.checkpoint.gguf_head import AUX_KEY, MODEL_FILE
from toolkit.errors import ExportError, TargetError
from toolkit.heads.eagle3 import Eagle3Config
from toolkit.targets.facts import TargetFacts, is_sharded, target_embedding

SIZES = ("draft_vocab_size", "target_hidden_size")  # settings that are written for every engine
BY_KEY = ("norm_before_residual", "norm_output")  # variants that the config alone states
# A tensor that shows a variant, and the keys that state it; the first of them is written.
BY_TENSOR: dict[str, tuple[str, tuple[str, ...]]] = {
    "fc_norm": ("fc_norm.0.weight", ("fc_norm", "use_aux_norm")),
    "norm_before_fc": ("input_norm.weight", ("norm_before_fc",)),
    "fc_bias": ("fc.bias", ("bias",)),
    "attention_bias": ("midlayer.self_attn.q_proj.bias", ("attention_bias",)),
    "qk_norm": ("midlayer.self_attn.q_norm.weight", ()),
}
# Families of transformers whose hidden states llama.cpp can read. It stops where a graph has none.
LLAMA_CPP_FAMILIES = ("llama", "mistral", "qwen3", "qwen3_moe", "qwen3_next", "gpt_oss", "gemma4", "minimax_m2")


def _variants(reading: Reading) -> dict[str, Any]:
    """What two projects read in two ways, with a warning."""
    found = {}
    for key in BY_KEY:
        value = reading.said.get(key)
        rule, doubtful = "as stated" if value is not None else "not stated: false", False
        if key == "norm_before_residual" and value is None and reading.speculators:
            value, doubtful = True, True
            rule = (
                "not stated in a speculators checkpoint: true, as vLLM reads it (speculators' own default is false); "
                f"if accept_length is near 1, try --set {key}=false"
            )
        if key == "norm_output" and value and not reading.speculators:
            doubtful = True
            rule += (
                ": the next step reads the state after the final norm. SpecForge's trainer means by true that this "
                f"norm stands before lm_head, and feeds back the state before it: for its heads say --set {key}=false"
            )
        found[key] = bool(reading.resolver.settle(key, bool(value), rule, warning=doubtful))
    return found


# -- write -------------------------------------------------------------------------------------------------------------


def _sizes(made: Exported) -> Eagle3Config:
    """Add the keys that every engine reads; returns the head's configuration."""
    config = made.config_of_head
    assert isinstance(config, Eagle3Config)
    made.config |= {key: getattr(config, key) for key in SIZES}
    return config


def _refuse_layers(config: Eagle3Config, refused: bool, why: str) -> None:
    if refused:
        raise ExportError(f"aux_layer_ids {list(config.aux_layer_ids)}: {why}")


def _sglang(made: Exported, facts: TargetFacts, draft_tokens: int) -> None:
    config, last = _sizes(made), facts.n_layers - 1
    ids = config.aux_layer_ids
    _refuse_layers(config, ids[0] < 1 or ids[-1] > last, f"SGLang supports only ids from 1 to {last}")
    _vllm(made, facts, draft_tokens)


def _vllm(made: Exported, facts: TargetFacts, _tokens: int) -> None:
    """SGLang and vLLM read the same file, with the auxiliary layers in both conventions, each under its own key."""
    config = _sizes(made)
    ids, outputs = list(config.aux_layer_ids), [i - 1 for i in config.aux_layer_ids]
    made.config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "norm_before_residual": config.norm_before_residual,
        # norm_output is written only where it is true: SpecForge gives the word another meaning.
        **{key: True for key in ("fc_norm", "norm_before_fc", "norm_output") if getattr(config, key)},
        "num_aux_hidden_states": len(ids),
        AUX_KEY: ids,
        "eagle_config": {AUX_KEY: outputs, "use_aux_hidden_state": True},
    }
    made.notes.append(
        f"auxiliary layers: {AUX_KEY} {ids} (inputs, for vLLM), in eagle_config {outputs} (outputs, for SGLang)"
    )


def _speculators(made: Exported, facts: TargetFacts, draft_tokens: int) -> None:
    config, layer = _sizes(made), made.config
    ids = list(config.aux_layer_ids)
    if config.qk_norm:
        layer["model_type"] = "qwen3"
    if len(ids) != 3:
        layer["num_aux_hidden_states"] = len(ids)
    made.config = {
        "architectures": ["Eagle3Speculator"],
        **speculators_keys("eagle3", facts, draft_tokens),
        **{key: layer.pop(key) for key in SIZES},
        "transformer_layer_config": layer,
        **{key: getattr(config, key) for key in ("norm_before_fc", "fc_norm", *BY_KEY)},
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        AUX_KEY: ids,
        "torch_dtype": layer["torch_dtype"],
    }
    made.tensors = {name.replace("midlayer.", "layers.0."): value for name, value in made.tensors.items()}
    try:
        made.add(EMBEDDING, target_embedding(facts), "is the target's, as speculators' own loader requires")
    except TargetError as error:
        made.notes.append(f"{EMBEDDING} is left out ({error}): vLLM reads the target's, speculators' loader needs it")


def _safeailab(made: Exported, facts: TargetFacts, _tokens: int) -> None:
    """Its model reads the target's embedding by its index of shards, or, with target_hidden_size, brings it."""
    config, usual = _sizes(made), (2, facts.n_layers // 2, facts.n_layers - 3)
    why = f"SafeAILab's code always uses {list(usual)} for {facts.name}"
    _refuse_layers(config, config.aux_layer_ids != usual, why)
    made.config, made.weights = plain_rope(made.config) | {"architectures": ["LlamaForCausalLM"]}, PICKLE
    if is_sharded(facts):
        del made.config["target_hidden_size"]
    else:
        why = "is the target's: SafeAILab's code reads it from weights with an index of shards only"
        made.add(EMBEDDING, target_embedding(facts), why)


def _llama_cpp(made: Exported, facts: TargetFacts, _tokens: int) -> None:
    """The settings and tensors as vLLM has them; gguf_head.py writes them under llama.cpp's names."""
    config, ids = _sizes(made), list(made.config_of_head.features.aux_layer_ids or ())
    few = len(ids) != 3 or ids[-1] >= facts.n_layers
    _refuse_layers(config, few, f"llama.cpp reads three, each below {facts.n_layers}")
    made.config |= {key: getattr(config, key) for key in ("norm_before_residual", "norm_before_fc")}
    made.config[AUX_KEY], made.weights = ids, MODEL_FILE
    if facts.model_type not in LLAMA_CPP_FAMILIES:
        made.notes.append(
            f"llama.cpp may hand out no hidden states of {facts.model_type} targets, and stop at the load"
        )


FORMAT = Format(
    config=Eagle3Config,
    first_layer="midlayer.",
    variants=_variants,
    names={
        "layers.0.": "midlayer.",
        "aux_norm_low.": "fc_norm.0.",
        "aux_norm_mid.": "fc_norm.1.",
        "aux_norm_high.": "fc_norm.2.",
        "draft_id_to_target_id": "d2t",
    },
    nested=("eagle_config",),
    # The one value that the first layer computes.
    fixed={
        **dict.fromkeys(("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm"), True),
        "use_mtp_layernorm": False,
    },
    keys={*BY_KEY, "parallel_drafting", "embed_requires_grad", "head_type"},
    by_tensor=BY_TENSOR,
    aux={AUX_KEY: 0, f"eagle_config.{AUX_KEY}": 1},
    usual_aux=True,
    writers={
        "sglang": _sglang,
        "vllm": _vllm,
        "speculators": _speculators,
        "eagle": _safeailab,
        "gguf": _llama_cpp,
    },
    refused={
        "sglang": {
            "norm_before_residual": "SGLang ignores it and would serve the head without it",
            "qk_norm": "SGLang's LlamaForCausalLMEagle3 has no query and key norms and skips their tensors",
            "fc_bias": NO_BIAS,
            "attention_bias": NO_BIAS,
            "sliding_window": NO_WINDOW,
            "num_hidden_layers": "SGLang has one layer; its own form of further layers lacks the first one's residual",
        },
        "vllm": {
            "qk_norm": "vLLM's LlamaForCausalLMEagle3 has no such norms; --to speculators writes its Qwen3 form",
            "fc_bias": NO_BIAS,
            "attention_bias": NO_BIAS,
        },
        "speculators": {"fc_bias": NO_BIAS, "attention_bias": NO_BIAS},
        "eagle": {"sliding_window": NO_WINDOW, "num_hidden_layers": "SafeAILab's EAGLE-3 model has one layer"}
        | dict.fromkeys((*BY_TENSOR, *BY_KEY), "SafeAILab's EAGLE-3 model does not support it and drops the tensors"),
        "gguf": {
            "norm_output": "llama.cpp hands the state before the final norm to the next step",
            "sliding_window": NO_WINDOW,
            "num_hidden_layers": "llama.cpp's EAGLE-3 model has one layer",
            "fc_norm": "llama.cpp has one norm before fc, over all auxiliary layers",
        }
        | dict.fromkeys(("qk_norm", "fc_bias", "attention_bias"), "llama.cpp's EAGLE-3 model has no such tensors"),
    },
)
