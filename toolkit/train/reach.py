"""The keys that each query of causal attention sees, if not all earlier keys.

Shapes: B sequences, N queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

TILE = 256  # queries of a tile in plain torch


@dataclass(frozen=True)
class Reach:
    """first and last [B, N] int64: the first and the last key that each query sees; both ascend along N."""

    first: Tensor
    last: Tensor

    @cached_property
    def tiles(self) -> tuple[tuple[int, int], ...]:
        """The range of keys (begin, end) that each tile of queries sees; one read from the device."""
        firsts, lasts = self.first.split(TILE, dim=1), self.last.split(TILE, dim=1)
        bounds = torch.stack([torch.stack((a.min(), b.max() + 1)) for a, b in zip(firsts, lasts, strict=True)])
        return tuple((low, high) for low, high in bounds.tolist())
