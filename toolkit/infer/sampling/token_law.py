"""The law of the next token: softmax at a temperature, cut by top-k, top-p and min-p. Drawn from, or written out.

Both read one definition, `_remaining`. Tokens exactly as probable as the last one kept are kept too.

Shapes: M rows (nodes flattened), R requests that draw, n nodes of each, V vocabulary, W tokens looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from toolkit.infer.sampling.sampling_params import SamplingParams
from toolkit.infer.sampling.seeded_uniform import Stream, round_uniform, uniform

TOP_WIDTHS = (64, 1024)  # how many of the most probable tokens are looked at before the whole vocabulary is
BLOCK = 256


class RowLaws:
    """Temperature, top-k, top-p, min-p and seed of R requests that draw (temperature above 0), as tensors."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device) -> None:
        self._temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device)
        self._top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
        self._top_k = torch.tensor([p.top_k for p in params], dtype=torch.long, device=device)
        self._min_p = torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device)
        # Known on the host: where no row is cut, nothing has to be looked up on the device.
        self._cut = any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params)
        self._seeds = torch.tensor([p.seed for p in params], dtype=torch.long, device=device)[:, None]

    def draw(self, logits: Tensor, positions: Tensor) -> Tensor:
        """logits [R, n, V], positions [R, n] of the tokens to draw -> ids [R, n]."""
        scaled, top_k, top_p, min_p = self._flat(logits)
        u = self.target_uniform(positions).flatten()
        drawn = draw(scaled, top_k, top_p, min_p, u) if self._cut else draw_from(torch.softmax(scaled, dim=-1), u)
        return drawn.view_as(positions)

    def written_out(self, logits: Tensor) -> Tensor:
        """logits [R, n, V] -> probabilities [R, n, V] fp32."""
        scaled, *settings = self._flat(logits)
        return (law(scaled, *settings) if self._cut else torch.softmax(scaled, dim=-1)).view(logits.shape)

    def target_uniform(self, positions: Tensor) -> Tensor:
        """The target's own numbers in [0, 1) at positions [R, n]: in every round, and in plain decoding, the same."""
        return uniform(self._seeds.expand_as(positions), positions)

    def round_uniform(self, roots: Tensor, positions: Tensor, stream: Stream) -> Tensor:
        """Numbers of one round: roots [R, 1], positions [R, n] -> [R, n]."""
        return round_uniform(self._seeds, roots, positions, stream)

    def _flat(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        nodes = logits.shape[1]
        scaled = (logits.float() / self._temperature[:, None, None]).flatten(0, 1)
        top_k, top_p, min_p = (x.repeat_interleave(nodes) for x in (self._top_k, self._top_p, self._min_p))
        return scaled, top_k, top_p, min_p


def draw(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor) -> Tensor:
    """Inverse CDF, in token-id order, of softmax(logits) after top-k, top-p and min-p.

    logits [M, V], settings [M], u [M] in [0, 1) -> token ids [M].
    """
    tokens = torch.empty(len(logits), dtype=torch.long, device=logits.device)
    for rows, ids, weights in _remaining(logits, top_k, top_p, min_p):
        chosen = draw_from(weights, u[rows])
        tokens[rows] = chosen if ids is None else ids.gather(1, chosen[:, None]).squeeze(1)
    return tokens


def law(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """softmax(logits) after top-k, top-p and min-p, as `draw` has it: logits [M, V], settings [M] -> [M, V] fp32."""
    whole = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
    for rows, ids, weights in _remaining(logits, top_k, top_p, min_p):
        if ids is None:
            whole[rows] = weights
        else:
            kept = (weights / weights.sum(dim=-1, keepdim=True)).float()
            whole[rows] = torch.zeros_like(whole[rows]).scatter_(1, ids, kept)
    return whole


def draw_from(weights: Tensor, u: Tensor) -> Tensor:
    """Inverse CDF of a law given by weights [M, W] >= 0, not all 0; u [M] in [0, 1) -> indices [M].

    Over many tokens first the block of tokens is drawn, then the token, so that sums stay short and exact.
    """
    rows, size = weights.shape
    if size <= max(BLOCK, TOP_WIDTHS[-1]):
        sums = weights.double().cumsum(dim=-1)
        return _first_above(sums, u * sums[:, -1])
    padding = -size % BLOCK
    if padding:
        weights = torch.nn.functional.pad(weights, (0, padding))
    blocks = weights.view(rows, -1, BLOCK)
    edges = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    goal = u * edges[:, -1]
    block = _first_above(edges, goal)
    inside = blocks[torch.arange(rows, device=weights.device), block].double().cumsum(dim=-1)
    before = edges.gather(1, (block - 1).clamp(min=0)[:, None]).squeeze(1).masked_fill(block == 0, 0.0)
    return block * BLOCK + _first_above(inside, goal - before)


def _remaining(
    logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
    """Row numbers, and the tokens left to them: ids [., W] ascending (None: every one), weights [., W].

    Every row comes once, with those that are looked at equally wide.
    """
    filtered = (top_k > 0) | (top_p < 1) | (min_p > 0)
    unfiltered = (~filtered).nonzero().squeeze(1)
    if len(unfiltered):
        yield unfiltered, None, torch.softmax(logits[unfiltered], dim=-1)
    waiting = filtered.nonzero().squeeze(1)
    for width in (*TOP_WIDTHS, logits.shape[1]):
        if not len(waiting):
            return
        settings = (top_k[waiting], top_p[waiting], min_p[waiting])
        certain, ids, weights = _remaining_top(logits[waiting], *settings, width)
        yield waiting[certain], ids[certain], weights[certain]
        waiting = waiting[~certain]


def _remaining_top(
    logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What is left, as far as the `width` most probable tokens show it.

    Returns (certain [M] bool, ids [M, W] ascending, weights [M, W]); a row is certain when all it keeps, ties included,
    lies inside that width.
    """
    size = logits.shape[1]
    width = min(width, size)
    top, ids = logits.topk(width, dim=-1)
    # top-k: what lies below the k-th largest goes, and the mass that is left is the new whole.
    k = torch.where(top_k > 0, top_k, size)
    kth = top.gather(1, (k.clamp(max=width) - 1)[:, None])
    limit = torch.where((top_k > 0)[:, None], kth, -torch.inf)
    kept_k = top >= limit
    whole = torch.where(
        top_k > 0, top.masked_fill(~kept_k, -torch.inf).logsumexp(dim=-1), torch.logsumexp(logits, dim=-1)
    )
    mass = (top - whole[:, None]).double().exp() * kept_k
    # top-p: the first place where the sorted mass reaches top_p is the last one kept.
    reached = mass.cumsum(dim=-1) >= top_p[:, None]
    last = torch.where(reached.any(dim=-1), reached.int().argmax(dim=-1), kept_k.sum(dim=-1) - 1)
    floor = torch.where((top_p < 1)[:, None], top.gather(1, last[:, None]), limit)
    floor = torch.maximum(floor, limit)
    floor = torch.maximum(floor, top[:, :1] + min_p.log()[:, None])
    certain = torch.ones_like(top_k, dtype=torch.bool)
    if width < size:  # nothing outside may be as probable as the last one kept, and top-p needs top-k's whole mass
        beyond = top[:, -1]
        certain = (top_k == 0) | (top_p == 1) | ((k <= width) & (limit.squeeze(1) > beyond))
        certain &= floor.squeeze(1) > beyond
    order = ids.argsort(dim=-1)
    weights = (mass * (top >= floor)).gather(1, order)
    return certain, ids.gather(1, order), weights


def _first_above(sums: Tensor, goal: Tensor) -> Tensor:
    """Index of the first running sum [M, W] above `goal` [M]; where rounding leaves none, of the last that grew."""
    goal = torch.minimum(goal, sums[:, -1] * (1 - 2.0**-50))
    return torch.searchsorted(sums, goal[:, None], right=True).squeeze(1).clamp(max=sums.shape[1] - 1)
