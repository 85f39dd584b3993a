"""Checks of a head and its target before an export is written, and the placeholder for a local target's path."""

from __future__ import annotations

from typing import Any

import torch

from toolkit.checkpoint.draft_dir import (
    DraftCheckpoint,
    embedding_distance,
    embeddings_differ,
    other_target,
    rope_difference,
)
from toolkit.checkpoint.errors import ExportError
from toolkit.errors import TargetError
from toolkit.heads.head_config import HeadConfig, full_attention_rope
from toolkit.targets.facts import TargetFacts, target_embedding

PLACEHOLDER = "MODEL"


def checked(draft: DraftCheckpoint, facts: TargetFacts) -> list[str]:
    """Warnings about what may cost accept_length with this target. Raises `ExportError` for a head that cannot work."""
    check_target(draft.head.config, facts)
    bad = [name for name, value in draft.head.state_dict().items() if not torch.isfinite(value).all()]
    if bad:
        raise ExportError(
            f"the head's {', '.join(bad)} hold values that are not finite: its training diverged, or the file is "
            "damaged; export an earlier checkpoint"
        )
    found = [rope_difference(draft.head.config, full_attention_rope(facts.config)), other_target(draft, facts)]
    if draft.own_embedding is not None:
        found.append(_embedding(draft.own_embedding, facts))
    return [one for one in found if one is not None]


def check_target(config: HeadConfig, facts: TargetFacts) -> None:
    """Raise `ExportError` unless the head's sizes are the target's."""
    if (config.vocab_size, config.hidden_size) != (facts.vocab_size, facts.hidden_size):
        raise ExportError(
            f"the head is for a target of vocabulary {config.vocab_size} and width {config.hidden_size}; "
            f"{facts.name} has {facts.vocab_size} and {facts.hidden_size}; name the head's own target with `target`"
        )


def _embedding(own: torch.Tensor, facts: TargetFacts) -> str | None:
    """Raises `ExportError` when the checkpoint's own embedding, which is not exported, is not the target's."""
    try:
        distance = embedding_distance(own, target_embedding(facts))
    except TargetError as error:
        return f"the checkpoint holds an embedding, which could not be compared with the target's: {error}"
    if embeddings_differ(distance):
        raise ExportError(
            f"the checkpoint holds an embedding that differs from that of {facts.name} by {100 * distance:.1f} %. "
            "Engines read the target's, with which this head was not trained; name its own target with `target`"
        )
    return None


def local_paths(facts: TargetFacts) -> list[str]:
    """Paths of the target on this machine, longest first; none for a hub's target."""
    return sorted({one for one in (facts.source, facts.name) if one.startswith("/")}, key=len, reverse=True)


def without_paths(value: Any, paths: list[str]) -> Any:
    """A text, or a config, with `MODEL` where it has one of the paths."""
    if isinstance(value, dict):
        return {key: without_paths(one, paths) for key, one in value.items()}
    if isinstance(value, list):
        return [without_paths(one, paths) for one in value]
    if isinstance(value, str):
        for path in paths:
            value = value.replace(path, PLACEHOLDER)
    return value
