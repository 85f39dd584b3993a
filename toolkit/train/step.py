"""One training step and one forecast: the target's forward, the teacher's rows, the unroll.

Shapes: B sequences, L positions, H hidden size, K steps, M teacher rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from toolkit.bench.bootstrap import Forecast, summarise_replays
from toolkit.data.batches import Batch, on_device
from toolkit.targets.features import AuxCapture, LastCapture
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.features import OnlineFeatures, StoredFeatures
from toolkit.train.forecast import chain_depths, chained_counts, replay
from toolkit.train.step_clock import StepClock
from toolkit.train.supervision import Supervision, plan_supervision
from toolkit.train.teacher import Teacher

Anchors = Callable[[Supervision, torch.Size], Supervision]


@dataclass(frozen=True)
class UnrollInputs:
    """Inputs of `TrainedHead.forward` for one micro-batch, and what the teacher needs.

    aux [B, L, A*H]: the features that the head reads. embeds [B, L, H]. teacher_hidden [M, H]: final-normed states of
    the target. before, written [M]: the ids at the teacher's positions, and those that follow them. greedy [M] bool, on
    the batch's device: whether `written` is the target's argmax; None if unknown.
    """

    aux: torch.Tensor
    embeds: torch.Tensor
    supervision: Supervision
    teacher_hidden: torch.Tensor
    before: torch.Tensor
    written: torch.Tensor
    greedy: torch.Tensor | None


class TargetSide:
    """Everything that training computes with the frozen target for a batch: features, embeddings, teacher.

    aux_layer_ids: the layers whose inputs the head reads, concatenated; None: the final-normed last hidden state.
    features: the source of the features; None: the target's forward.
    """

    def __init__(
        self,
        target: Target,
        token_map: TokenMap,
        aux_layer_ids: tuple[int, ...] | None,
        precision: str,
        features: StoredFeatures | None = None,
    ) -> None:
        self.target = target
        self.token_map = token_map
        self.capture = LastCapture(target) if aux_layer_ids is None else AuxCapture(target, aux_layer_ids)
        self.features = features or OnlineFeatures(target, self.capture)
        self.teacher = Teacher(target, token_map)
        self.head_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]

    def online(self) -> TargetSide:
        """A copy that uses the target's forward, for texts without stored features."""
        other = copy.copy(self)
        other.features = OnlineFeatures(self.target, self.capture)
        return other

    def inputs(self, batch: Batch, steps: int, shift: int = 0, anchors: Anchors | None = None) -> UnrollInputs:
        """The inputs of one micro-batch; features and embeddings are in the head's dtype. anchors: of `micro_step`.

        Supervision is planned where the batch is. With a batch on the host nothing waits for the target's forward.
        """
        planned = plan_supervision(batch.response, batch.lengths, steps, shift, batch.starts)
        planned = planned if anchors is None else anchors(planned, batch.response.shape)
        greedy = None if batch.greedy is None else batch.greedy.flatten()[planned.teacher_positions + 1]
        features = self.features(batch)
        supervision, input_ids = planned.to(self.target.device), on_device(batch.input_ids, self.target.device)
        ids = input_ids.flatten()
        with torch.no_grad():
            embeds = self.target.embed_tokens(input_ids)
        return UnrollInputs(
            aux=features.aux.to(self.head_dtype),
            embeds=embeds.to(self.head_dtype),
            supervision=supervision,
            teacher_hidden=features.last.flatten(0, 1)[supervision.teacher_positions],
            before=ids[supervision.teacher_positions],
            written=ids[supervision.teacher_positions + 1],
            greedy=greedy,
        )


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
    shift: int,
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
        inputs = side.inputs(batch, steps, shift, anchors)
        rows = side.teacher(inputs.teacher_hidden, inputs.written, inputs.greedy)
        draft_choice = side.token_map.to_draft(rows.choice)
    with clock.part("head"):
        loss, by_step, hits = model(
            inputs.aux,
            inputs.embeds,
            inputs.supervision,
            rows,
            draft_choice,
            denominators,
            inputs.before,
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
    """Accepted drafts of every verify step that the engine would count, a list for each rollout, with a chain of
    `levels` (None: `steps`).

    A draft is right if it equals the rollout's next token, as in the engine.
    """
    replays: list[list[int]] = []
    for batch in batches:
        inputs = side.inputs(batch, steps)
        draft_choice = side.token_map.to_draft(inputs.written)
        _, _, hits = model(inputs.aux, inputs.embeds, inputs.supervision, None, draft_choice, None, inputs.before)
        depth = chain_depths(hits, inputs.supervision.roots, batch.response.numel()).clamp(max=levels or steps)
        depth = depth.cpu().view(batch.response.shape)
        for row in range(len(depth)):
            replays.append(replay(depth[row].tolist(), batch.response[row].tolist()))
    return replays


def supervised_counts(batch: Batch, steps: int, shift: int) -> torch.Tensor:
    """Supervised tokens by step [K] of a batch; computed from the masks alone."""
    return plan_supervision(batch.response, batch.lengths, steps, shift, batch.starts).counts
