"""How one request wants its tokens chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass

from toolkit.infer.errors import SamplingError


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one request.

    temperature: 0 takes the most probable token; above 0 the token is drawn from softmax(logits / temperature).
    top_k: keep the k most probable tokens (0: all); then top_p: keep the smallest set whose mass reaches it (1: all).
        Tokens exactly as probable as the last one kept are kept too.
    seed: the draw is a pure function of (seed, index of the token in the sequence, logits), so a speculative run and a
        plain run with one seed write the same tokens.
    max_tokens: tokens written at most. The run also ends at the target's context limit.
    ignore_eos: go on after the target's own stop ids (`stop_ids` below still end the answer).
    stop_ids: further ids that end the answer; the id that ended it is the last output id.

    Raises `SamplingError` for a setting outside its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    max_tokens: int = 128
    ignore_eos: bool = False
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise SamplingError(f"temperature is {self.temperature}; it must be 0 (greedy) or a positive number")
        if not 0 < self.top_p <= 1:
            raise SamplingError(f"top_p is {self.top_p}; it must lie in (0, 1]; 1 keeps every token")
        if self.top_k < 0:
            raise SamplingError(f"top_k is {self.top_k}; it must be 0 (keep every token) or a positive count")
        if self.max_tokens < 1:
            raise SamplingError(f"max_tokens is {self.max_tokens}; at least 1 token has to be asked for")
        if not -(2**63) <= self.seed < 2**63:
            raise SamplingError(f"seed is {self.seed}; it must fit into 64 signed bits")
        object.__setattr__(self, "stop_ids", tuple(int(i) for i in self.stop_ids))
