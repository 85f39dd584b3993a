"""Which predictions of an unroll are supervised, and by which of the teacher's rows.

Shapes: B sequences, L positions, K steps, M teacher rows, S supervised rows of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from toolkit.data.batches import supervised_mask


@dataclass(frozen=True)
class Supervision:
    """Which roots are supervised at each step, and the teacher row of each.

    roots[k] [S] index the flat [B*L] positions; rows[k] [S] index the teacher's M rows, which stand for the flat
    positions `teacher_positions` [M]. starts [B, L]: as `Batch` has them.
    """

    teacher_positions: torch.Tensor
    roots: list[torch.Tensor]
    rows: list[torch.Tensor]
    starts: torch.Tensor | None = None

    @property
    def counts(self) -> torch.Tensor:
        """Supervised tokens by step, [K] float."""
        return torch.tensor([float(len(roots)) for roots in self.roots])


def plan_supervision(
    response: torch.Tensor, lengths: torch.Tensor, steps: int, shift: int = 0, starts: torch.Tensor | None = None
) -> Supervision:
    """Supervised roots of a batch: response [B, L] bool, lengths [B], starts [B, L].

    Root t of step k predicts token i+1 from position i = t+1+k, so one teacher row per position i serves all steps.
    """
    masks = [supervised_mask(response, step, shift, lengths, starts).flatten() for step in range(steps)]
    flat = [mask.nonzero().squeeze(-1) for mask in masks]
    # Roots of step 0 reach every position that a later step predicts from.
    positions = flat[0] + 1
    row_of = torch.full((response.numel() + steps,), -1, dtype=torch.long, device=response.device)
    row_of[positions] = torch.arange(len(positions), device=response.device)
    return Supervision(positions, flat, [row_of[roots + 1 + step] for step, roots in enumerate(flat)], starts)
