"""How other projects write each kind of head: what reads their checkpoints, and what writes ours for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from toolkit.checkpoint.export_eagle2 import BUILDERS as EAGLE2
from toolkit.checkpoint.export_eagle3 import BUILDERS as EAGLE3
from toolkit.checkpoint.exported import Builder
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
    """read: imports a checkpoint of this kind; None: no other project writes one. builders: by the name of the engine
    that is written for. why_not: what is said of the other engines."""

    read: Importer | None = None
    builders: Mapping[str, Builder] = field(default_factory=dict)
    why_not: str = "no such loader"


# By the kind of head, see heads/registry.py.
FORMATS = {
    "eagle3": Formats(import_eagle3, EAGLE3),
    "eagle2": Formats(
        import_eagle2, EAGLE2, "speculators 0.9 reads EAGLE-3 and later; --to vllm, sglang and eagle are possible"
    ),
    "mtp": Formats(
        why_not="other engines serve MTP layers inside their target alone, from the target's own checkpoint"
    ),
}
