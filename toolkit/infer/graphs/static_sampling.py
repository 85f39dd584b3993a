"""Token sampling in a CUDA graph: the sampling settings are in static buffers. Shapes: B rows of the bucket."""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.infer.cache.round_state import RoundState
from toolkit.infer.request.draft_tree import DraftTree
from toolkit.infer.verify.sampler import Choices, greedy
from toolkit.infer.verify.token_distribution import RowDistributions


class StaticDistributions(RowDistributions):
    """cut: rows may have top-k, top-p or min-p. Their values are known at replay only, so the cut reads the whole
    vocabulary. A draw is a function of (seed, position, logits): there is no generator state."""

    def __init__(self, state: RoundState, rows: int, *, cut: bool) -> None:
        self._temperature, self._min_p = state.temperature[:rows], state.min_p[:rows]
        self._top_p, self._top_k = state.top_p[:rows], state.top_k[:rows]
        self._seeds = state.seeds[:rows, None]
        self._cut = cut

    def _widths(self, size: int, device: torch.device) -> tuple[int, ...]:
        return (size,)


class StaticSampler:
    """The NodeSampler of a captured round. cut: as in StaticDistributions; None: all rows are greedy."""

    def __init__(self, state: RoundState, rows: int, cut: bool | None) -> None:
        self._hot = state.hot[:rows, None]
        self._distributions = None if cut is None else StaticDistributions(state, rows, cut=cut)

    def __call__(self, logits: Tensor, positions: Tensor, tree: DraftTree, first: int = 0) -> Choices:
        best = greedy(logits)
        if self._distributions is None:
            return Choices(best, None)
        return Choices(torch.where(self._hot, self._distributions.draw(logits, positions), best), None)
