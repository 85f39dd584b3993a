"""EAGLE-1 and EAGLE-2 heads in SafeAILab's form (HASS trains the same), and for SGLang and vLLM: one architecture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from toolkit.checkpoint.files import PICKLE
from toolkit.checkpoint.formats import NO_BIAS, NO_WINDOW, Exported, Format, Reading, plain_rope, refuse_unless
from toolkit.heads.eagle2 import Eagle2Config
from toolkit.targets.facts import TargetFacts, is_sharded


def _variants(reading: Reading) -> dict[str, Any]:
    refuse_unless(reading.said, "draft_vocab_size", reading.shapes["vocab_size"])
    return {}


def _sglang(made: Exported, facts: TargetFacts, _tokens: int) -> None:
    made.config["architectures"] = ["LlamaForCausalLMEagle"]
    if "fc.bias" not in made.tensors:
        why = "is written as zeros: SGLang's fc has a bias and would leave it uninitialised"
        made.add("fc.bias", torch.zeros_like(made.tensors["fc.weight"][:, 0]), why)
        made.config_of_head = replace(made.config_of_head, fc_bias=True)  # type: ignore[call-arg]


def _vllm(made: Exported, facts: TargetFacts, _tokens: int) -> None:
    made.config |= {"architectures": ["EagleLlamaForCausalLM"], "qkv_bias": _stated(made)["qkv_bias"]}


def _safeailab(made: Exported, facts: TargetFacts, _tokens: int) -> None:
    made.config, made.weights = plain_rope(made.config) | _stated(made), PICKLE
    made.config["architectures"] = ["LlamaForCausalLM"]
    if not is_sharded(facts):
        made.notes.append("SafeAILab's code finds the target's embedding by an index of shards, which it lacks")


def _stated(made: Exported) -> dict[str, bool]:
    return {keys[0]: tensor in made.tensors for tensor, keys in FORMAT.by_tensor.values()}


FORMAT = Format(
    config=Eagle2Config,
    first_layer="layers.0.",
    variants=_variants,
    dropped=("lm_head.weight",),
    nested=("eagle_config",),
    by_tensor={
        "fc_bias": ("fc.bias", ("bias",)),
        "attention_bias": ("layers.0.self_attn.q_proj.bias", ("qkv_bias",)),
    },
    writers={"sglang": _sglang, "vllm": _vllm, "eagle": _safeailab},
    refused={
        "sglang": {"sliding_window": NO_WINDOW, "attention_bias": NO_BIAS},
        "vllm": {"fc_bias": "vLLM's fc has no bias and refuses the tensor"},
        "eagle": {"sliding_window": NO_WINDOW},
    },
    why_not="speculators 0.9 and llama.cpp read EAGLE-3 heads; --to vllm, sglang and eagle are possible",
)
