"""The kinds of draft head."""

from __future__ import annotations

import torch

from toolkit.heads.draft_head import DraftHead
from toolkit.heads.eagle2 import Eagle2Head
from toolkit.heads.eagle3 import Eagle3Head
from toolkit.heads.head_config import HeadConfig
from toolkit.heads.mtp import MtpHead

# By the name in config.json and in recipes.
KINDS: dict[str, type[DraftHead]] = {
    "eagle3": Eagle3Head,
    "eagle2": Eagle2Head,
    "mtp": MtpHead,
}


def build_head(config: HeadConfig) -> DraftHead:
    """A head of this configuration with torch's default initialisation."""
    return KINDS[config.kind](config)


@torch.no_grad()
def empty_head(config: HeadConfig) -> DraftHead:
    """A head with NaN weights, for loading a checkpoint: a weight that is not loaded becomes visible."""
    head = build_head(config)
    for parameter in head.parameters():
        parameter.fill_(float("nan"))
    return head
