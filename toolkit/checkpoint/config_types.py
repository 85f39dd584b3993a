"""Checks the types of the settings in a head's config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from toolkit.checkpoint.errors import DraftDirError


def _whole(value: Any, least: int = 0) -> bool:
    return type(value) is int and value >= least


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# What is needed, the check for it, and the settings that need it; any of them may be absent or null.
TYPES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("a mapping", lambda value: isinstance(value, Mapping),
     "toolkit eagle_config dflash_config speculators_config verifier transformer_layer_config rope_parameters "
     "rope_scaling full_attention"),
    ("a whole number from 1", lambda value: _whole(value, 1),
     "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim vocab_size target_hidden_size "
     "block_size"),
    ("a whole number", _whole,
     "num_hidden_layers draft_vocab_size max_position_embeddings sliding_window num_mtp_layers "
     "markov_rank mask_token_id"),
    ("a number", _number, "rms_norm_eps rope_theta factor"),
    ("a list of whole numbers", lambda value: isinstance(value, list) and all(type(one) is int for one in value),
     "eagle_aux_hidden_state_layer_ids aux_layer_ids aux_hidden_state_layer_ids target_layer_ids"),
    ("a list of words", lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
     "architectures layer_types"),
    ("true or false", lambda value: isinstance(value, bool),
     "fc_norm use_aux_norm norm_before_fc norm_before_residual norm_output bias attention_bias qkv_bias "
     "tie_word_embeddings use_sliding_window parallel_drafting sample_from_anchor enable_confidence_head "
     "confidence_head_with_markov"),
)  # fmt: skip
NEEDED = {key: (what, fits) for what, fits, keys in TYPES for key in keys.split()}


def check_types(config: Mapping[str, Any], directory: Path) -> None:
    """Raises `DraftDirError` that names every setting of a wrong type, nested ones too."""
    wrong = _wrong(config, "")
    if wrong:
        raise DraftDirError(f"{directory}/config.json: {'; '.join(wrong)}. Copy the file again from its source")


def _wrong(config: Mapping[str, Any], within: str) -> list[str]:
    found: list[str] = []
    for key, value in config.items():
        if value is None or key not in NEEDED:
            continue
        what, fits = NEEDED[key]
        if not fits(value):
            found.append(f"{within}{key} is {value!r}; {what} is needed")
        elif isinstance(value, Mapping):
            found += _wrong(value, f"{within}{key}.")
    return found
