"""`tree_reference` in Triton: the accepted path of draft trees, and the trees of the best candidates.

Shapes: B rows, N nodes per row (root included), A = the tree's depth + 1, C candidates per row in level order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.infer.kernels import tree_reference
from toolkit.infer.kernels.tree_reference import AcceptedPath, Beams, Candidates
from toolkit.infer.request.draft_tree import DraftTree, upload

COMPARED = 16  # candidates per step that all candidates of a row are compared with
LANES = 128  # candidates that one program converts to nodes
# Beams and candidates that one program finds by comparisons (of 2048 it spills registers); torch sorts more of them.
MOST_BEAMS, MOST_CANDIDATES = 32, 1024


@triton.jit(do_not_specialize=["nodes", "longest"])
def _follow(tokens, parents, depths, valid, choices, numbers, nodes, longest, lanes: tl.constexpr):
    """Follow one row's path; each step searches all nodes in parallel for the child with the chosen token."""
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, lanes)
    inside = node < nodes
    token = tl.load(tokens + row * nodes + node, mask=inside, other=0)
    parent = tl.load(parents + row * nodes + node, mask=inside, other=-1)
    real = inside & (tl.load(valid + row * nodes + node, mask=inside, other=0) != 0)
    depth_of = tl.load(depths + row * nodes + node, mask=real, other=0)
    of_root = tl.load(choices + row * nodes)
    numbers += row * (3 + 3 * longest)
    path, chosen, ranks = numbers + 3, numbers + 3 + longest, numbers + 3 + 2 * longest
    tl.store(path, row * 0)
    tl.store(chosen, of_root)
    tl.store(ranks, row * 0)
    at, choice, taken = tl.min(node, axis=0), of_root, tl.min(node, axis=0)
    for depth in range(1, longest):
        sibling = real & (parent == at)
        found = tl.min(tl.where(sibling & (token == choice), node, nodes), axis=0)
        # After the end of the path (its length is less than the depth) no step continues.
        goes_on = (found < nodes) & (taken == depth - 1)
        rank = tl.sum((sibling & (node < found)).to(tl.int64), axis=0)
        at = tl.where(goes_on, found, at)
        choice = tl.load(choices + row * nodes + at)
        taken += goes_on.to(tl.int32)
        tl.store(path + depth, tl.where(goes_on, at, 0).to(tl.int64))
        tl.store(chosen + depth, tl.where(goes_on, choice, of_root))
        tl.store(ranks + depth, tl.where(goes_on, rank, 0))
    tl.store(numbers, taken.to(tl.int64))
    tl.store(numbers + 1, tl.sum(real.to(tl.int64), axis=0) - 1)
    tl.store(numbers + 2, tl.max(depth_of, axis=0))


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
    """tokens, parents, depths, choices [B, N] int64, valid [B, N] bool -> paths of `longest` nodes.

    The kernel uses the parents; it does not read mask and is_chain.
    """
    rows, nodes = tokens.shape
    followed = AcceptedPath.empty(rows, longest, tokens.device)
    tokens, parents, depths, valid, choices = (one.contiguous() for one in (tokens, parents, depths, valid, choices))
    _follow[(rows,)](
        tokens, parents, depths, valid.view(torch.uint8), choices, followed.numbers, nodes, longest,
        lanes=max(16, triton.next_power_of_2(nodes)), num_warps=1 if nodes <= 64 else 4,
    )  # fmt: skip
    return followed


@triton.jit(do_not_specialize=["candidates", "kept_count"])
def _number_nodes(scores, ranks, numbers, candidates, kept_count, wide: tl.constexpr, compared: tl.constexpr):
    """Rank one row's candidates by score (the earlier one first on a tie) and number the nodes of the kept ones."""
    row = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, wide)
    inside = candidate < candidates
    score = tl.load(scores + row * candidates + candidate, mask=inside, other=float("-inf"))
    rank = tl.zeros((wide,), tl.int32)
    for first in range(0, candidates, compared):
        other = first + tl.arange(0, compared)
        rival = tl.load(scores + row * candidates + other, mask=other < candidates, other=float("-inf"))[None, :]
        before = (rival > score[:, None]) | ((rival == score[:, None]) & (other[None, :] < candidate[:, None]))
        rank += tl.sum((before & (other < candidates)[None, :]).to(tl.int32), axis=1)
    kept = inside & (rank < kept_count)
    number = tl.where(kept, tl.cumsum(kept.to(tl.int32), axis=0), 0)  # the root is node 0
    tl.store(ranks + row * candidates + candidate, rank, mask=inside)
    tl.store(numbers + row * candidates + candidate, number, mask=inside)


@triton.jit(do_not_specialize=["candidates", "nodes", "deepest"])
def _make_nodes(
    roots, tokens, parents, scores, limits, ranks, numbers, node_tokens, node_parents, depths, mask, valid, candidates,
    nodes, deepest, lanes: tl.constexpr,
):  # fmt: skip
    """Write the nodes of the kept candidates, and mark their ancestors on the way up to the root."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    candidate = part * lanes + tl.arange(0, lanes)
    inside = candidate < candidates
    here = row * candidates + candidate
    number = tl.load(numbers + here, mask=inside, other=0)
    kept = inside & (number > 0)
    good = kept
    if limits is not None:
        good = good & (tl.load(ranks + here, mask=kept, other=0) < tl.load(limits + row) - 1)
        good = good & (tl.load(scores + here, mask=kept, other=float("-inf")) > float("-inf"))
    parent = tl.load(parents + here, mask=kept, other=-1)
    above = tl.load(numbers + row * candidates + parent, mask=kept & (parent >= 0), other=0)
    node = row * nodes + number
    tl.store(node_tokens + node, tl.load(tokens + here, mask=kept, other=0), mask=kept)
    tl.store(node_parents + node, above.to(tl.int64), mask=kept)
    tl.store(valid + node, good.to(tl.uint8), mask=kept)
    seen = good.to(tl.uint8)
    tl.store(mask + node * nodes + number, (kept).to(tl.uint8), mask=kept)
    tl.store(mask + node * nodes, seen, mask=good)
    depth = kept.to(tl.int64)
    for _ in range(1, deepest):
        climbs = kept & (parent >= 0)
        above = tl.load(numbers + row * candidates + parent, mask=climbs, other=0)
        tl.store(mask + node * nodes + above, seen, mask=climbs & good)
        parent = tl.load(parents + row * candidates + parent, mask=climbs, other=-1)
        depth += climbs.to(tl.int64)
    tl.store(depths + node, depth, mask=kept)
    if part == 0:
        one = (row * 0 + 1).to(tl.uint8)
        tl.store(node_tokens + row * nodes, tl.load(roots + row))
        tl.store(node_parents + row * nodes, row * 0 - 1)
        tl.store(depths + row * nodes, row * 0)
        tl.store(valid + row * nodes, one)
        tl.store(mask + row * nodes * nodes, one)


def rank_candidates(
    roots: Tensor,
    tokens: Tensor,
    parents: Tensor,
    scores: Tensor,
    nodes: Sequence[int],
    deepest: int,
) -> DraftTree:
    """roots [B], tokens, parents, scores [B, C] -> trees; row b keeps nodes[b] - 1 candidates."""
    rows, candidates = tokens.shape
    if candidates > MOST_CANDIDATES:
        return tree_reference.rank_candidates(roots, tokens, parents, scores, nodes, deepest)
    device, most = tokens.device, max(nodes)
    uniform = min(nodes) == most
    limits = None if uniform else upload(nodes, device)
    ranks, numbers = (torch.empty(rows, candidates, dtype=torch.int32, device=device) for _ in range(2))
    node_tokens, node_parents, depths = (torch.empty(rows, most, dtype=torch.long, device=device) for _ in range(3))
    mask = torch.zeros(rows, most, most, dtype=torch.bool, device=device)
    valid = torch.empty(rows, most, dtype=torch.bool, device=device)
    roots, tokens, parents, scores = (one.contiguous() for one in (roots, tokens, parents, scores))
    wide = max(16, triton.next_power_of_2(candidates))
    _number_nodes[(rows,)](
        scores, ranks, numbers, candidates, most - 1, wide=wide, compared=COMPARED, num_warps=8 if wide > 256 else 4
    )
    _make_nodes[(rows, triton.cdiv(candidates, LANES))](
        roots, tokens, parents, scores, limits, ranks, numbers, node_tokens, node_parents, depths,
        mask.view(torch.uint8), valid.view(torch.uint8), candidates, most, deepest, lanes=LANES,
    )  # fmt: skip
    return DraftTree(node_tokens, node_parents, depths, mask, valid, deepest, is_chain=False)


@triton.jit(do_not_specialize=["count", "k", "found", "first", "keep", "sees_row", "sees_beam", "node", "seen"])
def _grow(
    log_probs, ids, to_target, beam_numbers, beam_scores, beam_sees, found_tokens, found_parents, found_scores, widths,
    tokens, parents, numbers, scores, sees, count, k, found, first, keep, sees_row, sees_beam, node, seen,
    wide: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """Write the children of one row's beams, and the `keep` best of them as its next beams."""
    row = tl.program_id(0).to(tl.int64)
    child = tl.arange(0, wide)
    inside = child < count * k
    beam = row * count + child // k
    width = k
    if widths is not None:
        width = tl.load(widths + row).to(tl.int32)
    here = row * (count * k) + child
    score = tl.load(log_probs + here, mask=inside, other=float("-inf"))
    score += tl.load(beam_scores + beam, mask=inside, other=0.0)
    score = tl.where(child % k < width, score, float("-inf"))
    token = tl.load(to_target + tl.load(ids + here, mask=inside, other=0), mask=inside, other=0)
    candidate = row * found + first + child
    tl.store(found_tokens + candidate, token, mask=inside)
    tl.store(found_parents + candidate, tl.load(beam_numbers + beam, mask=inside, other=0), mask=inside)
    tl.store(found_scores + candidate, score, mask=inside)
    left, at = inside, tl.arange(0, lanes)
    for place in range(0, keep):
        best = tl.max(tl.where(left, score, float("-inf")), axis=0)
        chosen = tl.min(tl.where(left & (score == best), child, wide), axis=0)
        left = left & (child != chosen)
        above, new = chosen // k, row * keep + place
        tl.store(tokens + new, tl.sum(tl.where(child == chosen, token, 0), axis=0))
        tl.store(parents + new, above.to(tl.int64))
        tl.store(numbers + new, (first + chosen).to(tl.int64))
        if beam_sees is None:
            tl.store(scores + new, best)
        else:
            tl.store(scores + new, tl.where(place < width, best, float("-inf")))
            of_parent = tl.load(beam_sees + row * sees_row + above * sees_beam + at, mask=at < seen, other=0)
            tl.store(sees + new * seen + at, tl.where(at == node + place, 1, of_parent), mask=at < seen)


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
    """Write the children log_probs, ids [B, n, k] of `beams` to `found` [B, C] from `first` on; return the `keep`
    best."""
    rows, count, k = ids.shape
    if keep > MOST_BEAMS or count * k > MOST_CANDIDATES:
        return tree_reference.grow_beams(beams, log_probs, ids, to_target, found, first, widths, keep, node)
    device, above = ids.device, beams.sees
    tokens, parents, numbers = (torch.empty(rows, keep, dtype=torch.long, device=device) for _ in range(3))
    scores = torch.empty(rows, keep, dtype=torch.float32, device=device)
    seen, strides = (0, (0, 0)) if above is None else (above.shape[2], above.stride()[:2])
    sees = None if above is None else torch.empty(rows, keep, seen, dtype=torch.bool, device=device)
    wide = max(16, triton.next_power_of_2(count * k))
    _grow[(rows,)](
        log_probs.contiguous(), ids.contiguous(), to_target, beams.numbers, beams.scores,
        None if above is None else above.view(torch.uint8), *found, widths, tokens, parents, numbers, scores,
        None if sees is None else sees.view(torch.uint8), count, k, found.tokens.shape[1], first, keep, *strides, node,
        seen, wide=wide, lanes=max(16, triton.next_power_of_2(seen)), num_warps=1 if wide <= 64 else 4,
    )  # fmt: skip
    return Beams(tokens, parents, numbers, scores, sees) if keep else beams
