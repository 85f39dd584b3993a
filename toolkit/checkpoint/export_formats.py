"""A head in the form of another project: the config and the tensors that its loader reads, or why it cannot."""

from __future__ import annotations

from dataclasses import replace

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.checkpoint.errors import ExportError
from toolkit.checkpoint.exported import Exported
from toolkit.checkpoint.formats import FORMATS
from toolkit.heads.head_config import HeadConfig
from toolkit.targets.facts import TargetFacts


def exported(draft: DraftCheckpoint, to: str, facts: TargetFacts, draft_tokens: int) -> Exported:
    """`draft` for `to`: sglang, vllm, speculators or eagle. draft_tokens: a chain's length, where the format holds one.

    Raises `ExportError` for a head that would not be the same there.
    """
    formats = FORMATS[draft.kind]
    build = formats.builders.get(to)
    if build is None:
        raise ExportError(f"a {draft.kind} head cannot be written for {to}: {formats.why_not}")
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
