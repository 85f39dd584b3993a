"""How other projects write each kind of head: what reads their checkpoints, and what writes a head for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from toolkit.checkpoint.draft_dir import DraftCheckpoint
from toolkit.checkpoint.errors import ExportError
from toolkit.checkpoint.export_dspark import BUILDERS as DSPARK
from toolkit.checkpoint.export_eagle2 import BUILDERS as EAGLE2
from toolkit.checkpoint.export_eagle3 import BUILDERS as EAGLE3
from toolkit.checkpoint.exported import Builder, Exported
from toolkit.checkpoint.import_dspark import import_dspark
from toolkit.checkpoint.import_eagle2 import import_eagle2
from toolkit.checkpoint.import_eagle3 import import_eagle3
from toolkit.checkpoint.resolution import Resolver
from toolkit.heads.head_config import HeadConfig
from toolkit.targets.facts import TargetFacts
from toolkit.tokenmap.token_map import TokenMap

Tensors = dict[str, torch.Tensor]
# config.json, stored tensors, resolver, facts of the target if they are at hand -> our config, the head's tensors, its
# token map, and the embedding that came with it.
Importer = Callable[
    [Mapping[str, Any], Mapping[str, torch.Tensor], Resolver, TargetFacts | None],
    tuple[HeadConfig, Tensors, TokenMap, torch.Tensor | None],
]


@dataclass(frozen=True)
class Formats:
    """read: imports a checkpoint of this kind; None: no other project writes one. builders: by the name of the engine,
    what writes a head for it. why_not: the reason for engines without a builder."""

    read: Importer | None = None
    builders: Mapping[str, Builder] = field(default_factory=dict)
    why_not: str = "no such loader"


# By the kind of head, see head_kinds.py.
FORMATS = {
    "eagle3": Formats(import_eagle3, EAGLE3),
    "eagle2": Formats(
        import_eagle2,
        EAGLE2,
        "speculators 0.9 and llama.cpp read EAGLE-3 heads; --to vllm, sglang and eagle are possible",
    ),
    "dspark": Formats(
        import_dspark,
        DSPARK,
        "SafeAILab's code and llama.cpp have no such model; --to sglang, vllm and speculators are possible",
    ),
    "mtp": Formats(why_not="other engines read MTP layers from the target's own checkpoint; --to native writes it"),
}


def exported(draft: DraftCheckpoint, to: str, facts: TargetFacts, draft_tokens: int) -> Exported:
    """`draft` for `to`: sglang, vllm, speculators, eagle or gguf. draft_tokens: a chain's length, where the format
    holds one.

    Raises `ExportError` for a head that would not be the same there.
    """
    formats = FORMATS.get(draft.kind, Formats())
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
        f"max_position_embeddings {own} is written as the target's {wanted}: vLLM computes no rotation beyond it, and "
        "at each position the rotation stays the same"
    ]
