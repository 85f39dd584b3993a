"""Follow the target's own choices through a draft tree.

The target chooses a token at every node (argmax, or a seeded draw); starting at the root we step to the child that
carries the chosen token until there is none. The tokens chosen on the way are exactly what plain decoding writes:

    node on the path      root   p1    p2          counts = 2 drafts accepted
    its token             x      a     b
    target's choice       a      b     c           committed: a b c; a and b were drafted, c is the target's own
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.infer.draft_tree import DraftTree


@dataclass(frozen=True)
class Walk:
    """The accepted path of every row.

    path [B, A]: nodes on it, root first; A = the longest path of the batch, and entries behind a row's own path are 0.
    tokens [B, A]: the target's choice at each of them (what is committed). accepted: drafts accepted per row, path
    length - 1.
    """

    path: Tensor
    tokens: Tensor
    accepted: list[int]


def walk(tree: DraftTree, choices: Tensor) -> Walk:
    """choices [B, N]: the target's token at every node."""
    nodes = tree.nodes
    if nodes == 1:
        return Walk(torch.zeros_like(choices), choices, [0] * len(choices))
    hit = tree.tokens == choices.gather(1, tree.parents.clamp(min=0))
    hit &= tree.valid
    hit[:, 0] = True
    # A node is on the path iff it and all its ancestors were chosen; siblings differ, so these nodes form one path.
    on_path = ((hit[:, None] | ~tree.mask).all(dim=-1)) & tree.valid
    accepted = (on_path.sum(dim=1) - 1).tolist()
    number = torch.arange(nodes, device=choices.device)
    path = torch.where(on_path, number, nodes).sort(dim=1).values[:, : max(accepted) + 1]
    path = path.masked_fill(path == nodes, 0)
    return Walk(path, choices.gather(1, path), accepted)


def moved_entries(found: Walk, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cache entries that accepted nodes have to move to, and come from: rows, positions to, positions from; all [M].

    Node n of a row of `length` tokens lies at position length + n; the t-th node of the path belongs at length + t.
    """
    step = torch.arange(found.path.shape[1], device=found.path.device)
    last = torch.tensor(found.accepted, device=found.path.device)[:, None]
    row, place = ((found.path != step) & (step <= last)).nonzero(as_tuple=True)
    return row, lengths[row] + place, lengths[row] + found.path[row, place]
