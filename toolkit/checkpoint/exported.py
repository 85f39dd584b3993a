"""The content of an export, and the parts of it that all kinds of head share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.checkpoint.errors import ExportError
from toolkit.checkpoint.files import SAFETENSORS
from toolkit.heads.head_config import HeadConfig
from toolkit.targets.facts import TargetFacts

NO_WINDOW = "there the head would attend to the whole context"
NO_BIAS = "its loader has no such bias, or also creates one for o_proj and leaves that one uninitialised"


@dataclass
class Exported:
    """The content of an export. config_of_head: the config that must be read back. added: tensors that are not the
    head's own. left_out: names of the head's tensors that are the target's, too."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    config_of_head: HeadConfig
    weights: str = SAFETENSORS
    added: dict[str, torch.Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    left_out: tuple[str, ...] = ()


# (head, its config as it is written, facts of the target, length of a chain) -> what is written.
Builder = Callable[[DraftCheckpoint, Any, TargetFacts, int], Exported]


def layer_keys(config: HeadConfig, dtype: torch.dtype) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, **config.rope_parameters}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    name = str(dtype).removeprefix("torch.")
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
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
        **config.window_keys(),
    }


def map_tensors(draft: DraftCheckpoint) -> dict[str, torch.Tensor]:
    """The token map; that of a whole vocabulary is left out, as every loader expects."""
    if draft.token_map.size == draft.token_map.vocab_size:
        return {}
    return {"d2t": draft.token_map.d2t, "t2d": draft.token_map.t2d}


def speculators_keys(algorithm: str, facts: TargetFacts, draft_tokens: int) -> dict[str, Any]:
    """The keys by which speculators and vLLM know the algorithm and its target."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "speculators_model_type": algorithm,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": facts.source, "architectures": [facts.architecture]},
        },
    }


def plain_rope(config: HeadConfig, keys: dict[str, Any]) -> dict[str, Any]:
    """The keys that SafeAILab's model reads. Raises `ExportError` for a scaled rope, which it computes differently."""
    if keys["rope_scaling"] is not None:
        raise ExportError(
            f"the head has a scaled rope ({config.rope_parameters}), which SafeAILab's model does not support"
        )
    return {key: value for key, value in keys.items() if key != "rope_parameters"}
