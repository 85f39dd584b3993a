"""The distribution of the next token, and the uniform random numbers that draw from it.

The distribution is the softmax at a temperature, cut by top-k, top-p and min-p. Each cut keeps the tokens whose logit
is at least a floor, so tokens as probable as the last one kept are kept too. The W most probable tokens determine the
floor. W does not depend on the logits:

    top-k       W = the largest k of the batch        min-p    W = 1
    top-p       W = the whole vocabulary              top-p after top-k    as top-k

On a CPU a sort of the whole vocabulary costs more than a read of a result. There top-p tries a small W first, and a
larger W only for the rows that need it.

The random numbers have no state. They are pure functions of seed and position, the same on every device. There are two
kinds. The target's draw depends on (seed, position) only, so a plain and a speculative run share it. The other numbers
of a round of drafting and verification must be new in every round, also at a position that an earlier round drafted and
rejected. Block verification uses all drafts of a round to decide how many it keeps, so the rejected drafts depend on
the committed tokens. The same draws in a later round would bias the distribution:

    round 1   root x0    drafts a b c     one kept: x0 a y
    round 2   root y            . d e     d has the position of c, and must be independent of c

Shapes: M rows (nodes flattened), R requests that draw, n nodes of each, V vocabulary, W most probable tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from toolkit.infer.request.params import SamplingParams

TOP_WIDTHS = (64, 1024)  # the values of W that top-p tries on a CPU before the whole vocabulary
BLOCK = 256


class RowDistributions:
    """Temperature, top-k, top-p, min-p and seed of R requests with temperature > 0, as tensors."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device) -> None:
        self._temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device)
        self._top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
        self._top_k = torch.tensor([p.top_k for p in params], dtype=torch.long, device=device)
        self._min_p = torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device)
        # Kept on the host, so that no read from the device is needed.
        self._cut = any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params)
        self._largest_k = max((p.top_k for p in params), default=0)
        self._open = any(p.top_p < 1 and p.top_k == 0 for p in params)
        self._seeds = torch.tensor([p.seed for p in params], dtype=torch.long, device=device)[:, None]

    def draw(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Draws tokens: logits [R, n, V], positions [R, n] of the tokens to draw -> ids [R, n]."""
        return draw_from(self._weights(logits), self.target_uniform(positions).flatten()).view_as(positions)

    def probs(self, logits: Tensor) -> Tensor:
        """Returns the probabilities: logits [R, n, V] -> [R, n, V] fp32."""
        weights = self._weights(logits)
        if self._cut:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.view(logits.shape)

    def target_uniform(self, positions: Tensor) -> Tensor:
        """Returns the target's uniform numbers in [0, 1) at positions [R, n]. They do not depend on the round."""
        return uniform(self._seeds.expand_as(positions), positions)

    def round_uniform(self, roots: Tensor, positions: Tensor, stream: Stream) -> Tensor:
        """Returns uniform numbers in [0, 1) of one round: roots [R, 1], positions [R, n] -> [R, n]."""
        return round_uniform(self._seeds, roots, positions, stream)

    def _weights(self, logits: Tensor) -> Tensor:
        """Returns the weights of the distributions: logits [R, n, V] -> [R * n, V]."""
        nodes, size = logits.shape[1:]
        scaled = (logits.float() / self._temperature[:, None, None]).flatten(0, 1)
        if not self._cut:
            return torch.softmax(scaled, dim=-1)
        top_k, top_p, min_p = (x.repeat_interleave(nodes) for x in (self._top_k, self._top_p, self._min_p))
        return weights_left(scaled, top_k, top_p, min_p, self._widths(size, logits.device))

    def _widths(self, size: int, device: torch.device) -> tuple[int, ...]:
        return widths_for(size, self._largest_k, self._open, device)


def widths_for(size: int, largest_k: int, open_top_p: bool, device: torch.device) -> tuple[int, ...]:
    """Returns the values of W to try in order, out of `size` tokens. The last one is enough for every row.

    open_top_p: some row has a top-p without a top-k before it.
    """
    if not open_top_p:
        return (min(size, max(1, largest_k)),)
    if device.type != "cpu":
        return (size,)
    return (*(width for width in TOP_WIDTHS if largest_k <= width < size), size)


def weights_left(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, widths: Sequence[int]) -> Tensor:
    """Returns the softmax with 0 where a token is cut, [M, V] fp32, not normalised again.

    logits [M, V]. top_k, top_p, min_p [M]: the values 0, 1 and 0 cut nothing. widths: as `widths_for` returns them.
    """
    floor, certain = _floors(logits, top_k, top_p, min_p, widths[0])
    for width in widths[1:]:
        rows = (~certain).nonzero().squeeze(1)
        if not len(rows):
            break
        floor[rows], certain[rows] = _floors(logits[rows], top_k[rows], top_p[rows], min_p[rows], width)
    return torch.softmax(logits, dim=-1).masked_fill(logits < floor, 0.0)


def _floors(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Computes the least logit kept from the `width` most probable tokens. width >= every top_k.

    Returns (floors [M, 1], certain [M] bool). certain is False where these tokens do not reach the mass of top-p.
    """
    # For the whole vocabulary a sort is faster than topk, which searches for the k largest before it sorts them.
    every = width == logits.shape[1]
    top = (logits.sort(dim=-1, descending=True) if every else logits.topk(width, dim=-1)).values
    # top-k: drop the tokens below the k-th largest; top-p then counts in shares of the mass that is left.
    kth = top.gather(1, (top_k.clamp(1, width) - 1)[:, None])
    limit = kth.masked_fill(top_k[:, None] == 0, -torch.inf)
    whole = logits.masked_fill(logits < limit, -torch.inf).logsumexp(dim=-1, keepdim=True)
    mass = (top - whole).double().exp().masked_fill(top < limit, 0.0)
    # top-p: the first place where the sorted mass reaches top_p is the last place kept.
    reached = mass.cumsum(dim=-1) >= top_p[:, None]
    inside = reached.any(dim=-1)
    last = torch.where(inside, reached.int().argmax(dim=-1), width - 1)
    floor = top.gather(1, last[:, None]).masked_fill(top_p[:, None] == 1, -torch.inf)
    floor = torch.maximum(floor, limit)
    floor = torch.maximum(floor, top[:, :1] + min_p.log()[:, None])
    return floor, inside | (top_p == 1) | (top_k > 0)


def draw_from(weights: Tensor, u: Tensor) -> Tensor:
    """Draws by the inverse CDF: weights [M, W] >= 0 (each row with a positive sum), u [M] in [0, 1) -> indices [M].

    Of many tokens it draws a block of BLOCK tokens first, then the token in it, so that sums stay short and exact.
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


def _first_above(sums: Tensor, goal: Tensor) -> Tensor:
    """Returns the index [M] of the first running sum [M, W] above `goal` [M].

    If rounding leaves none, returns the index of the last sum that grew.
    """
    goal = torch.minimum(goal, sums[:, -1] * (1 - 2.0**-50))
    return torch.searchsorted(sums, goal[:, None], right=True).squeeze(1).clamp(max=sums.shape[1] - 1)


GOLDEN = -7046029254386353131


class Stream(IntEnum):
    """The use of a number of one round. The values are arbitrary 64-bit numbers."""

    DRAFT = 0x5851F42D4C957F2D  # draws a draft token
    COIN = 0x14057B7EF767814F  # decides whether a draft is accepted


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Returns SplitMix64 (Steele et al., OOPSLA 2014) of (seed, position): int64 of one shape -> float64 in [0, 1)."""
    x = _mix(seeds) + positions * GOLDEN
    return _shift(_mix(x), 11).double() * 2.0**-53


def round_uniform(seeds: Tensor, roots: Tensor, positions: Tensor, stream: Stream) -> Tensor:
    """Returns uniform numbers of (seed, stream, round, position), float64 in [0, 1). int64 tensors that broadcast.

    roots: index in the sequence of the first token that the round chooses. It identifies the round.
    """
    return uniform(_mix(_mix(seeds ^ stream) + roots * GOLDEN), positions)


def _mix(x: Tensor) -> Tensor:
    x = x + GOLDEN
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Returns the logical right shift of int64 (the shift of torch keeps the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
