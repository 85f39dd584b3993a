"""Draft trees: their shape, the tensors of one batch of trees, and how the host's numbers become tensors (`upload`).

Shapes: B requests, N nodes (root included), R selected rows, D draft vocabulary, V vocabulary. Node 0 is the root: the
last committed token, whose target KV is not computed yet. Nodes are in level order, so a parent's number is smaller
than its child's.

    root 0 ── 1 ── 3        parents [-1, 0, 0, 1]   depths [0, 1, 1, 2]
          └── 2             mask row 3: nodes 0, 1, 3
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from toolkit.head_kinds import SHAPE_PRESETS
from toolkit.infer.request.params import DraftShapeError

PLAIN = "plain"  # in place of a shape: nothing is drafted
ADAPTIVE = "adaptive"  # in place of a shape: every step chooses what it drafts
BUDGET_TOP_K, MOST_BUDGET = 8, 256  # branches of a node where a shape is its number of nodes alone; the most of these


@dataclass(frozen=True)
class DraftShape:
    """Depth, width and size of a draft tree.

    num_steps: levels. top_k: candidate children per node, and beams kept per level. num_draft_tokens: verified nodes,
    root included. A chain has top_k 1 and num_draft_tokens == num_steps + 1. budget: only num_draft_tokens was given,
    and `for_head` chooses the rest by the head. Raises `DraftShapeError` for an impossible shape.
    """

    num_steps: int
    top_k: int
    num_draft_tokens: int
    budget: bool = False

    def __post_init__(self) -> None:
        if self.num_steps < 1 or self.top_k < 1:
            raise DraftShapeError(f"draft shape {self.as_text()}: num_steps and top_k must be at least 1")
        most = most_nodes(self.num_steps, self.top_k)
        if self.top_k == 1 and self.num_draft_tokens != self.num_steps + 1:
            raise DraftShapeError(
                f"draft shape {self.as_text()}: a chain (top_k 1) verifies num_steps + 1 nodes, so write "
                f"{self.num_steps},1,{self.num_steps + 1}"
            )
        if not 2 <= self.num_draft_tokens <= most:
            raise DraftShapeError(
                f"draft shape {self.as_text()}: num_draft_tokens counts the root and must lie between 2 and {most}, "
                "the nodes of num_steps levels of which each node has top_k children"
            )

    @classmethod
    def chain(cls, num_steps: int) -> DraftShape:
        return cls(num_steps, 1, num_steps + 1)

    @classmethod
    def parse(cls, text: str) -> DraftShape:
        """Parse "num_steps,top_k,num_draft_tokens", e.g. "4,1,5" (a chain of 4) or "5,4,16" (a tree), a preset, or
        num_draft_tokens alone, e.g. "64"."""
        parts = SHAPE_PRESETS.get(text, text).split(",")
        if len(parts) not in (1, 3) or not all(re.fullmatch(r"\s*[0-9]{1,9}\s*", part) for part in parts):
            raise DraftShapeError(
                f'draft shape "{text}": three numbers num_steps,top_k,num_draft_tokens are needed, e.g. 4,1,5, or '
                f"num_draft_tokens alone, e.g. 64, or {' or '.join(SHAPE_PRESETS)}"
            )
        *shape, nodes = map(int, parts)
        if shape:
            return cls(shape[0], shape[1], nodes)
        if not 2 <= nodes <= MOST_BUDGET:
            raise DraftShapeError(f"draft shape {nodes}: a number of nodes from 2 to {MOST_BUDGET} is needed")
        return cls((nodes - 1).bit_length(), BUDGET_TOP_K, nodes, budget=True)

    def for_head(self, levels: int) -> DraftShape:
        """Return the shape that a budget means to a head that drafts `levels` levels in one pass: all of them; 0: a
        pass a level, one level for every doubling of the nodes. Other shapes stay as they are."""
        if not self.budget:
            return self
        steps = min(levels or self.num_steps, self.num_draft_tokens - 1)
        most = most_nodes(steps, self.top_k) if levels else 1 + candidate_count(steps, self.top_k)
        return DraftShape(steps, self.top_k, min(self.num_draft_tokens, most))

    def as_text(self) -> str:
        """Return the text that `parse` reads."""
        return str(self.num_draft_tokens) if self.budget else ",".join(map(str, self._sizes))

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self.num_steps, self.top_k, self.num_draft_tokens

    def fits_in(self, limit: DraftShape) -> bool:
        """True if the shape is no deeper, wider or larger than `limit`."""
        return all(mine <= most for mine, most in zip(self._sizes, limit._sizes, strict=True))

    def asked_of(self, limit: DraftShape | None, speculative: bool) -> DraftShape:
        """Return the shape of a request that asks for this one. A budget is so many nodes of `limit`, the engine's
        shape.

        Raises DraftShapeError if the request sets speculative to False, or if the shape does not fit in `limit` (None:
        the engine has no drafter)."""
        if not speculative:
            raise DraftShapeError(
                f"a request has draft shape {self.as_text()} and speculative is false, so nothing is drafted; leave "
                "one of them out"
            )
        own, nodes = self, self.num_draft_tokens
        if self.budget and limit is not None and nodes <= limit.num_draft_tokens:
            own = DraftShape.chain(nodes - 1) if limit.is_chain else replace(limit, num_draft_tokens=nodes)
        if limit is None or not own.fits_in(limit):
            most = "has no drafter" if limit is None else f"drafts {limit.name} ({limit.as_text()})"
            raise DraftShapeError(
                f"a request has draft shape {self.as_text()}; the engine {most}: give no more levels, branches or "
                "nodes than that"
            )
        return own

    def within(self, limit: DraftShape) -> DraftShape:
        """Return this shape, clipped to `limit` in depth, width and size."""
        steps, k, nodes = (min(sizes) for sizes in zip(self._sizes, limit._sizes, strict=True))
        if k == 1:
            return DraftShape.chain(steps)
        return DraftShape(steps, k, min(nodes, candidate_count(steps, k) + 1))

    def up_to(self, levels: int) -> DraftShape:
        """Return this shape, clipped to `levels` in depth."""
        steps, k = min(self.num_steps, levels), self.top_k
        return self.within(DraftShape(steps, k, candidate_count(steps, k) + 1))

    @classmethod
    def covering(cls, shapes: Iterable[DraftShape]) -> DraftShape:
        """Return the smallest shape that every one of `shapes` fits in."""
        different = set(shapes)
        if len(different) == 1:
            return different.pop()
        return cls(*(max(sizes) for sizes in zip(*(one._sizes for one in different), strict=True)))

    @property
    def is_chain(self) -> bool:
        return self.top_k == 1

    @property
    def name(self) -> str:
        if self.is_chain:
            return f"chain {self.num_steps}"
        return f"tree {self.num_steps}x{self.top_k}/{self.num_draft_tokens}"


def most_nodes(num_steps: int, top_k: int) -> int:
    """Number of nodes of a whole tree, root included, and of a chain."""
    return sum(top_k**level for level in range(min(num_steps, 32) + 1)) if top_k > 1 else num_steps + 1


def candidate_count(num_steps: int, top_k: int) -> int:
    """Number of candidate nodes of EAGLE-2's expansion phase, without the root."""
    return top_k + (num_steps - 1) * top_k**2


def smaller_shapes(most: DraftShape) -> list[DraftShape]:
    """Return `most`, trees of half its depth or width, and chains, about ten shapes at most."""
    steps, k, nodes = most.num_steps, most.top_k, most.num_draft_tokens
    found = [most]
    for width in sorted({k, max(2, k // 2)} if k > 1 else (), reverse=True):
        for depth in sorted({steps, (steps + 1) // 2}, reverse=True):
            share = depth * width / (steps * k)  # fewer nodes for a smaller tree
            wanted = max(depth + 1, round((nodes - 1) * share) + 1)
            found.append(DraftShape(depth, width, min(wanted, nodes, candidate_count(depth, width) + 1)))
    deepest = min(steps, nodes - 1)
    found += [DraftShape.chain(depth) for depth in (deepest, *(12, 8, 6, 4, 3, 2, 1)) if depth <= deepest]
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Proposal:
    """The distributions that the drafts of chains were sampled from.

    q [B, N-1, D] fp32: the distribution over the draft vocabulary at the node before each draft; 0 in rows whose drafts
    were not sampled. ids [D]: the target ids of the draft vocabulary. drawn [B] bool: the rows whose drafts were
    sampled; None: all rows with temperature > 0.
    """

    q: Tensor
    ids: Tensor
    drawn: Tensor | None = None

    def scattered(self, rows: Tensor, drafted: Tensor, vocab_size: int) -> Tensor:
        """Return [R, N, V]: the distribution of the draft after each node of `rows` [R]; 0 where `drafted` [R, N] is
        False."""
        whole = self.q.new_zeros(*drafted.shape, vocab_size)
        whole[:, :-1, self.ids] = self.q[rows] * drafted[:, :-1, None]
        return whole


@dataclass
class DraftTree:
    """One tree per row of the batch. Siblings carry different tokens. Only the drafter writes the fields.

    tokens, parents (-1 at the root), depths: [B, N] int64. mask [B, N, N] bool: mask[b, i, j]: j is i or its ancestor.
    valid [B, N] bool: False for padding nodes; a padding node attends to itself only, and no other node attends to it.
    deepest: upper bound of `depths`, known on the host; a read of `depths` on a GPU would synchronize.
    is_chain: every node's parent is the node before it, so the KV entries of accepted nodes are already contiguous.
    proposal: the distributions of the drafts; None if no row's drafts were sampled.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    mask: Tensor
    valid: Tensor
    deepest: int
    is_chain: bool
    proposal: Proposal | None = None

    @property
    def nodes(self) -> int:
        return self.tokens.shape[1]

    def first_nodes(self, counts: Sequence[int]) -> DraftTree:
        """Return the trees of the first counts[b] nodes of each row."""
        most = min(max(counts), self.nodes)
        kept = node_numbers(most, self.tokens.device) < upload(counts, self.tokens.device)[:, None]
        tokens, parents, depths, valid = (x[:, :most] for x in (self.tokens, self.parents, self.depths, self.valid))
        mask, proposal = without_padding(self.mask[:, :most, :most], valid & kept), self.proposal
        if proposal is not None:
            proposal = None if most == 1 else replace(proposal, q=proposal.q[:, : most - 1])
        deepest = min(self.deepest, most - 1)
        return DraftTree(tokens, parents, depths, mask, valid & kept, deepest, self.is_chain, proposal)


def root_only(roots: Tensor) -> DraftTree:
    """Return trees of one node, for plain decoding; roots [B]."""
    return DraftTree(roots[:, None], *_whole_chains(len(roots), 1, roots.device), 0, True)


def chain_tree(roots: Tensor, drafts: Tensor, counts: Sequence[int], proposal: Proposal | None = None) -> DraftTree:
    """Return chains of roots [B] and drafts [B, n]. Row b keeps its first counts[b] drafts."""
    tokens = torch.cat((roots[:, None], drafts), dim=1)
    rows, nodes = tokens.shape
    parents, depths, mask, valid = _whole_chains(rows, nodes, tokens.device)
    if min(counts) < nodes - 1:
        valid = depths <= upload(counts, tokens.device)[:, None]
        mask = without_padding(mask, valid)
    return DraftTree(tokens, parents, depths, mask, valid, nodes - 1, True, proposal)


@cache  # never freed: recorded rounds read it
def _whole_chains(rows: int, nodes: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return parents, depths, mask and valid of chains that keep all their drafts."""
    depths = node_numbers(nodes, device).repeat(rows, 1)
    mask = torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril().expand(rows, nodes, nodes)
    return depths - 1, depths, mask, torch.ones(rows, nodes, dtype=torch.bool, device=device)


@cache  # never freed: recorded rounds read it
def node_numbers(count: int, device: torch.device) -> Tensor:
    """Return 0 .. count-1: node numbers, or the depths of a chain's nodes."""
    return torch.arange(count, device=device)


def without_padding(mask: Tensor, valid: Tensor) -> Tensor:
    """Return mask [B, N, N] in which a node that is not `valid` [B, N] attends to itself only."""
    own = torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
    return torch.where(valid[:, :, None], mask, own)


def upload(numbers: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return `torch.tensor(numbers)` on a device.

    To a GPU they go in stream order, from pinned memory: the host does not wait for the work before.
    """
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
