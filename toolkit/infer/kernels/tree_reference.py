"""Device operations on draft trees in plain torch: the reference that the Triton kernels must match.

Shapes: B rows, N nodes per row (root included), A = the tree's depth + 1, C candidates per row in level order, n
beams of a level, M nodes that the head reads, D size of the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from toolkit.infer.request.draft_tree import DraftTree, node_numbers, upload, without_padding


@dataclass(frozen=True)
class AcceptedPath:
    """The accepted path of every row, root first; entries after the end of a row's path are those of node 0.

    numbers [B, 3 + 3 * A] int64: all fields in one tensor, which the host reads in one copy:

        accepted | offered | depth_offered | path .. | tokens .. | ranks ..

    offered: drafted nodes of the tree, or -1 (`mark_nonfinite`). depth_offered: depth of the deepest one. ranks: index
    of each path node among its parent's children, from 0.
    """

    numbers: Tensor

    @classmethod
    def empty(cls, rows: int, longest: int, device: torch.device) -> AcceptedPath:
        return cls(torch.empty(rows, 3 + 3 * longest, dtype=torch.long, device=device))

    def mark_nonfinite(self, hidden: Tensor, sums: Tensor) -> None:
        """Set `offered` to -1 in rows that have NaN or infinity: in hidden states [B, N, H] of any node, as rows read
        their keys, or in logits on the path. sums [B, N]: of each node's logits; one is finite iff they are."""
        largest = torch.linalg.vector_norm(hidden.flatten(1), ord=torch.inf, dim=1)  # one kernel; NaN stays
        together = largest + sums.gather(1, self.path).sum(dim=1)
        self.numbers[:, 1].masked_fill_(together * 0 != 0, -1)

    @property
    def accepted(self) -> Tensor:
        """[B]: number of accepted drafts."""
        return self.numbers[:, 0]

    @property
    def path(self) -> Tensor:
        """[B, A]: node numbers."""
        return self.numbers[:, 3:].chunk(3, dim=1)[0]

    @property
    def tokens(self) -> Tensor:
        """[B, A]: the chosen token at each node of the path."""
        return self.numbers[:, 3:].chunk(3, dim=1)[1]


def follow_choices(
    tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    mask: Tensor,
    valid: Tensor,
    choices: Tensor,
    longest: int,
    is_chain: bool = False,
) -> AcceptedPath:
    """Follow the chosen tokens from the root: step to the child with the token chosen at its parent, until none fits.

    tokens, parents (-1 at the root), depths, choices: [B, N] int64. mask [B, N, N] bool: a node's row marks it and its
    ancestors. valid [B, N] bool. longest: A. Siblings carry different tokens. is_chain: each node's parent is the one
    before it; parents, depths and mask are then not read.
    """
    offered = valid.sum(dim=1) - 1
    if is_chain:
        accepted = ((tokens[:, 1:] == choices[:, :-1]) & valid[:, 1:]).cumprod(dim=1).sum(dim=1)
        number = node_numbers(longest, choices.device)
        path = number * (number <= accepted[:, None])
        return _side_by_side(accepted, offered, offered, path, choices, torch.zeros_like(path))
    nodes = tokens.shape[1]
    hit = tokens == choices.gather(1, parents.clamp(min=0))
    hit &= valid
    hit[:, 0] = True
    # A node is on the path iff it and all its ancestors are chosen. Sibling tokens differ, so there is one path.
    on_path = ((hit[:, None] | ~mask).all(dim=-1)) & valid
    number = torch.arange(nodes, device=choices.device)
    path = torch.where(on_path, number, nodes).sort(dim=1).values[:, :longest]
    path = path.masked_fill(path == nodes, 0)
    same = parents[:, :, None] == parents[:, None, :]
    ranks = (same & valid[:, None]).tril(diagonal=-1).sum(dim=-1)
    deepest = depths.masked_fill(~valid, 0).max(dim=1).values
    return _side_by_side(on_path.sum(dim=1) - 1, offered, deepest, path, choices, ranks.gather(1, path))


def _side_by_side(
    accepted: Tensor, offered: Tensor, deepest: Tensor, path: Tensor, choices: Tensor, ranks: Tensor
) -> AcceptedPath:
    numbers = torch.stack((accepted, offered, deepest), dim=1)
    return AcceptedPath(torch.cat((numbers, path, choices.gather(1, path), ranks), dim=1))


class Candidates(NamedTuple):
    """Candidates of a draft tree in level order: tokens, parents (candidate numbers, -1 for the root) and scores
    (cumulative log-probabilities, fp32), [B, C] each."""

    tokens: Tensor
    parents: Tensor
    scores: Tensor

    @classmethod
    def empty(cls, rows: int, count: int, device: torch.device) -> Candidates:
        tokens, parents = (torch.empty(rows, count, dtype=torch.long, device=device) for _ in range(2))
        return cls(tokens, parents, torch.empty(rows, count, dtype=torch.float32, device=device))


class Beams(NamedTuple):
    """The n nodes of a level whose children are drafted next.

    tokens, parents [B, n]: the place of the node's parent in the level above. numbers [B, n]: candidate numbers (-1:
    the root). scores [B, n] fp32. sees [B, n, M] bool: the nodes of the head that the node attends to, itself included;
    None: the head reads no node, and a row with fewer branches may have as many beams as others.
    """

    tokens: Tensor
    parents: Tensor
    numbers: Tensor
    scores: Tensor
    sees: Tensor | None


@cache  # never freed: recorded rounds read it
def _no_beams(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.full((rows, 1), -1, device=device), torch.zeros(rows, 1, device=device)


def root_beams(rows: int, device: torch.device, sees: Tensor | None) -> Beams:
    """The roots as beams; sees [B, 1, M] or None."""
    number, score = _no_beams(rows, device)
    return Beams(number, number, number, score, sees)


def grow_beams(
    beams: Beams,
    log_probs: Tensor,
    ids: Tensor,
    to_target: Tensor,
    found: Candidates,
    first: int,
    widths: Tensor | None,
    keep: int,
    node: int,
) -> Beams:
    """Write the k children of each beam to `found` as candidates first, first + 1, .. Return the `keep` best of them as
    the next beams, which the head will read as nodes node .. node + keep - 1.

    log_probs, ids [B, n, k]: of the children, descending; ids in the draft vocabulary. to_target [D]: its target ids.
    widths [B]: the number of children that a row allows; further ones get the score -inf. None: all. keep: 0: there is
    no next level, and the result is `beams`; k, if the head reads the beams. The sort is stable: on a tie the lower
    candidate comes first.
    """
    rows, count, k = ids.shape
    tokens, parents, scores = (one[:, first : first + count * k] for one in found)
    each = scores.unflatten(1, (count, k))
    torch.add(log_probs, beams.scores[:, :, None], out=each)
    beyond = None if widths is None else torch.arange(k, device=ids.device) >= widths[:, None]
    if beyond is not None:
        each.masked_fill_(beyond[:, None], -torch.inf)
    tokens.copy_(to_target[ids.flatten(1)])
    parents.unflatten(1, (count, k)).copy_(beams.numbers[:, :, None])
    if not keep:
        return beams
    best, chosen = (one[:, :keep] for one in scores.sort(dim=1, descending=True, stable=True))
    above, sees = chosen // k, beams.sees
    if sees is not None:
        if beyond is not None:
            best = best.masked_fill(beyond, -torch.inf)  # a row has no more beams than branches
        sees = sees.gather(1, above[:, :, None].expand(-1, -1, sees.shape[2]))
        sees.diagonal(node, 1, 2).fill_(True)
    return Beams(tokens.gather(1, chosen), above, first + chosen, best.contiguous(), sees)  # as the kernel reads them


def rank_candidates(
    roots: Tensor,
    tokens: Tensor,
    parents: Tensor,
    scores: Tensor,
    nodes: Sequence[int],
    deepest: int,
) -> DraftTree:
    """Rerank all candidates (EAGLE-2's second phase, arXiv 2406.16858): row b keeps the nodes[b] - 1 best by score.

    roots [B]; tokens, parents and scores [B, C] in level order, of at most `deepest` levels; a parent is a candidate
    number (-1: the root). A score is a cumulative log-probability, so a child's score is at most its parent's. The
    sort is stable: on a tie the parent, which has the lower number, comes first. So a child is never kept without its
    parent.
    If the rows differ in their number of nodes, candidates with score -inf are dropped too.
    """
    rows, found = tokens.shape
    most = max(nodes)
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, : most - 1]
    uniform = min(nodes) == most
    if not uniform:
        rank = torch.arange(order.shape[1], device=tokens.device)
        good = rank < upload(nodes, tokens.device)[:, None] - 1
        good &= scores.gather(1, order) > -torch.inf
    kept, places = order.sort(dim=1)
    count = kept.shape[1]
    node_of = torch.zeros(rows, found + 1, dtype=torch.long, device=tokens.device)
    node_of.scatter_(1, kept + 1, torch.arange(1, count + 1, device=tokens.device).expand(rows, count))
    parent_nodes = node_of.gather(1, parents.gather(1, kept) + 1)  # candidate -1 is the root, node 0
    minus_one = torch.full((rows, 1), -1, dtype=torch.long, device=tokens.device)
    mask = ancestor_mask(parent_nodes, deepest)
    depths = mask.sum(dim=2) - 1
    valid = torch.ones_like(depths, dtype=torch.bool)
    if not uniform:
        valid[:, 1:] = good.gather(1, places)
        mask = without_padding(mask, valid)
    all_tokens = torch.cat((roots[:, None], tokens.gather(1, kept)), dim=1)
    all_parents = torch.cat((minus_one, parent_nodes), dim=1)
    return DraftTree(all_tokens, all_parents, depths, mask, valid, deepest, is_chain=False)


def ancestor_mask(parents: Tensor, deepest: int) -> Tensor:
    """parents [B, N-1] of nodes 1..N-1 (0 = root) -> [B, N, N] bool: row i marks node i and all its ancestors."""
    rows, drafted = parents.shape
    nodes = drafted + 1
    own = torch.eye(nodes, dtype=torch.bool, device=parents.device).expand(rows, nodes, nodes)
    up = torch.nn.functional.pad(parents, (1, 0))[:, :, None].expand(rows, nodes, nodes)
    mask = own
    for _ in range(deepest):
        mask = own | mask.gather(1, up)
    return mask
