"""The module that the optimiser sees: a head, and the unroll with its loss as forward.

Shapes: B sequences, L positions, K steps, M teacher rows, S supervised rows of a step, N those of all steps.
"""

from __future__ import annotations

import torch
from torch import nn

from toolkit.models.eagle3 import Eagle3Head
from toolkit.recipe import LossName
from toolkit.train.loss import DraftLoss, best_tokens
from toolkit.train.supervision import Supervision
from toolkit.train.teacher import TeacherRows
from toolkit.train.ttt import unroll


class TrainedHead(nn.Module):
    """A head with K steps of training-time test, step k weighing step_decay^k, scored by the loss of this name."""

    def __init__(self, head: Eagle3Head, steps: int, step_decay: float, loss: LossName = "soft_cross_entropy") -> None:
        super().__init__()
        self.head = head
        self.steps = steps
        self.step_decay = step_decay
        self.loss = loss

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
        assert draft_choice is not None, "hits need the right tokens"
        unrolled = unroll(self.head, aux, embeds, self.steps)
        states = [hidden.flatten(0, 1)[roots] for hidden, roots in zip(unrolled, supervision.roots, strict=True)]
        rows, counts = torch.cat(supervision.rows), [len(roots) for roots in supervision.roots]
        choice = draft_choice[rows]
        if teacher is None:
            best = self.head.logits(torch.cat(states), best_tokens)
            return embeds.new_zeros(()), embeds.new_zeros(self.steps), list((best == choice).split(counts))
        assert denominators is not None, "a loss needs its denominators"
        kept = teacher.kept[rows]
        weights = self.step_decay ** torch.arange(self.steps, device=kept.device) / denominators
        factor = torch.repeat_interleave(weights, torch.tensor(counts, device=kept.device), output_size=len(rows))
        factor = factor * kept
        task = DraftLoss(self.loss, teacher, rows, choice, factor)
        loss, losses, best = self.head.logits(torch.cat(states), task)
        by_step = torch.stack([part.sum() for part in (losses * kept).split(counts)]) / denominators
        return loss, by_step, list((best == choice).split(counts))
