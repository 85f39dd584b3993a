"""One training step and one forecast: the target's forward, the teacher's rows, the unroll.

Shapes: B sequences, L positions, H hidden size, K steps, M teacher rows.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from toolkit.data.batches import Batch
from toolkit.targets.features import AuxCapture, LastCapture
from toolkit.targets.load import Target
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.features import FeatureSource, OnlineFeatures
from toolkit.train.forecast import Forecast, chain_depths, chained_counts, replay, summarise_replays
from toolkit.train.step_clock import StepClock
from toolkit.train.supervision import Supervision, anchored, plan_supervision
from toolkit.train.teacher import Teacher


@dataclass(frozen=True)
class UnrollInputs:
    """What the trained head is handed for one micro-batch; see `TrainedHead.forward`. aux: the features it reads.

    written [M]: the ids that follow the teacher's positions; greedy [M]: those that are the target's argmax.
    """

    aux: torch.Tensor
    embeds: torch.Tensor
    supervision: Supervision
    teacher_hidden: torch.Tensor
    written: torch.Tensor
    greedy: torch.Tensor | None


@dataclass(frozen=True)
class Anchors:
    """count roots of a row, drawn by `seed`, are unrolled beyond the first `full` steps, which all roots take."""

    count: int
    full: int
    seed: int

    def of(self, supervision: Supervision, shape: torch.Size) -> Supervision:
        return anchored(supervision, shape, self.full, self.count, self.seed)


class TargetSide:
    """Everything that runs on the frozen target for a batch: features, embeddings, teacher.

    aux_layer_ids: the layers whose states the head reads side by side; None: it reads the last state, final-normed.
    features: where they come from; None: the target's forward.
    """

    def __init__(
        self,
        target: Target,
        token_map: TokenMap,
        aux_layer_ids: tuple[int, ...] | None,
        precision: str,
        features: FeatureSource | None = None,
    ) -> None:
        self.target = target
        self.token_map = token_map
        self.capture = LastCapture(target) if aux_layer_ids is None else AuxCapture(target, aux_layer_ids)
        self.features = OnlineFeatures(target, self.capture) if features is None else features
        self.teacher = Teacher(target, token_map)
        self.head_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]

    def online(self) -> TargetSide:
        """The same with the target's own forward: for texts of which nothing is stored."""
        other = copy.copy(self)
        other.features = OnlineFeatures(self.target, self.capture)
        return other

    def inputs(self, batch: Batch, steps: int, shift: int = 0) -> UnrollInputs:
        """What `batch` needs of the target; the features come in the head's dtype."""
        features = self.features(batch)
        batch = batch.to(self.target.device)
        supervision = plan_supervision(batch.response, batch.lengths, steps, shift, batch.starts)
        with torch.no_grad():
            embeds = self.target.embed_tokens(batch.input_ids)
        return UnrollInputs(
            aux=features.aux.to(self.head_dtype),
            embeds=embeds.to(self.head_dtype),
            supervision=supervision,
            teacher_hidden=features.last.flatten(0, 1)[supervision.teacher_positions],
            written=batch.input_ids.flatten()[supervision.teacher_positions + 1],
            greedy=None if batch.greedy is None else batch.greedy.flatten()[supervision.teacher_positions + 1],
        )


class MicroStep(NamedTuple):
    """Of one micro-batch: the loss to differentiate, and by depth [K] the losses, right predictions, and of the chains
    that were right so far those looked at (reached) and those right here too (passed)."""

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
    shift: int,
    anchors: Anchors | None = None,
    clock: StepClock | None = None,
) -> MicroStep:
    """Forward of one micro-batch.

    denominators [K]: supervised tokens of the whole global batch, so that micro-batches and processes add up to the
    mean over all of them. anchors: which roots later steps are unrolled from; None: all. Right predictions of some
    roots stand for those of all; chains are counted as drawn. clock: told of the parts "target" and "head".
    """
    clock = clock or StepClock(side.target.device)
    with clock.part("target"):
        inputs = side.inputs(batch, steps, shift)
        if anchors is not None:
            inputs = replace(inputs, supervision=anchors.of(inputs.supervision, batch.response.shape))
        rows = side.teacher(inputs.teacher_hidden, inputs.written, inputs.greedy)
        draft_choice = side.token_map.to_draft(rows.choice)
    with clock.part("head"):
        loss, by_step, hits = model(
            inputs.aux, inputs.embeds, inputs.supervision, rows, draft_choice, denominators.to(inputs.aux.device)
        )
    flat = inputs.supervision.flat_roots(batch.response.shape[1])
    reached, passed = chained_counts(hits, flat, batch.response.numel())
    if inputs.supervision.shares is not None:
        hits = [hit * share for hit, share in zip(hits, inputs.supervision.shares, strict=True)]
    return MicroStep(loss, by_step, torch.stack([hit.sum() for hit in hits]).float(), reached, passed)


@torch.no_grad()
def forecast_accept_length(model: torch.nn.Module, side: TargetSide, batches: Sequence[Batch], steps: int) -> Forecast:
    """Forecast accept_length of a chain of `steps` on held-out rollouts (see `forecast.py`)."""
    return summarise_replays(replayed_steps(model, side, batches, steps), steps)


@torch.no_grad()
def replayed_steps(
    model: torch.nn.Module, side: TargetSide, batches: Sequence[Batch], steps: int, levels: int | None = None
) -> list[list[int]]:
    """Accepted drafts of every verify step the engine would count, rollout by rollout, with a chain of `levels` (None:
    as many as the unroll's steps).

    A draft counts as right when it is the rollout's own next token, which is what the engine compares it with.
    """
    replays: list[list[int]] = []
    for batch in batches:
        inputs = side.inputs(batch, steps)
        draft_choice = side.token_map.to_draft(inputs.written)
        _, _, hits = model(inputs.aux, inputs.embeds, inputs.supervision, None, draft_choice, None)
        depth = chain_depths(hits, inputs.supervision.roots, batch.response.numel()).clamp(max=levels or steps)
        depth = depth.view(batch.response.shape)
        for row in range(len(depth)):
            replays.append(replay(depth[row].tolist(), batch.response[row].tolist()))
    return replays


def supervised_counts(batch: Batch, steps: int, shift: int) -> torch.Tensor:
    """Supervised tokens by step [K] of a batch, without running anything."""
    return plan_supervision(batch.response, batch.lengths, steps, shift, batch.starts).counts
