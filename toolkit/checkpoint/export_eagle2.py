"""EAGLE-1/2 heads for SGLang, vLLM and SafeAILab's own code, as `export_eagle3.py` has it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from toolkit.checkpoint.draft_dir import DraftCheckpoint, dtype_of
from toolkit.checkpoint.errors import ExportError
from toolkit.checkpoint.exported import NO_BIAS, NO_WINDOW, Builder, Exported, layer_keys, plain_rope
from toolkit.checkpoint.files import PICKLE, SAFETENSORS
from toolkit.heads.eagle2 import Eagle2Config
from toolkit.targets.facts import TargetFacts, is_sharded


def _eagle2_for(to: str) -> Builder:
    def build(draft: DraftCheckpoint, config: Eagle2Config, facts: TargetFacts, _tokens: int) -> Exported:
        state, notes, added = dict(draft.head.state_dict()), [], {}
        if to != "vllm" and config.sliding_window:
            raise ExportError(f"the head has sliding_window, which cannot be written for {to}: {NO_WINDOW}")
        names: dict[str, Any] = {"architectures": ["LlamaForCausalLM"]}
        keys = layer_keys(config, dtype_of(state))
        if to == "sglang":
            if config.attention_bias:
                raise ExportError(f"the head has attention_bias, which cannot be written for {to}: {NO_BIAS}")
            if not config.fc_bias:
                added = {"fc.bias": torch.zeros_like(state["fc.weight"][:, 0])}
                config = replace(config, fc_bias=True)
                notes.append("fc.bias is written as zeros: SGLang's fc has a bias and would leave it uninitialised")
            names = {"architectures": ["LlamaForCausalLMEagle"]}
        elif to == "vllm":
            if config.fc_bias:
                raise ExportError("the head's fc has a bias; vLLM's has none and refuses the tensor")
            names = {"architectures": ["EagleLlamaForCausalLM"], "qkv_bias": config.attention_bias}
        else:
            keys = plain_rope(config, keys)
            names |= {"bias": config.fc_bias, "qkv_bias": config.attention_bias}
            if not is_sharded(facts):
                notes.append(
                    "SafeAILab's code finds the target's embedding by an index of shards, which this target lacks"
                )
        weights = PICKLE if to == "eagle" else SAFETENSORS
        return Exported({**keys, **names}, {**state, **added}, config, weights, added, notes)

    return build


BUILDERS: dict[str, Builder] = {to: _eagle2_for(to) for to in ("sglang", "vllm", "eagle")}
