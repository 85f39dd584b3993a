"""EAGLE-3 heads of other projects: SafeAILab, SpecForge, SGLang's and vLLM's forms, AngelSlim, ModelOpt, speculators,
and llama.cpp, whose file `gguf_head.py` writes.

Read in SGLang 0.5.23, vLLM 0.32.0, speculators 0.9.0, SafeAILab/EAGLE and the llama.cpp of llama-cpp-python 0.3.36: a
key that one of them would skip, or a parameter that it would leave unset, is refused here, since none of them says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.checkpoint.files import PICKLE, plain_name
from toolkit.checkpoint.formats import (
    EMBEDDING,
    NO_BIAS,
    NO_WINDOW,
    TARGETS_OWN,
    Builder,
    Exported,
    Resolver,
    Tensors,
    check_aux_layers,
    count_layers,
    layer_keys,
    layer_settings,
    map_tensors,
    note_unread,
    plain_rope,
    read_token_map,
    refuse_unless,
    renamed,
    speculators_keys,
    target_width,
)
from toolkit.checkpoint.gguf_head import AUX_KEY, MODEL_FILE
from toolkit.errors import DraftDirError, ExportError, TargetError
from toolkit.heads.eagle3 import Eagle3Config
from toolkit.targets.facts import TargetFacts, is_sharded, target_embedding
from toolkit.tokenmap.token_map import TokenMap
from toolkit.weights import WeightsError

# Beginnings of tensor names, theirs -> ours.
NAMES = {
    "layers.0.": "midlayer.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
    "draft_id_to_target_id": "d2t",
}
# Variants with tensors: our field -> a tensor that shows it, and the keys that state it; the first of them is written.
BY_TENSOR: dict[str, tuple[str, tuple[str, ...]]] = {
    "fc_norm": ("fc_norm.0.weight", ("fc_norm", "use_aux_norm")),
    "norm_before_fc": ("input_norm.weight", ("norm_before_fc",)),
    "fc_bias": ("fc.bias", ("bias",)),
    "attention_bias": ("midlayer.self_attn.q_proj.bias", ("attention_bias",)),
    "qk_norm": ("midlayer.self_attn.q_norm.weight", ()),
}
SIZES = ("draft_vocab_size", "target_hidden_size")  # settings that are written for every engine
BY_KEY = ("norm_before_residual", "norm_output")  # variants that the config alone states
# Keys of eagle_config with the one value that the first layer computes.
FIXED = {
    **dict.fromkeys(("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm"), True),
    "use_mtp_layernorm": False,
}
OWN_KEYS = {AUX_KEY, *FIXED, *BY_KEY, *(key for _, keys in BY_TENSOR.values() for key in keys)} | {
    "eagle_config", "parallel_drafting", "embed_requires_grad", "head_type",
}  # fmt: skip
# Variants that each loader has no place for, and what it would do instead.
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
    | dict.fromkeys((*BY_TENSOR, *BY_KEY), "SafeAILab's EAGLE-3 model does not support it and drops the tensors"),
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

# -- read --------------------------------------------------------------------------------------------------------------


def import_eagle3(
    config: Mapping[str, Any], stored: Mapping[str, torch.Tensor], resolver: Resolver, facts: TargetFacts | None
) -> tuple[Eagle3Config, Tensors, TokenMap, torch.Tensor | None]:
    """Config, the head's tensors, token map, and the embedding that came with the checkpoint (None without one).

    `facts` of the target are needed only where the checkpoint does not state its auxiliary layers. Raises
    `DraftDirError`, `WeightsError`, `TokenMapError`.
    """
    speculators = "transformer_layer_config" in config
    layer = {**config["transformer_layer_config"]} if speculators else dict(config)
    nested = config.get("eagle_config") or {}
    for key, value in FIXED.items():
        refuse_unless(nested, key, value)
    tensors, embedding = renamed(stored, _our_name, TARGETS_OWN, resolver)
    shapes = layer_settings(layer, tensors, "midlayer.", resolver)
    width = target_width(config, shapes)
    token_map = read_token_map(config, shapes["vocab_size"], tensors, resolver)
    ids = _aux_layer_ids(config, resolver, facts)
    check_aux_layers(ids, facts)
    variants: dict[str, Any] = {
        **_by_tensor(config, tensors, speculators, resolver),
        **_by_key(config, speculators, resolver),
    }
    layers = _layers(layer, stored, tensors, resolver)
    note_unread({**layer, **config} if speculators else config, OWN_KEYS, resolver)
    own = Eagle3Config(
        **shapes, target_hidden_size=width, draft_vocab_size=token_map.size, aux_layer_ids=ids,
        num_hidden_layers=layers, **variants,
    )  # fmt: skip
    return own, tensors, token_map, embedding


def _our_name(name: str) -> str:
    name = plain_name(name)
    theirs = next((one for one in NAMES if name.startswith(one)), None)
    return name if theirs is None else NAMES[theirs] + name.removeprefix(theirs)


def _layers(layer: Mapping[str, Any], stored: Iterable[str], tensors: Tensors, resolver: Resolver) -> int:
    """Decoder layers, by the weights. Raises `DraftDirError` where the config states others and may be right."""
    found, stated = 1 + count_layers(tensors, None), layer.get("num_hidden_layers")
    if stated in (None, found):
        return found
    if found > 1 or not any("midlayer." in name for name in stored):
        raise DraftDirError(f"config.json: num_hidden_layers is {stated}, the weights have {found}")
    rule = f"a head with a midlayer and no layers.1 has one layer; the config's {stated} (its target's?) is not read"
    resolver.note("num_hidden_layers", found, rule, warning=True)
    return found


def _aux_layer_ids(config: Mapping[str, Any], resolver: Resolver, facts: TargetFacts | None) -> tuple[int, ...]:
    """As indices into HF hidden_states, our convention (id k = input of layer k)."""
    as_input = tuple(config.get(AUX_KEY) or ())
    as_output = tuple((config.get("eagle_config") or {}).get(AUX_KEY) or ())
    default = () if facts is None else (2, facts.n_layers // 2, facts.n_layers - 3)
    given = resolver.overridden("aux_layer_ids")
    if as_input and as_output and as_input != tuple(i + 1 for i in as_output) and not given:
        raise DraftDirError(
            f"config.json: {AUX_KEY} is {list(as_input)} (inputs, as vLLM reads it) and in eagle_config "
            f"{list(as_output)} (outputs, as SGLang reads it, one less), which are different layers; give the right "
            "ones with --set aux_layer_ids=a,b,c (id k = input of layer k)"
        )
    if as_input:
        ids, rule = as_input, f"{AUX_KEY}, as speculators and vLLM mean it: id k is the input of layer k"
    elif as_output:
        ids = tuple(i + 1 for i in as_output)
        rule = f"eagle_config.{AUX_KEY} {list(as_output)}, as SGLang, SpecForge and ModelOpt mean it: outputs, plus 1"
    elif default or given:
        ids, rule = default, "not stated: (2, n//2, n-3), which every engine takes then"
    else:
        raise DraftDirError(
            f"config.json does not state {AUX_KEY}, and the usual (2, n//2, n-3) depend on the target: name it with "
            "`target`"
        )
    shifted = bool(default) and default in [tuple(i + by for i in ids) for by in (-1, 1)]
    if shifted:
        usual = ",".join(map(str, default))
        rule += f". This target's usual ones are {usual}: these look off by one; try --set aux_layer_ids={usual}"
    return tuple(resolver.settle("aux_layer_ids", ids, rule, warning=shifted))


def _by_tensor(config: Mapping[str, Any], tensors: Tensors, speculators: bool, resolver: Resolver) -> dict[str, bool]:
    nested, found = config.get("eagle_config") or {}, {}
    for key, (tensor, keys) in BY_TENSOR.items():
        stated = any(bool(config.get(name) or nested.get(name)) for name in keys)
        found[key] = tensor in tensors
        if found[key]:
            lost = bool(keys) and not stated
            rule = f"the checkpoint has {tensor}"
            rule += f", though its config does not set {keys[0]}: other engines would leave it out" if lost else ""
            resolver.note(key, True, rule, warning=lost)
        elif stated and key in ("fc_norm", "norm_before_fc"):
            raise WeightsError(f"missing: {tensor}. The config sets {key}")
        elif stated and not speculators:
            resolver.note(key, False, f"the config sets {key}, but there is no {tensor}", warning=True)
    return found


def _by_key(config: Mapping[str, Any], speculators: bool, resolver: Resolver) -> dict[str, bool]:
    """What two projects read in two ways, with a warning. Raises `DraftDirError` where a config contradicts itself."""
    found, nested = {}, config.get("eagle_config") or {}
    for key in BY_KEY:
        own, inner = config.get(key), nested.get(key)
        if own is not None and inner is not None and own != inner:
            raise DraftDirError(f"config.json: {key} is {own}, and in eagle_config {inner}; leave the wrong one out")
        value, elsewhere = (inner if own is None else own), own is None and inner is not None
        rule, doubtful = "as stated" if value is not None else "not stated: false", elsewhere
        if elsewhere:
            rule += f"; it stands in eagle_config.{key}, where other engines may not look for it"
        if key == "norm_before_residual" and value is None and speculators:
            value, doubtful = True, True
            rule = (
                "not stated in a speculators checkpoint: true, as vLLM reads it (speculators' own default is false); "
                f"if accept_length is near 1, try --set {key}=false"
            )
        if key == "norm_output" and value and not speculators:
            doubtful = True
            rule += (
                ": the next step reads the state after the final norm. SpecForge's trainer means by true that this "
                f"norm stands before lm_head, and feeds back the state before it: for its heads say --set {key}=false"
            )
        found[key] = bool(resolver.settle(key, bool(value), rule, warning=doubtful))
    return found


# -- write -------------------------------------------------------------------------------------------------------------


def _refuse(config: Eagle3Config, to: str, facts: TargetFacts) -> None:
    """Raises `ExportError` for a head that `to` would not draft with as it is."""
    usual = {one.name: one.default for one in fields(config)}
    for key, why in REFUSED[to].items():
        value = getattr(config, key)
        if value != usual[key]:
            said = key if value is True else f"{key} {value}"
            raise ExportError(f"the head has {said}, which cannot be written for {to}: {why}")
    ids, layers = config.aux_layer_ids, facts.n_layers
    default = (2, layers // 2, layers - 3)
    wrong = {
        "sglang": (ids[0] < 1 or ids[-1] >= layers, f"SGLang supports only ids from 1 to {layers - 1}"),
        "eagle": (ids != default, f"SafeAILab's code always uses {list(default)} for {facts.name}"),
        "gguf": (len(ids) != 3 or ids[-1] >= layers, f"llama.cpp reads three, each below {layers}"),
    }
    refused, why = wrong.get(to, (False, ""))
    if refused:
        raise ExportError(f"aux_layer_ids {list(ids)}: {why}")


def _eagle3_for(to: str) -> Builder:
    def build(draft: DraftCheckpoint, config: Eagle3Config, facts: TargetFacts, draft_tokens: int) -> Exported:
        _refuse(config, to, facts)
        state = draft.head.state_dict()
        keys = layer_keys(config, state) | {key: getattr(config, key) for key in SIZES}
        made = Exported(keys, state | map_tensors(draft), config)
        if to == "speculators":
            _speculators(made, config, facts, draft_tokens)
        elif to == "eagle":
            _safeailab(made, config, facts)
        elif to == "gguf":
            _llama_cpp(made, config, facts)
        else:
            _engines(made, config)
        return made

    return build


def _engines(made: Exported, config: Eagle3Config) -> None:
    """SGLang and vLLM read the same file, with the auxiliary layers in both conventions, each under its own key."""
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
    made.notes = [
        f"auxiliary layers: {AUX_KEY} {ids} (inputs, for vLLM), in eagle_config {outputs} (outputs, for SGLang)"
    ]


def _speculators(made: Exported, config: Eagle3Config, facts: TargetFacts, draft_tokens: int) -> None:
    layer, ids = made.config, list(config.aux_layer_ids)
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
        made.notes = [f"{EMBEDDING} is left out ({error}): vLLM reads the target's, speculators' own loader needs it"]


def _safeailab(made: Exported, config: Eagle3Config, facts: TargetFacts) -> None:
    """Its model reads the target's embedding by its index of shards, or, with target_hidden_size, brings it."""
    made.config = plain_rope(config, made.config) | {"architectures": ["LlamaForCausalLM"]}
    made.weights = PICKLE
    if is_sharded(facts):
        del made.config["target_hidden_size"]
    else:
        why = "is the target's: SafeAILab's code reads it from weights with an index of shards only"
        made.add(EMBEDDING, target_embedding(facts), why)


def _llama_cpp(made: Exported, config: Eagle3Config, facts: TargetFacts) -> None:
    """The settings and tensors as vLLM has them; gguf_head.py writes them under llama.cpp's names."""
    made.config |= {key: getattr(config, key) for key in ("norm_before_residual", "norm_before_fc")}
    made.config[AUX_KEY], made.weights = list(config.aux_layer_ids), MODEL_FILE
    if facts.model_type not in LLAMA_CPP_FAMILIES:
        made.notes = [f"llama.cpp may hand out no hidden states of {facts.model_type} targets, and stop at the load"]


BUILDERS: dict[str, Builder] = {to: _eagle3_for(to) for to in REFUSED}
