"""EAGLE-1 and EAGLE-2 heads of SafeAILab's form (HASS trains the same): one architecture for both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from toolkit.checkpoint.errors import DraftDirError
from toolkit.checkpoint.layer_settings import layer_settings, note_embedding, note_unread, q_rows, refuse_unless
from toolkit.checkpoint.recognise import plain_name
from toolkit.checkpoint.resolution import Resolver
from toolkit.heads.eagle2 import Eagle2Config
from toolkit.targets.facts import TargetFacts
from toolkit.tokenmap.token_map import TokenMap

EMBEDDING = "embed_tokens.weight"
READ = frozenset(
    {"num_hidden_layers", "bias", "qkv_bias", "attention_bias", "tie_word_embeddings", "sliding_window"}
    | {"use_sliding_window", "layer_types", "eagle_config", "draft_vocab_size"}
)  # fmt: skip


def import_eagle2(
    config: Mapping[str, Any], stored: Mapping[str, torch.Tensor], resolver: Resolver, facts: TargetFacts | None
) -> tuple[Eagle2Config, dict[str, torch.Tensor], TokenMap, torch.Tensor | None]:
    """Config, the head's tensors, the map of the whole vocabulary, and the embedding that came with the checkpoint.

    Raises `DraftDirError`, `WeightsError`.
    """
    tensors = {plain_name(name): value for name, value in stored.items()}
    embedding = tensors.pop(EMBEDDING, None)
    note_embedding(embedding, resolver)
    for name in sorted(tensors):
        if name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq"):
            tensors.pop(name)
            rule = "computed from the config" if name.endswith("inv_freq") else "the target's is used"
            resolver.note(name, "left out", rule)
    shapes = layer_settings(config, q_rows(tensors, "layers.0."), resolver)
    if config.get("draft_vocab_size") is not None:
        refuse_unless(config, "draft_vocab_size", config["vocab_size"])
    if "layers.0.input_layernorm.weight" in tensors:
        raise DraftDirError(
            "its first layer has an input_layernorm (speculators' variant `layernorms`); EAGLE-1/2 heads have none, "
            "and the variant is not supported"
        )
    layers = len({name.split(".")[1] for name in tensors if name.startswith("layers.")})
    bias = "fc.bias" in tensors
    if bool(config.get("bias", bias)) != bias:
        resolver.note("fc_bias", bias, f"by the tensors; the config's bias is {config['bias']}", warning=True)
    else:
        resolver.note("fc_bias", bias, f"fc.bias is {'there' if bias else 'absent'}")
    stated = config.get("num_hidden_layers")
    if stated is not None and stated != layers:
        raise DraftDirError(f"config.json: num_hidden_layers is {stated}, the weights have {layers} layers")
    note_unread(config, READ, resolver)
    return (
        Eagle2Config(
            **shapes,
            num_hidden_layers=layers,
            fc_bias=bias,
            attention_bias="layers.0.self_attn.q_proj.bias" in tensors,
        ),
        tensors,
        TokenMap.identity(config["vocab_size"]),
        embedding,
    )
