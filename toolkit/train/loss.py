"""The loss of the unrolled head: soft cross-entropy on the draft vocabulary (EAGLE-3), exactly masked.

Shapes: B sequences, L positions, K steps, M teacher rows, S supervised rows of a step, D draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from toolkit.data.batches import supervised_mask
from toolkit.models.eagle3 import Eagle3Head
from toolkit.train.teacher import TeacherRows
from toolkit.train.ttt import unroll

# A tile of fp32 rows (8,192 wide: 2 MB) should stay in a core's cache from the first op to the last.
TILE_ROWS = 64


@dataclass(frozen=True)
class Supervision:
    """Which roots are supervised at each step, and the teacher row of each.

    roots[k] [S] index the flat [B*L] positions; rows[k] [S] index the teacher's M rows, which stand for the flat
    positions `teacher_positions` [M].
    """

    teacher_positions: torch.Tensor
    roots: list[torch.Tensor]
    rows: list[torch.Tensor]

    @property
    def counts(self) -> torch.Tensor:
        """Supervised tokens by step, [K] float."""
        return torch.tensor([float(len(roots)) for roots in self.roots])


def plan_supervision(response: torch.Tensor, lengths: torch.Tensor, steps: int, shift: int = 0) -> Supervision:
    """Supervised roots of a batch: response [B, L] bool, lengths [B].

    Root t of step k predicts token i+1 from position i = t+1+k, so one teacher row per position i serves all steps.
    """
    masks = [supervised_mask(response, step, shift, lengths).flatten() for step in range(steps)]
    flat = [mask.nonzero().squeeze(-1) for mask in masks]
    # Roots of step 0 reach every position that a later step predicts from.
    positions = flat[0] + 1
    row_of = torch.full((response.numel() + steps,), -1, dtype=torch.long, device=response.device)
    row_of[positions] = torch.arange(len(positions), device=response.device)
    return Supervision(positions, flat, [row_of[roots + 1 + step] for step, roots in enumerate(flat)])


class TrainedHead(nn.Module):
    """The module that the optimiser sees: a head, and the unroll as its forward."""

    def __init__(self, head: Eagle3Head, steps: int, step_decay: float) -> None:
        super().__init__()
        self.head = head
        self.steps = steps
        self.step_decay = step_decay

    def forward(
        self,
        aux: torch.Tensor,
        embeds: torch.Tensor,
        supervision: Supervision,
        teacher: TeacherRows | None = None,
        draft_choice: torch.Tensor | None = None,
        denominators: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Unroll and score.

        draft_choice [M]: the right token as a draft id (the teacher's argmax, or what the rollout has there), -1 if the
        draft vocabulary lacks it. With `teacher`, the loss sum_k decay^k * (sum of row losses) / denominators[k];
        without one it is 0 and only the hits are computed.
        Returns (loss, loss by step [K], hits by step: K tensors [S] bool, "the head's argmax is the right token").
        """
        losses, hits = [], []
        for step, hidden in enumerate(unroll(self.head, aux, embeds, self.steps)):
            rows = supervision.rows[step]
            logits = self.head.logits(hidden.flatten(0, 1)[supervision.roots[step]])
            if teacher is None:
                best = logits.max(-1).indices
            else:
                loss, best = soft_cross_entropy(logits, _of_rows(teacher.probs, rows), teacher.kept[rows])
                losses.append(loss / denominators[step])
            hits.append(best == draft_choice[rows])
        if teacher is None:
            return embeds.new_zeros(()), embeds.new_zeros(self.steps), hits
        by_step = torch.stack(losses)
        weights = self.step_decay ** torch.arange(self.steps, device=by_step.device)
        return (weights * by_step).sum(), by_step.detach(), hits


def _of_rows(probs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """probs[rows]. Rows come in order, so as many as there are means all of them: no copy of [M, D]."""
    return probs if len(rows) == len(probs) else probs[rows]


class _TiledSoftCrossEntropy(torch.autograd.Function):
    """Loss, gradient and argmax in one visit of the logits, a few rows at a time.

    Written with plain ops the loss walks a dozen times over [S, D] in fp32, which on a CPU costs more than the matrix
    products around it. With sum(p) = 1 a row's loss is logsumexp(z) - p.z and its gradient softmax(z) - p.
    """

    @staticmethod
    def forward(ctx, logits, probs, kept):
        gradient = torch.empty_like(logits)
        best = torch.empty(len(logits), dtype=torch.long, device=logits.device)
        loss = torch.zeros((), dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
        for start in range(0, len(logits), TILE_ROWS):
            tile = slice(start, start + TILE_ROWS)
            z = logits[tile].to(loss.dtype, copy=True)
            p, weight = probs[tile], kept[tile].to(loss.dtype)
            top, best[tile] = z.max(dim=-1)
            z -= top[:, None]
            dot = torch.linalg.vecdot(p.to(z.dtype), z)
            total = z.exp_().sum(-1)
            loss += ((total.log() - dot) * weight).sum()
            gradient[tile] = z.mul_((weight / total)[:, None]).addcmul_(p, weight[:, None], value=-1)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(best)
        return loss, best

    @staticmethod
    def backward(ctx, loss_gradient, _):
        (gradient,) = ctx.saved_tensors
        scaled = torch.empty_like(gradient)
        # One dimension: a scalar would be rounded to the gradient's dtype before it multiplies.
        scale = loss_gradient.reshape(1)
        for start in range(0, len(gradient), TILE_ROWS):
            tile = slice(start, start + TILE_ROWS)
            torch.mul(gradient[tile], scale, out=scaled[tile])
        return scaled, None, None


def soft_cross_entropy(
    logits: torch.Tensor, probs: torch.Tensor, kept: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """-sum over kept rows of sum_v p(v) log q(v), scalar fp32, and the argmax of every row [S].

    logits [S, D] in any dtype, probs [S, D] rows that sum to 1 (no gradient), kept [S] bool.
    """
    return _TiledSoftCrossEntropy.apply(logits, probs, kept)
