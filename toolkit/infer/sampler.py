"""Which token follows: argmax, or a draw that is a pure function of (seed, position, logits).

Because the draw does not depend on how the logits came about, a verified tree node draws what plain decoding would
draw at the same place: following a draft token only where it equals the draw is then exact at any temperature.

Shapes: B rows, N nodes a row, n of them looked at here, V vocabulary, M rows that draw (nodes flattened).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.infer.draft_tree import DraftTree
from toolkit.infer.kernels.choose import argmax_for
from toolkit.infer.logit_edits import LogitEdits, holds_stops, is_edited
from toolkit.infer.logprobs import NodeLogprobs
from toolkit.infer.request import Request
from toolkit.infer.sampling_params import SamplingParams

GREEDY = SamplingParams()
TOP_WIDTHS = (64, 1024)  # how many of the most probable tokens are looked at before the whole vocabulary is
BLOCK = 256


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """SplitMix64 (Steele et al., OOPSLA 2014) of (seed, position): int64 tensors of one shape -> float64 in [0, 1)."""
    x = _mix(seeds) + positions * -7046029254386353131
    return _shift(_mix(x), 11).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    x = x + -7046029254386353131
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right of int64 (torch's own keeps the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@dataclass(frozen=True)
class Choices:
    """What the target chose at every node: tokens [B, n]; logprobs of the rows that asked, None if none did."""

    tokens: Tensor
    logprobs: NodeLogprobs | None

    @classmethod
    def joined(cls, parts: Sequence[Choices]) -> Choices:
        """Parts that follow one another along the nodes."""
        if len(parts) == 1:
            return parts[0]
        kept = [part.logprobs for part in parts if part.logprobs is not None]
        return cls(torch.cat([part.tokens for part in parts], dim=1), NodeLogprobs.joined(kept) if kept else None)


class Sampler:
    """The settings of the running rows as tensors; built when the rows change, used in every step.

    Rows without penalties, bias or min_tokens go past the edits, greedy ones past the draws.
    """

    def __init__(self, requests: Sequence[Request], vocab_size: int, device: torch.device) -> None:
        params = [request.params for request in requests]
        edited = [row for row, request in enumerate(requests) if is_edited(request)]
        self._plain_rows = _Draws([p if row not in edited else GREEDY for row, p in enumerate(params)], device)
        self._edits: LogitEdits | None = None
        if edited:
            self._edits = LogitEdits(requests, edited, vocab_size, device)
            self._edited_rows = _Draws([params[row] for row in edited], device)
        self._asking = [row for row, p in enumerate(params) if p.logprobs is not None]
        self._most = max((p.logprobs or 0 for p in params), default=0)
        self._holding = [request for request in requests if holds_stops(request)]

    @property
    def outdated(self) -> bool:
        """True when a row has reached its min_tokens, and may be spared the edits from now on."""
        return any(not holds_stops(request) for request in self._holding)

    def __call__(self, logits: Tensor, positions: Tensor, tree: DraftTree, first: int = 0) -> Choices:
        """The tokens behind the nodes first .. first+n-1 of `tree`.

        logits [B, n, V]; positions [B, n] = index in the sequence of the token to choose.
        """
        tokens = self._plain_rows(logits, positions)
        if self._edits is not None:
            rows = self._edits.rows
            changed = logits[rows].float()
            self._edits.apply(changed, positions[rows], tree, first)
            tokens = tokens.index_copy(0, rows, self._edited_rows(changed, positions[rows]))
        if not self._asking:
            return Choices(tokens, None)
        asked = NodeLogprobs.of(self._asking, self._most, logits[self._asking], tokens[self._asking])
        return Choices(tokens, asked)


class _Draws:
    """Temperature, top-k, top-p, min-p and seed of some rows."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device) -> None:
        hot = [row for row, settings in enumerate(params) if settings.temperature > 0]
        self._hot = torch.tensor(hot, dtype=torch.long, device=device)
        self._all_hot = len(hot) == len(params)
        drawn = [params[row] for row in hot]
        self._temperature = torch.tensor([p.temperature for p in drawn], dtype=torch.float32, device=device)
        self._top_p = torch.tensor([p.top_p for p in drawn], dtype=torch.float64, device=device)
        self._top_k = torch.tensor([p.top_k for p in drawn], dtype=torch.long, device=device)
        self._min_p = torch.tensor([p.min_p for p in drawn], dtype=torch.float32, device=device)
        self._seeds = torch.tensor([p.seed for p in drawn], dtype=torch.long, device=device)

    def __call__(self, logits: Tensor, positions: Tensor) -> Tensor:
        """logits [B, n, V], positions [B, n] -> token ids [B, n]."""
        if not len(self._hot):
            return greedy(logits)
        nodes = logits.shape[1]
        rows = logits if self._all_hot else logits[self._hot]
        drawn = draw(
            (rows.float() / self._temperature[:, None, None]).flatten(0, 1),
            self._top_k.repeat_interleave(nodes),
            self._top_p.repeat_interleave(nodes),
            self._min_p.repeat_interleave(nodes),
            uniform(self._seeds[:, None].expand(-1, nodes), positions[self._hot]).flatten(),
        ).view(-1, nodes)
        if self._all_hot:
            return drawn
        return greedy(logits).index_copy_(0, self._hot, drawn)


def greedy(logits: Tensor) -> Tensor:
    """The most probable token, the lowest id among equals: [..., V] -> [...]."""
    return argmax_for(logits.device.type)(logits)


def draw(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor) -> Tensor:
    """Inverse CDF, in token-id order, of softmax(logits) after top-k, top-p and min-p.

    logits [M, V], settings [M], u [M] in [0, 1) -> token ids [M].
    """
    tokens = torch.empty(len(logits), dtype=torch.long, device=logits.device)
    filtered = (top_k > 0) | (top_p < 1) | (min_p > 0)
    whole = (~filtered).nonzero().squeeze(1)
    if len(whole):
        tokens[whole] = _draw_whole(logits[whole], u[whole])
    waiting = filtered.nonzero().squeeze(1)
    for width in (*TOP_WIDTHS, logits.shape[1]):
        if not len(waiting):
            break
        settings = (top_k[waiting], top_p[waiting], min_p[waiting], u[waiting])
        certain, drawn = _draw_top(logits[waiting], *settings, width)
        tokens[waiting[certain]] = drawn[certain]
        waiting = waiting[~certain]
    return tokens


def _draw_whole(logits: Tensor, u: Tensor) -> Tensor:
    """Draw from the unfiltered law: first the block of tokens, then the token, so that sums stay short and exact."""
    rows, size = logits.shape
    weights = torch.softmax(logits, dim=-1)
    padding = -size % BLOCK
    if padding:
        weights = torch.nn.functional.pad(weights, (0, padding))
    blocks = weights.view(rows, -1, BLOCK)
    edges = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    goal = u * edges[:, -1]
    block = _first_above(edges, goal)
    inside = blocks[torch.arange(rows, device=logits.device), block].double().cumsum(dim=-1)
    before = edges.gather(1, (block - 1).clamp(min=0)[:, None]).squeeze(1).masked_fill(block == 0, 0.0)
    return block * BLOCK + _first_above(inside, goal - before)


def _draw_top(
    logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Draw while looking at the `width` most probable tokens only.

    Returns (certain [M] bool, ids [M]); a row is certain when all it keeps, ties included, lies inside that width.
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
    sums = weights.cumsum(dim=-1)
    chosen = _first_above(sums, u * sums[:, -1])
    return certain, ids.gather(1, order).gather(1, chosen[:, None]).squeeze(1)


def _first_above(sums: Tensor, goal: Tensor) -> Tensor:
    """Index of the first running sum [M, W] above `goal` [M]; where rounding leaves none, of the last that grew."""
    goal = torch.minimum(goal, sums[:, -1] * (1 - 2.0**-50))
    return torch.searchsorted(sums, goal[:, None], right=True).squeeze(1).clamp(max=sums.shape[1] - 1)
