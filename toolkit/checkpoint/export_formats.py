"""A head in the words of another project: the config and the tensors that its loader reads, or the reason it cannot.

Read in SGLang 0.5.23, vLLM 0.32.0, speculators 0.9.0 and SafeAILab/EAGLE: a key that one of them would skip, or a
parameter that it would leave unset, is refused here, since none of them says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from toolkit.checkpoint.draft_dir import DraftCheckpoint, dtype_of
from toolkit.checkpoint.errors import ExportError
from toolkit.checkpoint.files import PICKLE, SAFETENSORS
from toolkit.checkpoint.head_kinds import window_keys
from toolkit.checkpoint.import_eagle3 import AUX_KEY, EMBEDDING
from toolkit.heads.eagle2 import Eagle2Config
from toolkit.heads.eagle3 import Eagle3Config
from toolkit.heads.head_config import HeadConfig
from toolkit.targets.facts import TargetFacts, is_sharded, target_embedding
from toolkit.targets.load import TargetError

# Variants of an EAGLE-3 head that each loader has no place for, and what it would do instead.
NO_WINDOW = "its head would attend to the whole context"
NO_BIAS = "its loader has no such bias, or makes one for o_proj too and leaves it unset"
REFUSED: dict[str, dict[str, str]] = {
    "sglang": {
        "norm_before_residual": "SGLang does not read it: the head would be served without",
        "qk_norm": "SGLang's LlamaForCausalLMEagle3 has no query and key norms and skips their tensors",
        "fc_bias": NO_BIAS,
        "attention_bias": NO_BIAS,
        "sliding_window": NO_WINDOW,
        "num_hidden_layers": "SGLang has one layer, or further ones that leave out the first one's residual",
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
        "SafeAILab's EAGLE-3 model has no part for it and drops the tensors",
    ),
}

_WHY_NOT = {
    "mtp": "other engines serve MTP layers inside their target alone, from the target's own checkpoint",
    "eagle2": "speculators 0.9 reads EAGLE-3 and later; --to vllm, sglang and eagle are possible",
}


@dataclass
class Exported:
    """What is written. `config_of_head`: what a reader must find, `added`: tensors beyond the head's own."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    config_of_head: HeadConfig
    weights: str = SAFETENSORS
    added: dict[str, torch.Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def exported(draft: DraftCheckpoint, to: str, facts: TargetFacts, draft_tokens: int) -> Exported:
    """`draft` for `to`: sglang, vllm, speculators or eagle. draft_tokens: a chain's length, where the format holds one.

    Raises `ExportError` for a head that would not be the same there.
    """
    build = BUILDERS.get((draft.kind, to))
    if build is None:
        raise ExportError(
            f"a {draft.kind} head cannot be written for {to}: {_WHY_NOT.get(draft.kind, 'no such loader')}"
        )
    config, notes = _with_reach(draft.head.config, facts)
    result = build(draft, config, facts, draft_tokens)
    result.notes[:0] = notes
    return result


def _with_reach(config: HeadConfig, facts: TargetFacts) -> tuple[HeadConfig, list[str]]:
    """max_position_embeddings at least the target's: vLLM ends the head's rotation there, or stops."""
    own, wanted = config.max_position_embeddings, facts.max_context or 0
    if own >= wanted or config.rope_parameters.get("rope_type", "default") != "default":
        return config, []
    return replace(config, max_position_embeddings=wanted), [
        f"max_position_embeddings {own} is written as the target's {wanted}: the rotation stays the same at every "
        "position, and vLLM would end it at the smaller one"
    ]


def _layer_keys(config: HeadConfig, dtype: torch.dtype) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, **config.rope_parameters}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    name = str(dtype).removeprefix("torch.")
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": getattr(config, "num_hidden_layers", 1),
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        # transformers 4 reads the first two of these, transformers 5 the third.
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "rope_parameters": rope,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": name,
        **window_keys(config),
    }


def _refuse_variants(config: Eagle3Config, to: str) -> None:
    usual = {one.name: one.default for one in fields(config)}
    for key, why in REFUSED[to].items():
        value = getattr(config, key)
        if value != usual[key]:
            said = key if value is True else f"{key} {value}"
            raise ExportError(f"the head has {said}, which cannot be written for {to}: {why}")


def _eagle3_tensors(draft: DraftCheckpoint, prefix: str = "midlayer.") -> dict[str, torch.Tensor]:
    """The head's tensors and its token map; the map of a whole vocabulary is left out, as every loader wants it."""
    state = {
        (prefix + name.removeprefix("midlayer.")) if name.startswith("midlayer.") else name: value
        for name, value in draft.head.state_dict().items()
    }
    if draft.token_map.size == draft.token_map.vocab_size:
        return state
    return {**state, "d2t": draft.token_map.d2t, "t2d": draft.token_map.t2d}


def _norm_keys(config: Eagle3Config) -> dict[str, Any]:
    # norm_output is written only where it is true: SpecForge gives the word another meaning.
    return {key: True for key in ("fc_norm", "norm_before_fc", "norm_output") if getattr(config, key)}


def _eagle3_for_engines(to: str) -> Callable[..., Exported]:
    """SGLang and vLLM read the same file, with the auxiliary layers in both conventions, each under its own key."""

    def build(draft: DraftCheckpoint, config: Eagle3Config, facts: TargetFacts, _tokens: int) -> Exported:
        _refuse_variants(config, to)
        ids = config.aux_layer_ids
        if to == "sglang" and (ids[0] < 1 or ids[-1] >= facts.n_layers):
            raise ExportError(
                f"aux_layer_ids {list(ids)}: SGLang takes the inputs of layers 1 to {facts.n_layers - 1} alone"
            )
        return Exported(
            {
                "architectures": ["LlamaForCausalLMEagle3"],
                **_layer_keys(config, dtype_of(draft.head.state_dict())),
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
    layer = _layer_keys(config, dtype_of(draft.head.state_dict()))
    if config.qk_norm:
        layer["model_type"] = "qwen3"
    if len(config.aux_layer_ids) != 3:
        layer["num_aux_hidden_states"] = len(config.aux_layer_ids)
    try:
        added = {EMBEDDING: target_embedding(facts)}
        notes = [f"{EMBEDDING} is the target's, as speculators' own loader wants it"]
    except TargetError as error:
        added, notes = (
            {},
            [f"{EMBEDDING} is left out ({error}): vLLM takes the target's, speculators' loader must be told"],
        )
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return Exported(
        {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": {"name_or_path": facts.source, "architectures": [facts.architecture]},
            },
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
            f"aux_layer_ids {list(config.aux_layer_ids)}: SafeAILab's code always takes {list(usual)} of {facts.name}"
        )
    keys = _plain_rope(config, _layer_keys(config, dtype_of(draft.head.state_dict())))
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


def _embedding_for_eagle(facts: TargetFacts) -> tuple[dict[str, torch.Tensor], list[str]]:
    """SafeAILab's model reads the target's embedding by its index of shards, or, with target_hidden_size, brings it."""
    if is_sharded(facts):
        return {}, []
    note = f"{EMBEDDING} is the target's: SafeAILab's code finds it there by itself only in weights with an index"
    return {EMBEDDING: target_embedding(facts)}, [note]


def _plain_rope(config: HeadConfig, keys: dict[str, Any]) -> dict[str, Any]:
    """SafeAILab's model reads rope_theta, and of scaled rotations none as the target computes it."""
    if keys["rope_scaling"] is not None:
        raise ExportError(f"rope {config.rope_parameters}: SafeAILab's model has no such rotation")
    return {key: value for key, value in keys.items() if key != "rope_parameters"}


def _eagle2_for(to: str) -> Callable[..., Exported]:
    def build(draft: DraftCheckpoint, config: Eagle2Config, facts: TargetFacts, _tokens: int) -> Exported:
        state, notes, added = dict(draft.head.state_dict()), [], {}
        if to != "vllm" and config.sliding_window:
            raise ExportError(f"the head has sliding_window, which cannot be written for {to}: {NO_WINDOW}")
        names: dict[str, Any] = {"architectures": ["LlamaForCausalLM"]}
        keys = _layer_keys(config, dtype_of(state))
        if to == "sglang":
            if config.attention_bias:
                raise ExportError(f"the head has attention_bias, which cannot be written for {to}: {NO_BIAS}")
            if not config.fc_bias:
                added = {"fc.bias": torch.zeros_like(state["fc.weight"][:, 0])}
                config = replace(config, fc_bias=True)
                notes.append("fc.bias is written as zeros: SGLang's fc has a bias, which it would leave unset")
            names = {"architectures": ["LlamaForCausalLMEagle"]}
        elif to == "vllm":
            if config.fc_bias:
                raise ExportError("the head's fc has a bias; vLLM's has none and refuses the tensor")
            names = {"architectures": ["EagleLlamaForCausalLM"], "qkv_bias": config.attention_bias}
        else:
            keys = _plain_rope(config, keys)
            names |= {"bias": config.fc_bias, "qkv_bias": config.attention_bias}
            if not is_sharded(facts):
                notes.append("SafeAILab's code reads the target's embedding by its index of shards, which it lacks")
        weights = PICKLE if to == "eagle" else SAFETENSORS
        return Exported({**keys, **names}, {**state, **added}, config, weights, added, notes)

    return build


BUILDERS: Mapping[tuple[str, str], Callable[..., Exported]] = {
    ("eagle3", "sglang"): _eagle3_for_engines("sglang"),
    ("eagle3", "vllm"): _eagle3_for_engines("vllm"),
    ("eagle3", "speculators"): _eagle3_for_speculators,
    ("eagle3", "eagle"): _eagle3_for_eagle,
    ("eagle2", "sglang"): _eagle2_for("sglang"),
    ("eagle2", "vllm"): _eagle2_for("vllm"),
    ("eagle2", "eagle"): _eagle2_for("eagle"),
}
