"""Draft trees: their shape, and the tensors of one batch of trees.

Shapes: B requests, N nodes (root included), k beam width. Node 0 is the root: the last committed token, whose target KV is
not computed yet. Nodes stand in level order, so a parent's number is smaller than its child's.

    root 0 ── 1 ── 3        parents [-1, 0, 0, 1]   depths [0, 1, 1, 2]
          └── 2             mask row 3: nodes 0, 1, 3
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftShape:
    """How deep and wide to draft.

    num_steps: levels. top_k: children looked at per node, and beams kept per level. num_draft_tokens: nodes verified, root
    included. A chain has top_k 1 and num_draft_tokens == num_steps + 1. Raises ValueError for an impossible shape.
    """

    num_steps: int
    top_k: int
    num_draft_tokens: int

    def __post_init__(self) -> None:
        if self.num_steps < 1 or self.top_k < 1:
            raise ValueError(f"draft shape {self.as_text()}: num_steps and top_k must be at least 1")
        most = 1 + self.top_k + (self.num_steps - 1) * self.top_k**2
        if self.top_k == 1 and self.num_draft_tokens != self.num_steps + 1:
            raise ValueError(
                f"draft shape {self.as_text()}: a chain (top_k 1) verifies num_steps + 1 nodes, so write "
                f"{self.num_steps},1,{self.num_steps + 1}"
            )
        if not 2 <= self.num_draft_tokens <= most:
            raise ValueError(
                f"draft shape {self.as_text()}: num_draft_tokens counts the root and must lie between 2 and {most}, the nodes "
                "that num_steps levels of top_k beams can offer"
            )

    @classmethod
    def chain(cls, num_steps: int) -> DraftShape:
        return cls(num_steps, 1, num_steps + 1)

    @classmethod
    def parse(cls, text: str) -> DraftShape:
        """Read "num_steps,top_k,num_draft_tokens", e.g. "4,1,5" (a chain of 4) or "5,4,16" (a tree)."""
        parts = text.split(",")
        if len(parts) != 3 or not all(part.strip().isdigit() for part in parts):
            raise ValueError(f'draft shape "{text}": needed are three numbers num_steps,top_k,num_draft_tokens, e.g. 4,1,5')
        return cls(*(int(part) for part in parts))

    def as_text(self) -> str:
        """The form `parse` reads."""
        return f"{self.num_steps},{self.top_k},{self.num_draft_tokens}"

    @property
    def is_chain(self) -> bool:
        return self.top_k == 1

    @property
    def name(self) -> str:
        if self.is_chain:
            return f"chain {self.num_steps}"
        return f"tree {self.num_steps}x{self.top_k}/{self.num_draft_tokens}"
