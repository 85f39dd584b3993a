"""Plans which predictions of an unroll are supervised, and by which teacher rows.

Shapes: B sequences, L positions, K steps, M teacher rows, S supervised rows of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from toolkit.data.batches import Batch, on_device, supervised_mask
from toolkit.tokenmap.token_map import TokenMap


@dataclass(frozen=True)
class Supervision:
    """The supervised roots of each step, and the teacher row of each.

    roots[k] [S]: indices into the flat [B*L] positions. rows[k] [S]: indices into the M teacher rows, which belong to
    the flat positions `teacher_positions` [M]. starts [B, L]: as in `Batch`.

    anchors [B, N]: the only roots that are unrolled after the first `full` steps (see `anchored`). In these later steps
    roots[k] are indices into the flat [B*N] anchors. shares[k] [S]: the number of roots that each root represents.

    planned: the same on the device that it was planned on, the host: reading it does not wait for a GPU.
    """

    teacher_positions: torch.Tensor
    roots: list[torch.Tensor]
    rows: list[torch.Tensor]
    starts: torch.Tensor | None = None
    anchors: torch.Tensor | None = None
    shares: list[torch.Tensor] | None = None
    full: int | None = None
    planned: Supervision | None = None

    def to(self, device: torch.device) -> Supervision:
        """The same on another device, without waiting for it; `planned` is this one."""

        def each(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return [on_device(one, device) for one in tensors]

        starts, anchors = (None if x is None else on_device(x, device) for x in (self.starts, self.anchors))
        shares = None if self.shares is None else each(self.shares)
        positions = on_device(self.teacher_positions, device)
        return Supervision(positions, each(self.roots), each(self.rows), starts, anchors, shares, self.full, self)

    @property
    def counts(self) -> torch.Tensor:
        """Supervised tokens by step, [K] float."""
        return torch.tensor([float(len(roots)) for roots in self.roots])

    def flat_roots(self, length: int) -> list[torch.Tensor]:
        """roots[k] as flat positions at every step, also at the steps of anchors. length: positions of a row."""
        if self.anchors is None or self.full is None:
            return self.roots
        rows = torch.arange(len(self.anchors), device=self.anchors.device)[:, None]
        place = (self.anchors + rows * length).flatten()
        return [roots if step < self.full else place[roots] for step, roots in enumerate(self.roots)]


def plan_supervision(
    response: torch.Tensor, lengths: torch.Tensor, steps: int, shift: int = 0, starts: torch.Tensor | None = None
) -> Supervision:
    """The supervision of a batch: response [B, L] bool, lengths [B], starts [B, L].

    Root t of step k predicts token i+1 at position i = t+1+k, so one teacher row for position i serves all steps.
    """
    masks = [supervised_mask(response, step, shift, lengths, starts).flatten() for step in range(steps)]
    flat = [mask.nonzero().squeeze(-1) for mask in masks]
    # The roots of step 0 include every position that a later step predicts from.
    positions = flat[0] + 1
    row_of = torch.full((response.numel() + steps,), -1, dtype=torch.long, device=response.device)
    row_of[positions] = torch.arange(len(positions), device=response.device)
    return Supervision(positions, flat, [row_of[roots + 1 + step] for step, roots in enumerate(flat)], starts)


def anchored(supervision: Supervision, shape: torch.Size, full: int, count: int, seed: int) -> Supervision:
    """The same supervision with only `count` drawn roots of each row [B, L] in the steps from `full` on; all roots of a
    row that has no more.

    Each anchor is weighted by (supervised roots of its row) / (anchors of its row), so that the expected loss equals
    that of all roots. The draw depends only on `seed` and the roots.
    """
    if full >= len(supervision.roots):
        return supervision
    device, (batch, length) = supervision.teacher_positions.device, shape
    eligible = torch.zeros(batch * length, dtype=torch.bool, device=device)
    eligible[torch.cat(supervision.roots[full:])] = True
    eligible = eligible.view(batch, length)
    found = eligible.sum(1)
    count = min(count, max(1, int(found.max())))
    drawn = torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)).to(device)
    anchors = drawn.masked_fill(~eligible, -1.0).topk(count, dim=1).indices.sort(dim=1).values
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
    """Share of a batch's supervised tokens that are in the draft vocabulary; the head cannot draft the others.

    Each token counts once, as the prediction of step 0. 1 without supervised tokens.
    """
    roots = supervised_mask(batch.response, 0, shift, batch.lengths)
    tokens = batch.input_ids[:, 2:][roots[:, :-2]]
    return float(token_map.t2d[tokens].float().mean()) if len(tokens) else 1.0
