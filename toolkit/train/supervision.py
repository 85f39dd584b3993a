"""Which predictions of an unroll are supervised, and by which of the teacher's rows.

Shapes: B sequences, L positions, K steps, M teacher rows, S supervised rows of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from toolkit.data.batches import Batch, supervised_mask
from toolkit.tokenmap.token_map import TokenMap


@dataclass(frozen=True)
class Supervision:
    """Which roots are supervised at each step, and the teacher row of each.

    roots[k] [S] index the flat [B*L] positions; rows[k] [S] index the teacher's M rows, which stand for the flat
    positions `teacher_positions` [M]. starts [B, L]: as `Batch` has them.

    anchors [B, N]: the roots whose later steps are unrolled (see `anchored`); of those steps roots[k] index the flat
    [B*N] anchors, and shares[k] [S] say for how many roots each stands. full: the steps before those.
    """

    teacher_positions: torch.Tensor
    roots: list[torch.Tensor]
    rows: list[torch.Tensor]
    starts: torch.Tensor | None = None
    anchors: torch.Tensor | None = None
    shares: list[torch.Tensor] | None = None
    full: int | None = None

    @property
    def counts(self) -> torch.Tensor:
        """Supervised tokens by step, [K] float."""
        return torch.tensor([float(len(roots)) for roots in self.roots])

    def flat_roots(self, length: int) -> list[torch.Tensor]:
        """roots[k] as flat positions at every step, those of anchors too; rows have `length` positions."""
        if self.anchors is None or self.full is None:
            return self.roots
        rows = torch.arange(len(self.anchors), device=self.anchors.device)[:, None]
        place = (self.anchors + rows * length).flatten()
        return [roots if step < self.full else place[roots] for step, roots in enumerate(self.roots)]


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


def anchored(supervision: Supervision, shape: torch.Size, full: int, count: int, seed: int) -> Supervision:
    """The same supervision with steps from `full` on at `count` drawn roots of each row [B, L] alone, or at all it has.

    Each anchor stands for as many of its row's roots as are supervised there for one drawn, so that the expected loss
    is that of all roots. The draw depends on `seed` and the roots alone.
    """
    if full >= len(supervision.roots):
        return supervision
    device, (batch, length) = supervision.teacher_positions.device, shape
    candidates = torch.zeros(batch * length, dtype=torch.bool, device=device)
    candidates[torch.cat(supervision.roots[full:])] = True
    candidates = candidates.view(batch, length)
    found = candidates.sum(1)
    count = min(count, max(1, int(found.max())))
    drawn = torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)).to(device)
    anchors = drawn.masked_fill(~candidates, -1.0).topk(count, dim=1).indices.sort(dim=1).values
    flat = (anchors + torch.arange(batch, device=device)[:, None] * length).flatten()
    slot = torch.full((batch * length,), -1, dtype=torch.long, device=device)
    slot[flat] = torch.arange(len(flat), device=device)
    share = found / found.clamp(min=1, max=count)
    roots, rows = list(supervision.roots[:full]), list(supervision.rows[:full])
    shares = [torch.ones(len(one), device=device) for one in roots]
    for old, row in zip(supervision.roots[full:], supervision.rows[full:], strict=True):
        kept = slot[old] >= 0
        roots.append(slot[old[kept]])
        rows.append(row[kept])
        shares.append(share[old[kept] // length])
    return Supervision(supervision.teacher_positions, roots, rows, supervision.starts, anchors, shares, full)


def covered_share(batch: Batch, token_map: TokenMap, shift: int = 0) -> float:
    """Share of a batch's supervised tokens that the draft vocabulary has: no head can draft the others. 1 without any.

    Each token counts once, as the prediction of step 0.
    """
    roots = supervised_mask(batch.response, 0, shift, batch.lengths)
    tokens = batch.input_ids[:, 2:][roots[:, :-2]]
    return float(token_map.t2d[tokens].float().mean()) if len(tokens) else 1.0
