"""One training step and one forecast: the head's unroll with its loss, and which drafts are right.

A forecast of accept_length needs neither the engine nor decoding. The verified output is the held-out rollout itself
(at any temperature, because the target's draws depend only on seed and position). So one unroll shows which drafts of a
chain of K are right at every position. Replaying the jumps t -> t + accepted + 1 gives the verify steps of the engine.
accept_length counts the bonus token; steps that the answer's end cuts short are left out.

Shapes: B sequences, L positions, H hidden size, K steps, M teacher rows, S supervised rows of a step, N those of all
steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from toolkit.bench.bootstrap import Forecast, summarise_replays
from toolkit.data.batches import Batch, on_device
from toolkit.heads.draft_head import DraftHead, Project
from toolkit.heads.dspark import DSparkHead
from toolkit.recipe_fields import LossName
from toolkit.train.loss import DraftLoss, best_tokens, step_weights
from toolkit.train.metrics import StepClock
from toolkit.train.target_side import (
    Anchors,
    SharedMatrix,
    Supervision,
    TargetSide,
    TeacherRows,
    plan_supervision,
)
from toolkit.train.ttt import unroll, unroll_blocks


def supervised_counts(batch: Batch, steps: int) -> torch.Tensor:
    """Supervised tokens by step [K] of a batch; computed from the masks alone."""
    return plan_supervision(batch.response, steps, batch.starts).counts


class MicroStep(NamedTuple):
    """The scalar loss of one micro-batch, and by step [K]: losses, right predictions, the supervised chains whose
    earlier predictions are all right (reached), and those of them that are right at this step too (passed)."""

    loss: torch.Tensor
    by_step: torch.Tensor
    right: torch.Tensor
    reached: torch.Tensor
    passed: torch.Tensor


def micro_step(
    model: torch.nn.Module,
    side: TargetSide,
    batch: Batch,
    denominators: torch.Tensor,
    steps: int,
    anchors: Anchors | None = None,
    clock: StepClock | None = None,
) -> MicroStep:
    """Forward of one micro-batch.

    denominators [K]: supervised tokens of the global batch, so that the losses of micro-batches and processes sum to
    the mean over the global batch. anchors: draws the roots of the later steps; None: all roots. With anchors, right
    predictions are weighted up to all roots, but reached and passed count the drawn chains. clock: measures the parts
    "target" and "head".
    """
    clock = clock or StepClock(side.target.device)
    with clock.part("target"):
        inputs = side.inputs(batch, steps, anchors, side.split)
        rows = side.teacher(inputs.teacher_hidden, inputs.labels, inputs.greedy)
        draft_choice = side.token_map.to_draft(rows.choice)
    with clock.part("head"):
        loss, by_step, correct = model(
            inputs.aux,
            inputs.embeds,
            inputs.supervision,
            rows,
            draft_choice,
            denominators,
            inputs.before,
        )
    count, length = inputs.aux.shape[:2]
    reached, passed = chained_counts(correct, inputs.supervision.flat_roots(length), count * length)
    if inputs.supervision.shares is not None:
        correct = [right * share for right, share in zip(correct, inputs.supervision.shares, strict=True)]
    return MicroStep(loss, by_step, torch.stack([right.sum() for right in correct]).float(), reached, passed)


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
        """Unroll the head, and compute loss and correct.

        draft_choice [M]: the right token as a draft id (the teacher's argmax, or the rollout's token), -1 if the draft
        vocabulary lacks it. denominators [K]: on the host. before [M]: the tokens at the teacher's positions, before
        the predicted ones; only a block drafter needs them. The loss is sum_k weight_k * (sum of row losses) /
        denominators[k]; without a teacher it is 0, and only the correct are computed.
        Returns (loss, loss by step [K], correct by step: K tensors [S] bool, whether the head's argmax is right).
        """
        assert draft_choice is not None, "correct need the right tokens"
        count, block = len(supervision.roots), self.head if isinstance(self.head, DSparkHead) else None
        inputs = aux, embeds, count, supervision.starts, supervision.anchors
        how: Any = {"checkpointing": self.checkpointing, "part": supervision.part}
        steps = unroll(self.head, *inputs, **how) if block is None else unroll_blocks(block, *inputs, **how)
        each = [hidden.flatten(0, 1)[roots] for hidden, roots in zip(steps, supervision.roots, strict=True)]
        states = torch.cat(each)
        rows, counts = torch.cat(supervision.rows), [len(roots) for roots in supervision.roots]
        planned = supervision.planned or supervision
        choice = draft_choice[rows]
        if block is not None:  # the token before the predicted one is that of the teacher's row
            assert before is not None, "a block drafter needs them"
            places = supervision.teacher_positions[rows]
            states = block.after(states, before[rows], lambda _tokens: embeds.flatten(0, 1)[places])
        if teacher is None:
            best = self.score(states, best_tokens)
            return embeds.new_zeros(()), embeds.new_zeros(count), list((best == choice).split(counts))
        assert denominators is not None, "a loss needs its denominators"
        in_vocab = teacher.in_draft_vocab[rows]
        weights = step_weights(self.head.config.kind, self.step_decay, count) / denominators
        factor = on_device(torch.repeat_interleave(weights, torch.tensor(counts)), in_vocab.device)
        if supervision.shares is not None:
            factor = factor * torch.cat(supervision.shares)
        task = DraftLoss(self.loss, teacher, torch.cat(planned.rows), choice, self.token_weight * factor * in_vocab)
        loss, losses, best = self.score(states, task)
        losses = self.token_weight * losses * in_vocab
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
        by_step = torch.stack([part.sum() for part in losses.split(counts)]) / on_device(denominators, in_vocab.device)
        return loss, by_step, list((best == choice).split(counts))

    def score(self, states: torch.Tensor, project: Project) -> Any:
        """`project` of states [N, H], as the unroll yields them, with the output matrix."""
        if self.output is None:
            return self.head.logits(states, project)
        return self.output.score(states, self.head.extended(project))


def _distances(states: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Smooth L1 distance of each row, [N] fp32, from [N, H] and [N, H]."""
    return F.smooth_l1_loss(states.float(), features.float(), reduction="none").mean(-1)


@torch.no_grad()
def forecast_accept_length(model: torch.nn.Module, side: TargetSide, batches: Sequence[Batch], steps: int) -> Forecast:
    """Forecast accept_length of a chain of `steps` on held-out rollouts."""
    return summarise_replays(replayed_steps(model, side, batches, steps), steps)


@torch.no_grad()
def replayed_steps(model: torch.nn.Module, side: TargetSide, batches: Sequence[Batch], steps: int) -> list[list[int]]:
    """Accepted drafts of every verify step that the engine would count with a chain of `steps`, a list for each
    rollout.

    A draft is right if it equals the rollout's next token, as in the engine.
    """
    replays: list[list[int]] = []
    for batch in batches:
        inputs = side.inputs(batch, steps)
        draft_choice = side.token_map.to_draft(inputs.labels)
        _, _, correct = model(inputs.aux, inputs.embeds, inputs.supervision, None, draft_choice, None, inputs.before)
        depth = chain_depths(correct, inputs.supervision.roots, batch.response.numel())
        depth = depth.cpu().view(batch.response.shape)
        for row in range(len(depth)):
            replays.append(replay(depth[row].tolist(), batch.response[row].tolist()))
    return replays


def chain_depths(correct: Sequence[torch.Tensor], roots: Sequence[torch.Tensor], positions: int) -> torch.Tensor:
    """Accepted drafts [positions] of every root: its correct before the first miss; -1 if step 0 is not supervised.

    correct[k] [S] bool: the correct of the flat positions roots[k] [S].
    """
    depth = torch.full((positions,), -1, dtype=torch.long, device=roots[0].device)
    depth[roots[0]] = 0
    for step, (right, root) in enumerate(zip(correct, roots, strict=True)):
        depth[root] += right & (depth[root] == step)
    return depth


def chained_counts(
    correct: Sequence[torch.Tensor], roots: Sequence[torch.Tensor], positions: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two counts by step [K] float: supervised chains whose earlier drafts are all right, and those of them that are
    right at this step too. A chain starts where step 0 is supervised. Arguments as of `chain_depths`."""
    depth = chain_depths(correct, roots, positions)
    reached = torch.stack([(depth[root] >= step).sum() for step, root in enumerate(roots)])
    passed = torch.stack([(depth > step).sum() for step in range(len(roots))])
    return reached.float(), passed.float()


def replay(depth: Sequence[int], response: Sequence[bool]) -> list[int]:
    """Accepted drafts of each complete verify step over the answers of one rollout.

    depth [L]: accepted drafts of a chain with root t. response [L]: response tokens. Prefill gives the first token of
    an answer, so its first root is the position before it. A step that reaches past the answer's end is left out.

        token      p   p   A0  A1  A2  A3  E
        root           t0 --accepts 1--> t0+2 ...      t0 reads A0, drafts A1, A2, ... and commits accepted + 1 of them
    """
    accepted: list[int] = []
    length = len(response)
    start = 0
    while start < length:
        if not response[start]:
            start += 1
            continue
        end = start
        while end < length and response[end]:
            end += 1
        root = start - 1
        while root >= 0 and root + 2 < end:
            right = int(depth[root])
            if root + 2 + right >= end:
                break
            accepted.append(right)
            root += right + 1
        start = end
    return accepted
