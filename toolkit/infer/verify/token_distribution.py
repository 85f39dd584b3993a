"""The distribution of the next token, and the uniform random numbers that draw from it.

The distribution is the softmax at a temperature, cut by top-k, top-p and min-p. Each cut keeps the tokens whose logit
is at least a floor, so tokens as probable as the last one kept are kept too. Our kernels find the floor without sorting
the vocabulary.

The random numbers have no state. They are pure functions of seed and position, the same on every device. There are two
kinds. The target's draw depends on (seed, position) only, so a plain and a speculative run share it. The other numbers
of a round of drafting and verification must be new in every round, also at a position that an earlier round drafted and
rejected. Block verification uses all drafts of a round to decide how many it keeps, so the rejected drafts depend on
the committed tokens. The same draws in a later round would bias the distribution:

    round 1   root x0    drafts a b c     one kept: x0 a y
    round 2   root y            . d e     d has the position of c, and must be independent of c

Shapes: M rows (nodes flattened), R requests that draw, n nodes of each, V vocabulary, W weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from toolkit.infer.kernels.dispatch import ops_for
from toolkit.infer.kernels.reference import GOLDEN, mix
from toolkit.infer.request.draft_tree import upload
from toolkit.infer.request.params import SamplingParams

CPU_ROWS = 32  # distributions that a CPU computes at once: larger tensors get new pages from the system at every use


@dataclass(frozen=True)
class RowDistributions:
    """The settings of R requests with temperature > 0: temperature, min_p [R] fp32, top_p [R] fp64, top_k, seeds [R]
    int64.

    cut: rows may have top-k, top-p or min-p.
    """

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    seeds: Tensor
    cut: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> RowDistributions:
        """Uploads the settings of these requests."""
        return cls(
            temperature=upload([p.temperature for p in params], device, torch.float32),
            top_p=upload([p.top_p for p in params], device, torch.float64),
            top_k=upload([p.top_k for p in params], device, torch.long),
            min_p=upload([p.min_p for p in params], device, torch.float32),
            seeds=upload([p.seed for p in params], device, torch.long),
            cut=any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params),
        )

    def part(self, rows: slice) -> RowDistributions:
        """Returns the distributions of some of the rows."""
        names = ("temperature", "top_p", "top_k", "min_p", "seeds")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    def draw(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Draws tokens: logits [R, n, V], positions [R, n] of the tokens to draw -> ids [R, n]."""
        size = max(1, CPU_ROWS // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
        if size >= len(logits):
            return draw_from(self._weights(logits), self.target_uniform(positions).flatten()).view_as(positions)
        parts = [slice(start, start + size) for start in range(0, len(logits), size)]
        return torch.cat([self.part(at).draw(logits[at], positions[at]) for at in parts])

    def probs(self, logits: Tensor) -> Tensor:
        """Returns the probabilities: logits [R, n, V] -> [R, n, V] fp32."""
        weights = self._weights(logits)
        if self.cut:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.view(logits.shape)

    def target_uniform(self, positions: Tensor) -> Tensor:
        """Returns the target's uniform numbers in [0, 1) at positions [R, n]. They do not depend on the round."""
        return uniform(self.seeds[:, None], positions)

    def round_uniform(self, roots: Tensor, positions: Tensor, stream: Stream) -> Tensor:
        """Returns uniform numbers in [0, 1) of one round: roots [R, 1], positions [R, n] -> [R, n]."""
        return round_uniform(self.seeds[:, None], roots, positions, stream)

    def _weights(self, logits: Tensor) -> Tensor:
        """Returns the softmax with 0 where a token is cut, not normalised again: logits [R, n, V] -> [R * n, V]."""
        nodes = logits.shape[1]
        scaled = (logits.float() / self.temperature[:, None, None]).flatten(0, 1)
        if not self.cut:
            return torch.softmax(scaled, dim=-1)
        top_k, top_p, min_p = (x.repeat_interleave(nodes) for x in (self.top_k, self.top_p, self.min_p))
        floor = ops_for(logits.device.type).least_kept(scaled, top_k, top_p, min_p)
        return torch.softmax(scaled, dim=-1).masked_fill(scaled < floor, 0.0)


def draw_from(weights: Tensor, u: Tensor) -> Tensor:
    """Draws by the inverse CDF: weights [M, W] >= 0 (each row with a positive sum), u [M] in [0, 1) -> indices [M]."""
    return ops_for(weights.device.type).draw(weights, u)


class Stream(IntEnum):
    """The use of a number of one round. The values are arbitrary 64-bit numbers."""

    DRAFT = 0x5851F42D4C957F2D  # draws a draft token
    COIN = 0x14057B7EF767814F  # decides whether a draft is accepted


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Returns uniform numbers of (seed, position), int64 of one or two dimensions that broadcast: fp64 in [0, 1)."""
    return ops_for(positions.device.type).uniform(seeds, positions)


def round_uniform(seeds: Tensor, roots: Tensor, positions: Tensor, stream: Stream) -> Tensor:
    """Returns uniform numbers of (seed, stream, round, position), float64 in [0, 1). int64 tensors that broadcast.

    roots: index in the sequence of the first token that the round chooses. It identifies the round.
    """
    return uniform(mix(mix(seeds ^ stream) + roots * GOLDEN), positions)
