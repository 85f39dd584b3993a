"""EAGLE-2's dynamic trees (arXiv 2406.16858): `draft_beams` expands level by level, `rerank` keeps the best candidates.

Shapes: B rows, k beams, C candidates a row, D size of the draft vocabulary, H head hidden size, n nodes a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from toolkit.infer.drafters.draft_rollout import DraftRollout
from toolkit.infer.kernels.dispatch import ops_for
from toolkit.infer.kernels.tree_reference import Candidates, root_beams
from toolkit.infer.request.draft_tree import DraftShape, DraftTree, candidate_count
from toolkit.infer.request.upload import upload


def draft_beams(
    nodes: DraftRollout, shape: DraftShape, limits: Sequence[DraftShape | None] | None, to_target: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Expands the k best nodes of each level by their k best children.

    Returns the candidates in level order: tokens [B, C], parents [B, C] (candidate numbers, -1 for the root),
    levels [C], scores [B, C] (cumulative log-probabilities). limits: a shape for each row; candidates outside a row's
    shape get the score -inf. to_target [D]: the target ids of the draft vocabulary.
    """
    k, steps, rows, device = shape.top_k, shape.num_steps, len(nodes.tokens), to_target.device
    ops, widths = ops_for(device.type), None if limits is None else _widths(limits, steps, device)
    found = Candidates.empty(rows, candidate_count(steps, k), device)
    beams, hidden, first = root_beams(nodes.sees), nodes.at_roots(), 0
    for level in range(steps):
        children = ops.top_log_probs(nodes.logits(hidden), k)  # [B, n, k] each
        width = None if widths is None else widths[level]
        last = level + 1 == steps
        beams = ops.grow_beams(beams, *children, to_target, found, first, width, None if last else nodes.nodes)
        first += children[0][0].numel()
        if not last:
            hidden = nodes.grow(hidden, beams.tokens, beams.parents, beams.sees)
    return found.tokens, found.parents, levels_of(shape, device), found.scores


def rerank(
    roots: Tensor, tokens: Tensor, parents: Tensor, levels: Tensor, scores: Tensor, nodes: Sequence[int], deepest: int
) -> DraftTree:
    """Runs the second phase: returns the tree of the best candidates. Arguments: `tree_reference.rank_candidates`."""
    ranked = ops_for(tokens.device.type).rank_candidates(roots, tokens, parents, levels, scores, nodes, deepest)
    return DraftTree(
        ranked.tokens, ranked.parents, ranked.depths, ranked.mask, ranked.valid, deepest=deepest, is_chain=False
    )


def _widths(limits: Sequence[DraftShape | None], steps: int, device: torch.device) -> Tensor:
    """Returns [steps, B]: how many children a node of each level has in the row's own shape."""
    own = [(0, 0) if one is None else (one.num_steps, one.top_k) for one in limits]
    return upload([[k if level < depth else 0 for depth, k in own] for level in range(steps)], device)


@lru_cache(maxsize=4096)  # keeps the tensor alive: a recorded round reads it
def levels_of(shape: DraftShape, device: torch.device) -> Tensor:
    """Returns the level of every candidate, [C] in level order."""
    k = shape.top_k
    sizes = [candidate_count(1, k)] + [k * k] * (shape.num_steps - 1)
    return torch.tensor([level for level, size in enumerate(sizes, start=1) for _ in range(size)], device=device)
