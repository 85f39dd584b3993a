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
from toolkit.infer.request.draft_tree import DraftShape, DraftTree, candidate_count


def draft_beams(
    nodes: DraftRollout, shape: DraftShape, limits: Sequence[DraftShape | None] | None, to_target: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Expands the k best nodes of each level by their k best children.

    Returns the candidates in level order: tokens [B, C], parents [B, C] (candidate numbers, -1 for the root),
    levels [C], scores [B, C] (cumulative log-probabilities). limits: a shape for each row; candidates outside a row's
    shape get the score -inf. to_target [D]: the target ids of the draft vocabulary.
    """
    device = to_target.device
    k, steps, rows = shape.top_k, shape.num_steps, len(nodes.tokens)
    ranks = torch.arange(k, device=device)
    beyond = None if limits is None else _beyond(limits, ranks, steps)
    scores, tokens = _children(nodes, nodes.at_roots()[:, None], k, to_target)  # [B, 1, k]
    scores, tokens = scores[:, 0], tokens[:, 0]
    if beyond is not None:
        scores = scores.masked_fill(beyond[0], -torch.inf)
    found = [(tokens, torch.full_like(tokens, -1), scores)]
    beams = ranks.expand(rows, k)  # the beams' candidate numbers
    parents, total = nodes.roots.expand(rows, k), k
    for level in range(1, steps):
        hidden, first = nodes.grow(tokens, parents), nodes.nodes - k
        child_scores, child_tokens = _children(nodes, hidden, k, to_target)  # [B, k, k]
        child_scores = child_scores + scores[:, :, None]
        if beyond is not None:
            child_scores = child_scores.masked_fill(beyond[level][:, None], -torch.inf)
        child_scores, child_tokens = child_scores.flatten(1), child_tokens.flatten(1)
        found.append((child_tokens, beams.repeat_interleave(k, dim=1), child_scores))
        if level == steps - 1:
            break
        scores, chosen = child_scores.topk(k, dim=1)
        if beyond is not None:
            scores = scores.masked_fill(beyond[level], -torch.inf)  # a row has no more beams than branches
        tokens = child_tokens.gather(1, chosen)
        parents = first + chosen // k  # the parent beam: the child inherits its hidden state and ancestors
        beams = total + chosen
        total += k * k
    tokens, above, scores = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
    return tokens, above, levels_of(shape, device), scores


def rerank(
    roots: Tensor, tokens: Tensor, parents: Tensor, levels: Tensor, scores: Tensor, nodes: Sequence[int], deepest: int
) -> DraftTree:
    """Runs the second phase: returns the tree of the best candidates. Arguments: `tree_reference.rank_candidates`."""
    ranked = ops_for(tokens.device.type).rank_candidates(roots, tokens, parents, levels, scores, nodes, deepest)
    return DraftTree(
        ranked.tokens, ranked.parents, ranked.depths, ranked.mask, ranked.valid, deepest=deepest, is_chain=False
    )


def _children(nodes: DraftRollout, hidden: Tensor, k: int, to_target: Tensor) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities (<= 0, fp32) and target ids of the k best children of [B, n, H], [B, n, k] each."""
    # Scores are never nan, and no child's score exceeds its parent's: rerank relies on both.
    scores, ids = ops_for(hidden.device.type).top_log_probs(nodes.logits(hidden), k)
    return scores, to_target[ids]


def _beyond(limits: Sequence[DraftShape | None], ranks: Tensor, steps: int) -> Tensor:
    """Returns [steps, B, k] bool: children of this level and rank are outside the row's shape."""
    widths = torch.tensor([0 if one is None else one.top_k for one in limits], device=ranks.device)
    depths = torch.tensor([0 if one is None else one.num_steps for one in limits], device=ranks.device)
    levels = torch.arange(1, steps + 1, device=ranks.device)
    return (ranks >= widths[:, None]) | (levels[:, None] > depths)[:, :, None]


@lru_cache(maxsize=4096)  # keeps the tensor alive: a recorded round reads it
def levels_of(shape: DraftShape, device: torch.device) -> Tensor:
    """Returns the level of every candidate, [C] in level order."""
    k = shape.top_k
    sizes = [candidate_count(1, k)] + [k * k] * (shape.num_steps - 1)
    return torch.tensor([level for level, size in enumerate(sizes, start=1) for _ in range(size)], device=device)
