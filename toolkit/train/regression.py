"""Ridge regression from its moments, with the penalty chosen on positions that took no part in the fit.

Shapes: P positions, C columns of x, H columns of y.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Relative to the variance of a column, once all columns have variance 1.
RIDGES = tuple(10.0 ** (exponent / 2) for exponent in range(-8, 3))


@dataclass
class Moments:
    """Sums over positions, in float64: gram [C, C], cross [C, H], and square and total [H] of y."""

    gram: torch.Tensor
    cross: torch.Tensor
    square: torch.Tensor
    total: torch.Tensor
    positions: int = 0

    @classmethod
    def empty(cls, columns: int, width: int, device: torch.device) -> Moments:
        sizes = ((columns, columns), (columns, width), (width,), (width,))
        return cls(*(torch.zeros(*size, dtype=torch.float64, device=device) for size in sizes))

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Count x [P, C] and y [P, H] (fp32) in."""
        self.gram += (x.T @ x).double()
        self.cross += (x.T @ y).double()
        self.square += (y.double() ** 2).sum(0)
        self.total += y.double().sum(0)
        self.positions += len(x)

    def __add__(self, other: Moments) -> Moments:
        names = ("gram", "cross", "square", "total", "positions")
        return Moments(*(getattr(self, name) + getattr(other, name) for name in names))

    def r2(self, weight: torch.Tensor) -> float:
        """Share of y's variance over these positions that x @ weight [C, H] explains."""
        residual = self.square.sum() - 2 * (weight * self.cross).sum() + (weight * (self.gram @ weight)).sum()
        spread = self.square.sum() - (self.total**2).sum() / max(self.positions, 1)
        return float(1.0 - residual / spread.clamp(min=1e-12))


def ridge_regression(fit: Moments, check: Moments) -> tuple[torch.Tensor, float]:
    """Weight [C, H] fitted on all positions, with the penalty under which `fit` explains `check` best, and that R2.

    A few thousand columns fitted to a few ten thousand positions explain those far better than any others, and a head
    that starts from such a fit looks good on its training data only.
    """
    weights = ((ridge, _solve(fit, ridge)) for ridge in RIDGES)
    r2, ridge = max((check.r2(weight), ridge) for ridge, weight in weights)
    return _solve(fit + check, ridge), r2


def _solve(moments: Moments, ridge: float) -> torch.Tensor:
    """Columns are brought to variance 1 first: hidden states have channels a hundred times louder than others."""
    count = max(moments.positions, 1)
    scale = (moments.gram.diagonal() / count).sqrt().clamp(min=1e-6)
    gram = moments.gram / count / scale[:, None] / scale[None, :]
    gram.diagonal().add_(ridge)
    return torch.linalg.solve(gram, moments.cross / count / scale[:, None]) / scale[:, None]
