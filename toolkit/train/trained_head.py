"""The module that training optimizes: a draft head whose forward is the unroll with its loss.

Shapes: B sequences, L positions, K steps, M teacher rows, S supervised rows of a step, N those of all steps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from toolkit.data.batches import on_device
from toolkit.head_kinds import HEAD_KINDS
from toolkit.heads.draft_head import DraftHead, Project
from toolkit.heads.dspark import DSparkHead
from toolkit.recipe_fields import LossName
from toolkit.train.block_unroll import unroll_blocks
from toolkit.train.loss import DraftLoss, best_tokens
from toolkit.train.supervision import Supervision
from toolkit.train.teacher import SharedMatrix, TeacherRows
from toolkit.train.ttt import unroll


class TrainedHead(nn.Module):
    """A head with the steps of training-time test. `step_weights` are those of its steps; `loss` names the loss.

    output: the output matrix for a head without one of its own. The loss of a row is token_weight times the named loss
    plus feature_weight times the smooth L1 distance (mean over H) of the head's normed state to the target's last
    hidden state of the next position (EAGLE, arXiv 2401.15077, section 4.2). A block drafter has one more loss, which
    trains its confidence alone: the cross-entropy of whether its argmax is the right token.
    """

    def __init__(
        self,
        head: DraftHead,
        step_decay: float,
        loss: LossName = "soft_cross_entropy",
        *,
        output: SharedMatrix | None = None,
        token_weight: float = 1.0,
        feature_weight: float = 0.0,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.head = head
        assert (output is None) == head.config.own_vocabulary, "a head has its own output matrix or the target's"
        self.output = output
        self.step_decay = step_decay
        self.loss = loss
        self.token_weight, self.feature_weight = token_weight, feature_weight
        self.checkpointing = checkpointing

    def forward(
        self,
        aux: torch.Tensor,
        embeds: torch.Tensor,
        supervision: Supervision,
        teacher: TeacherRows | None = None,
        draft_choice: torch.Tensor | None = None,
        denominators: torch.Tensor | None = None,
        before: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Unroll the head, and compute loss and hits.

        draft_choice [M]: the right token as a draft id (the teacher's argmax, or the rollout's token), -1 if the draft
        vocabulary lacks it. denominators [K]: on the host. before [M]: the tokens at the teacher's positions, before
        the predicted ones; only a block drafter needs them. The loss is sum_k weight_k * (sum of row losses) /
        denominators[k]; without a teacher it is 0, and only the hits are computed.
        Returns (loss, loss by step [K], hits by step: K tensors [S] bool, whether the head's argmax is right).
        """
        assert draft_choice is not None, "hits need the right tokens"
        count, block = len(supervision.roots), self.head if isinstance(self.head, DSparkHead) else None
        inputs = aux, embeds, count, supervision.starts, supervision.anchors
        if block is None:
            steps = unroll(self.head, *inputs, checkpointing=self.checkpointing)
        else:
            steps = unroll_blocks(block, *inputs, checkpointing=self.checkpointing)
        each = [hidden.flatten(0, 1)[roots] for hidden, roots in zip(steps, supervision.roots, strict=True)]
        states = torch.cat(each)
        rows, counts = torch.cat(supervision.rows), [len(roots) for roots in supervision.roots]
        planned = supervision.planned or supervision
        choice = draft_choice[rows]
        if block is not None:  # the token before the predicted one is that of the teacher's row
            assert before is not None, "a block drafter needs them"
            states = block.after(states, before[rows])
        if teacher is None:
            best = self.score(states, best_tokens)
            return embeds.new_zeros(()), embeds.new_zeros(count), list((best == choice).split(counts))
        assert denominators is not None, "a loss needs its denominators"
        kept = teacher.kept[rows]
        weights = step_weights(self.head.config.kind, self.step_decay, count) / denominators
        factor = on_device(torch.repeat_interleave(weights, torch.tensor(counts)), kept.device)
        if supervision.shares is not None:
            factor = factor * torch.cat(supervision.shares)
        task = DraftLoss(self.loss, teacher, torch.cat(planned.rows), choice, self.token_weight * factor * kept)
        loss, losses, best = self.score(states, task)
        losses = self.token_weight * losses * kept
        if self.feature_weight:
            distances = self.feature_weight * _distances(self.head.normed(states), teacher.states[rows])
            loss = loss + (factor * distances).sum()
            losses = losses + distances.detach()
        odds = None if block is None else block.confident(states)
        if odds is not None:
            right = (best == choice).float()
            loss = loss + (factor * F.binary_cross_entropy_with_logits(odds.float(), right, reduction="none")).sum()
        if supervision.shares is not None:
            losses = losses * torch.cat(supervision.shares)
        by_step = torch.stack([part.sum() for part in losses.split(counts)]) / on_device(denominators, kept.device)
        return loss, by_step, list((best == choice).split(counts))

    def score(self, states: torch.Tensor, project: Project) -> Any:
        """`project` of states [N, H], as the unroll yields them, with the output matrix."""
        if self.output is None:
            return self.head.logits(states, project)
        return self.output.score(states, self.head.extended(project))


def step_weights(kind: str, decay: float, count: int) -> torch.Tensor:
    """The weights [count] of the losses of `count` steps: decay^k; for MTP divided by their sum (FastMTP, arXiv
    2509.18362, equation 2)."""
    weights = decay ** torch.arange(count)
    return weights / weights.sum() if HEAD_KINDS[kind].normalised_steps else weights


def _distances(states: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Smooth L1 distance of each row, [N] fp32, from [N, H] and [N, H]."""
    return F.smooth_l1_loss(states.float(), features.float(), reduction="none").mean(-1)
