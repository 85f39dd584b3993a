"""EAGLE-1 and EAGLE-2 heads in SafeAILab's form (HASS trains the same), and for SGLang and vLLM: one architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.checkpoint.files import PICKLE, plain_name
from toolkit.checkpoint.formats import (
    NO_BIAS,
    NO_WINDOW,
    Builder,
    Exported,
    Resolver,
    Tensors,
    count_layers,
    layer_keys,
    layer_settings,
    note_unread,
    plain_rope,
    refuse_unless,
    renamed,
)
from toolkit.errors import ExportError
from toolkit.heads.eagle2 import Eagle2Config
from toolkit.targets.facts import TargetFacts, is_sharded
from toolkit.tokenmap.token_map import TokenMap

# Our switch: the tensor that shows it, and the key that SafeAILab's code reads.
SWITCHES = {"fc_bias": ("fc.bias", "bias"), "attention_bias": ("layers.0.self_attn.q_proj.bias", "qkv_bias")}
# What each loader has no place for.
REFUSED = {
    "sglang": {"sliding_window": NO_WINDOW, "attention_bias": NO_BIAS},
    "vllm": {"fc_bias": "vLLM's fc has no bias and refuses the tensor"},
    "eagle": {"sliding_window": NO_WINDOW},
}
ARCHITECTURES = {"sglang": "LlamaForCausalLMEagle", "vllm": "EagleLlamaForCausalLM", "eagle": "LlamaForCausalLM"}


def import_eagle2(
    config: Mapping[str, Any], stored: Mapping[str, torch.Tensor], resolver: Resolver, facts: TargetFacts | None
) -> tuple[Eagle2Config, Tensors, TokenMap, torch.Tensor | None]:
    """Config, the head's tensors, the map of the whole vocabulary, and the embedding that came with the checkpoint.

    Raises `DraftDirError`, `WeightsError`.
    """
    tensors, embedding = renamed(stored, plain_name, ("lm_head.weight",), resolver)
    shapes = layer_settings(config, tensors, "layers.0.", resolver)
    refuse_unless(config, "draft_vocab_size", config["vocab_size"])
    switches: dict[str, Any] = {name: tensor in tensors for name, (tensor, _) in SWITCHES.items()}
    bias = switches["fc_bias"]
    if bool(config.get("bias", bias)) != bias:
        resolver.note("fc_bias", bias, f"by the tensors; the config's bias is {config['bias']}", warning=True)
    layers = count_layers(tensors, config.get("num_hidden_layers"))
    note_unread(config, ("bias", "eagle_config"), resolver)
    own = Eagle2Config(**shapes, num_hidden_layers=layers, **switches)
    return own, tensors, TokenMap.identity(config["vocab_size"]), embedding


def _eagle2_for(to: str) -> Builder:
    def build(draft: DraftCheckpoint, config: Eagle2Config, facts: TargetFacts, _tokens: int) -> Exported:
        for name, reason in REFUSED[to].items():
            if getattr(config, name):
                raise ExportError(f"the head has {name}, which cannot be written for {to}: {reason}")
        state = draft.head.state_dict()
        made = Exported(layer_keys(config, state) | {"architectures": [ARCHITECTURES[to]]}, state, config)
        stated = {key: getattr(config, name) for name, (_, key) in SWITCHES.items()}
        if to == "sglang" and not config.fc_bias:
            why = "is written as zeros: SGLang's fc has a bias and would leave it uninitialised"
            made.add("fc.bias", torch.zeros_like(state["fc.weight"][:, 0]), why)
            made.config_of_head = replace(config, fc_bias=True)
        elif to == "vllm":
            made.config["qkv_bias"] = stated["qkv_bias"]
        elif to == "eagle":
            made.config, made.weights = plain_rope(config, made.config) | stated, PICKLE
            if not is_sharded(facts):
                made.notes.append("SafeAILab's code finds the target's embedding by an index of shards, which it lacks")
        return made

    return build


BUILDERS: dict[str, Builder] = {to: _eagle2_for(to) for to in ARCHITECTURES}
