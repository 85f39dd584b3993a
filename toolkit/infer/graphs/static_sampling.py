"""The distributions of a bucket's rows, with settings that lie in static buffers. Shapes: B rows of the bucket."""

from __future__ import annotations

import torch

from toolkit.infer.graphs.round_state import RoundState
from toolkit.infer.verify.token_distribution import RowDistributions


class StaticSampling(RowDistributions):
    """cut: rows may have a top-k, top-p or min-p. What they are is only known when a round runs, so that the whole
    vocabulary is looked at. Draws are functions of (seed, position, logits): no generator has a state to keep."""

    def __init__(self, state: RoundState, rows: int, *, cut: bool) -> None:
        self._temperature, self._min_p = state.temperature[:rows], state.min_p[:rows]
        self._top_p, self._top_k = state.top_p[:rows], state.top_k[:rows]
        self._seeds = state.seeds[:rows, None]
        self._cut = cut

    def _widths(self, size: int, device: torch.device) -> tuple[int, ...]:
        return (size,)
