"""Which keys each query of causal attention sees, where it does not see all keys before it.

Shapes: B sequences, N queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

TILE = 256  # queries at a time where no operator does it


@dataclass(frozen=True)
class Reach:
    """first and last [B, N] int64: the first and the last key that each of N queries sees; both ascend with N."""

    first: Tensor
    last: Tensor

    @cached_property
    def tiles(self) -> tuple[tuple[int, int], ...]:
        """The least first and the end of the last by tile of queries: read from the device in one go."""
        firsts, lasts = self.first.split(TILE, dim=1), self.last.split(TILE, dim=1)
        bounds = torch.stack([torch.stack((a.min(), b.max() + 1)) for a, b in zip(firsts, lasts, strict=True)])
        return tuple((low, high) for low, high in bounds.tolist())
