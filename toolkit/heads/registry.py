"""The classes of the kinds of draft head, by their names in `head_kinds.HEAD_KINDS`."""

from __future__ import annotations

from importlib import import_module

import torch

from toolkit.head_kinds import HEAD_KINDS
from toolkit.heads.draft_head import DraftHead
from toolkit.heads.head_config import HeadConfig


def head_class(kind: str) -> type[DraftHead]:
    """The class of a kind of head. Raises KeyError for a name that the registry lacks."""
    return getattr(import_module(f"toolkit.heads.{kind}"), HEAD_KINDS[kind].head)


def build_head(config: HeadConfig) -> DraftHead:
    """A head of this configuration with torch's default initialisation."""
    return head_class(config.kind)(config)


@torch.no_grad()
def empty_head(config: HeadConfig) -> DraftHead:
    """A head with NaN weights, for loading a checkpoint: a weight that is not loaded becomes visible."""
    head = build_head(config)
    for parameter in head.parameters():
        parameter.fill_(float("nan"))
    return head
