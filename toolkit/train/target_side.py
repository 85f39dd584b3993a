"""What the frozen target gives a batch: the features that the head reads, and the teacher's rows of the supervised
predictions.

Features come from the target's forward or from a store on disk. Both have arbitrary values in the rows of padding and
of each sequence's last id; no supervised root reads them. On a GPU the forward runs the engine's fused layers
(`fused_layer.py`) around transformers' own attention: transformers' norms, rotation and gate read and write memory some
thirty times a layer, a fifth of the forward's time. The teacher is the target's distribution on the draft vocabulary,
and its argmax on the full vocabulary.

Shapes: B sequences, L positions, A auxiliary layers, H target hidden size, K steps, M teacher rows (positions whose
next token is supervised), S supervised rows of a step, V and D target and draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from toolkit.data.batches import Batch, on_device, supervised_mask
from toolkit.data.feature_store import FeatureStore
from toolkit.heads.draft_head import Project
from toolkit.infer.attention.fused_layer import FusedLayers, fuse_norms
from toolkit.infer.kernels.paged_reference import Scoring
from toolkit.targets.features import AuxCapture, Capture, LastCapture, TargetFeatures, target_features
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.row_split import RowPart, RowSplit

# Scores computed at once (rows times vocabulary): [M, V] of all rows would not fit into memory. And the fewest rows:
# with fewer, reading the output matrix from memory would take most of the time.
CHOICE_SCORES, LEAST_ROWS = 2**25, 128
GPU_ROWS = 2048  # in place of both on a GPU
# A GPU's matrices have a multiple of so many rows. If rows of scores do not begin at multiples of 16 bytes, cuBLAS is
# left with kernels that take several times as long.
ALIGNED = 64
Anchors = Callable[["Supervision", torch.Size], "Supervision"]  # of `micro_step`


class FusedTarget(FusedLayers):
    """Layers that run fused inside `running`: none without the GPU's kernels, and none of a target that is sharded or
    in training, whose weights must stay where they are."""

    def __init__(self, target: Target) -> None:
        moving = any(one.requires_grad for one in target.model.parameters())
        sharded = isinstance(target.body, FSDPModule) or target.group is not None
        fits = not moving and not sharded and target.config._attn_implementation == "sdpa"
        if fits:
            fuse_norms(target.body, target.device)
        scaling = {
            at: getattr(getattr(one, "self_attn", None), "scaling", None) for at, one in enumerate(target.layers)
        }
        scorings = {at: Scoring(factor) for at, factor in scaling.items() if fits and isinstance(factor, float)}
        super().__init__(target, scorings, {at: at for at in scaling})
        self._calls = {layer: partial(_run, call, layer.self_attn) for layer, call in self._calls.items()}


@dataclass(frozen=True)
class _OwnAttention:
    """Attention metadata of a layer: its attention in transformers, with the mask of this forward."""

    attention: Any
    mask: Tensor | None
    in_place = False

    def row_attention(self, *_layer: Any) -> None:
        """There is no cache."""

    def attend(self, _layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        return sdpa_attention_forward(self.attention, q, k, v, self.mask, scaling=scoring.scaling)[0]


def _run(call: Callable[..., Tensor], attention: Any, states: Tensor, attention_mask: Any, **more: Any) -> Tensor:
    return call(states, attention_metadata=_OwnAttention(attention, attention_mask), **more)


class OnlineFeatures:
    """Runs the target's forward for every batch; `capture` keeps the features."""

    def __init__(self, target: Target, capture: Capture) -> None:
        self.target, self.capture = target, capture
        self._fused = FusedTarget(target)

    def __call__(self, batch: Batch) -> TargetFeatures:
        if self.target.group is None:  # else `run_body` sends it to the other processes first
            batch = batch.to(self.target.device)
        with torch.no_grad(), self._fused.running():
            return target_features(self.target, self.capture, batch.input_ids, batch.starts)


class StoredFeatures:
    """Reads features from a store, onto `device`, without a forward of the target.

    aux_layer_ids: the layers whose inputs are concatenated as `aux`; None: `aux` is the last hidden state.
    """

    def __init__(self, store: FeatureStore, aux_layer_ids: tuple[int, ...] | None, device: torch.device) -> None:
        self.store, self.device = store, device
        ids = aux_layer_ids
        self._columns = [store.last_columns] if ids is None else [store.columns(layer) for layer in ids]

    def __call__(self, batch: Batch) -> TargetFeatures:
        """Padding and each sequence's last id are not stored; their rows are zeros."""
        stored = self._stored(batch)
        aux = torch.cat([stored[..., columns] for columns in self._columns], dim=-1)
        return TargetFeatures(aux=aux, last=stored[..., self.store.last_columns])

    def layer(self, batch: Batch, layer_id: int | None) -> torch.Tensor:
        """The input [B, L, H] of one stored layer; None: the last hidden state. Raises `FeatureStoreError` when the
        layer is not stored."""
        columns = self.store.last_columns if layer_id is None else self.store.columns(layer_id)
        return self._stored(batch)[..., columns]

    def _stored(self, batch: Batch) -> torch.Tensor:
        spec, ids = self.store.spec, batch.input_ids.cpu()
        stored = torch.zeros(*ids.shape, spec.width, dtype=spec.torch_dtype)
        for row, start, end in batch.sequences():
            stored[row, start : end - 1] = self.store.read(ids[row, start:end])
        return stored.to(self.device)


@dataclass(frozen=True)
class Supervision:
    """The supervised roots of each step, and the teacher row of each.

    roots[k] [S]: indices into the flat [B*L] positions. rows[k] [S]: indices into the M teacher rows, which belong to
    the flat positions `teacher_positions` [M]. starts [B, L]: as in `Batch`.

    anchors [B, N]: the only roots that are unrolled after the first `full` steps (see `anchored`). In these later steps
    roots[k] are indices into the flat [B*N] anchors. shares[k] [S]: the number of roots that each root represents.

    planned: the same on the device that it was planned on, the host: reading it does not wait for a GPU.
    part: of rows that are split (`of_part`); None: the rows are whole.
    """

    teacher_positions: torch.Tensor
    roots: list[torch.Tensor]
    rows: list[torch.Tensor]
    starts: torch.Tensor | None = None
    anchors: torch.Tensor | None = None
    shares: list[torch.Tensor] | None = None
    full: int | None = None
    planned: Supervision | None = None
    part: RowPart | None = None

    def to(self, device: torch.device) -> Supervision:
        """The same on another device, without waiting for it; `planned` is this one."""

        def each(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return [on_device(one, device) for one in tensors]

        starts, anchors = (None if x is None else on_device(x, device) for x in (self.starts, self.anchors))
        shares = None if self.shares is None else each(self.shares)
        positions = on_device(self.teacher_positions, device)
        roots, rows = each(self.roots), each(self.rows)
        return Supervision(positions, roots, rows, starts, anchors, shares, self.full, self, self.part)

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


def plan_supervision(response: torch.Tensor, steps: int, starts: torch.Tensor | None = None) -> Supervision:
    """The supervision of a batch: response [B, L] bool, starts [B, L].

    Root t of step k predicts token i+1 at position i = t+1+k, so one teacher row for position i serves all steps.
    """
    masks = [supervised_mask(response, step, starts).flatten() for step in range(steps)]
    flat = [mask.nonzero().squeeze(-1) for mask in masks]
    # The roots of step 0 include every position that a later step predicts from.
    positions = flat[0] + 1
    row_of = torch.full((response.numel() + steps,), -1, dtype=torch.long, device=response.device)
    row_of[positions] = torch.arange(len(positions), device=response.device)
    return Supervision(positions, flat, [row_of[roots + 1 + step] for step, roots in enumerate(flat)], starts)


def of_part(supervision: Supervision, shape: torch.Size, part: RowPart) -> Supervision:
    """The supervision of whole rows [B, L], for the roots of a part: roots are flat indices into [B, C], or into its
    anchors, and teacher positions into [B, W]."""
    length, anchors, full = shape[1], supervision.anchors, supervision.full
    # Of all positions, and of the anchors: the place in all parts, and how many places a part has.
    tables = [(torch.arange(length, device=supervision.teacher_positions.device).expand(shape), part.count)]
    if anchors is not None:
        anchors, places, count = part.divided(anchors)
        tables.append((places, count))
    roots, here = [], []
    for step, flat in enumerate(supervision.roots):
        places, count = tables[-1 if full is not None and step >= full else 0]
        at = places.flatten()[flat] - part.begin // part.count * count
        here.append((at >= 0) & (at < count))
        roots.append((flat // places.shape[1] * count + at)[here[-1]])
    rows = [row[kept] for row, kept in zip(supervision.rows, here, strict=True)]
    shares = supervision.shares and [share[kept] for share, kept in zip(supervision.shares, here, strict=True)]
    read = torch.cat(rows).unique()
    at = supervision.teacher_positions[read]
    positions = at // length * (part.count + part.ahead) + at % length - part.begin
    rows = [torch.searchsorted(read, row) for row in rows]
    return Supervision(positions, roots, rows, anchors=anchors, shares=shares, full=full, part=part)


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
    available = eligible.sum(1)
    count = min(count, max(1, int(available.max())))
    drawn = torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)).to(device)
    anchors = drawn.masked_fill(~eligible, -1.0).topk(count, dim=1).indices.sort(dim=1).values
    flat = (anchors + torch.arange(batch, device=device)[:, None] * length).flatten()
    slot = torch.full((batch * length,), -1, dtype=torch.long, device=device)
    slot[flat] = torch.arange(len(flat), device=device)
    share = available / available.clamp(min=1, max=count)
    roots, rows = list(supervision.roots[:full]), list(supervision.rows[:full])
    shares = [torch.ones(len(one), device=device) for one in roots]
    for old, row in zip(supervision.roots[full:], supervision.rows[full:], strict=True):
        drawn_here = slot[old] >= 0
        roots.append(slot[old[drawn_here]])
        rows.append(row[drawn_here])
        shares.append(share[old[drawn_here] // length])
    return Supervision(supervision.teacher_positions, roots, rows, supervision.starts, anchors, shares, full)


def covered_share(batch: Batch, token_map: TokenMap) -> float:
    """Share of a batch's supervised tokens that are in the draft vocabulary; the head cannot draft the others.

    Each token counts once, as the prediction of step 0. 1 without supervised tokens.
    """
    roots = supervised_mask(batch.response, 0)
    tokens = batch.input_ids[:, 2:][roots[:, :-2]]
    return float(token_map.t2d[tokens].float().mean()) if len(tokens) else 1.0


def aligned(rows: torch.Tensor) -> torch.Tensor:
    """An output matrix [D, H] or bias [D], on a GPU with zeros behind it up to a multiple of `ALIGNED` rows."""
    missing = -len(rows) % ALIGNED if rows.device.type == "cuda" else 0
    return torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:]))) if missing else rows


@dataclass(frozen=True)
class TeacherRows:
    """Rows of the teacher.

    states [M, H]: final-normed. choice [M]: the target's argmax, as target ids. in_draft_vocab [M]: whether that argmax
    is in the draft vocabulary; the other rows get no loss. distribution: states -> probabilities, called for a few rows
    at a time, because the probabilities of all rows would be the largest tensor of a training.
    """

    states: torch.Tensor
    choice: torch.Tensor
    in_draft_vocab: torch.Tensor
    distribution: Callable[[torch.Tensor], torch.Tensor]

    def probs(self, rows: slice) -> torch.Tensor:
        """Probabilities [m, D] fp32 of these rows, renormalised on the draft vocabulary."""
        return self.distribution(self.states[rows])


@dataclass(frozen=True)
class SharedMatrix:
    """The target's output matrix [D, H], its bias, and its logit factor or soft cap (finish; None: it has none)."""

    matrix: torch.Tensor
    bias: torch.Tensor | None
    finish: Callable[[torch.Tensor], torch.Tensor] | None

    def score(self, states: torch.Tensor, project: Project) -> Any:
        """`project` of states [N, H] with the matrix, its bias and `finish`, in the target's dtype as in the engine."""
        return project(states.to(self.matrix.dtype), self.matrix, self.bias, self.finish)


class Teacher:
    """Computes teacher rows with the target's output matrix; the rows of the draft vocabulary are gathered once."""

    def __init__(self, target: Target, token_map: TokenMap) -> None:
        self.target = target
        self.in_draft = token_map.t2d.to(target.device)
        self.draft_ids = token_map.ids.to(target.device)
        # Detached: a target may be in training itself (head_adapter.py), and the head's loss must not train it.
        head = target.lm_head
        weight, bias = head.weight.detach(), None if head.bias is None else head.bias.detach()
        full = token_map.size == len(weight)
        self.draft_weight = weight if full else weight[self.draft_ids].contiguous()
        self.draft_bias = bias if bias is None or full else bias[self.draft_ids]
        self._aligned = aligned(self.draft_weight), None if bias is None else aligned(self.draft_bias)

    def shared_matrix(self) -> SharedMatrix:
        """The output matrix for a head without one of its own."""
        probe = torch.zeros(1)
        plain = self.target.finish_scores(probe) is probe
        return SharedMatrix(self.draft_weight, self.draft_bias, None if plain else self.target.finish_scores)

    @torch.no_grad()
    def choice(self, hidden: torch.Tensor) -> torch.Tensor:
        """Target argmax [M] of final-normed states [M, H], computed in pieces."""
        rows = max(CHOICE_SCORES // self.target.vocab_size, LEAST_ROWS) if hidden.device.type == "cpu" else GPU_ROWS
        # The layer itself, because a quantised layer's product is the one that the target decodes with.
        return torch.cat([self.target.lm_head(part).max(-1).indices for part in hidden.split(rows)])

    @torch.no_grad()
    def distribution(self, hidden: torch.Tensor) -> torch.Tensor:
        """Probabilities [m, D] fp32 on the draft vocabulary, from final-normed states [m, H]."""
        scores = F.linear(hidden, *self._aligned)[:, : len(self.draft_weight)]
        return self.target.finish_scores(scores).float().softmax(-1)

    def __call__(
        self, hidden: torch.Tensor, labels: torch.Tensor | None = None, greedy: torch.Tensor | None = None
    ) -> TeacherRows:
        """Rows of final-normed states [M, H]. Where greedy [M] is true, labels [M] is the target's argmax and is not
        computed again: the product with the full output matrix is one of the most expensive of a step. With `greedy` on
        the host nothing waits for a GPU."""
        if labels is None or greedy is None:
            choice = self.choice(hidden)
        else:
            choice, open_rows = labels.clone(), on_device((~greedy).nonzero().squeeze(-1), hidden.device)
            choice[open_rows] = self.choice(hidden[open_rows])
        return TeacherRows(hidden, choice, self.in_draft[choice], self.distribution)


@dataclass(frozen=True)
class UnrollInputs:
    """Inputs of `TrainedHead.forward` for one micro-batch, and what the teacher needs.

    aux [B, L, A*H]: the features that the head reads. embeds [B, L, H]. teacher_hidden [M, H]: final-normed states of
    the target. before, labels [M]: the ids at the teacher's positions, and those that follow them. greedy [M] bool, on
    the batch's device: whether `labels` is the target's argmax; None if unknown.
    """

    aux: torch.Tensor
    embeds: torch.Tensor
    supervision: Supervision
    teacher_hidden: torch.Tensor
    before: torch.Tensor
    labels: torch.Tensor
    greedy: torch.Tensor | None


class TargetSide:
    """Everything that training computes with the frozen target for a batch: features, embeddings, teacher.

    aux_layer_ids: the layers whose inputs the head reads, concatenated; None: the final-normed last hidden state.
    features: the source of the features; None: the target's forward. split: of the rows of micro-batches.
    """

    def __init__(
        self,
        target: Target,
        token_map: TokenMap,
        aux_layer_ids: tuple[int, ...] | None,
        precision: str,
        features: StoredFeatures | None = None,
        split: RowSplit | None = None,
    ) -> None:
        self.target, self.split = target, split
        self.token_map = token_map
        self.capture = LastCapture(target) if aux_layer_ids is None else AuxCapture(target, aux_layer_ids)
        self.features = features or OnlineFeatures(target, self.capture)
        self.teacher = Teacher(target, token_map)
        self.head_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]

    def inputs(
        self, batch: Batch, steps: int, anchors: Anchors | None = None, split: RowSplit | None = None
    ) -> UnrollInputs:
        """The inputs of one micro-batch; features and embeddings are in the head's dtype. anchors: of `micro_step`.
        split: `batch` is of whole rows, and the inputs are those of this process's part.

        Supervision is planned where the batch is. With a batch on the host nothing waits for the target's forward.
        """
        planned = plan_supervision(batch.response, steps, batch.starts)
        planned = planned if anchors is None else anchors(planned, batch.response.shape)
        input_ids, greedy = batch.input_ids, batch.greedy
        if split is None:
            features = self.features(batch)
        else:
            part = split.part(input_ids.shape[1], steps)
            planned = of_part(planned, batch.response.shape, part)
            features = self._part_features(batch, part)
            input_ids, greedy = part.cut(input_ids), None if greedy is None else part.cut(greedy)
        greedy = None if greedy is None else greedy.flatten()[planned.teacher_positions + 1]
        supervision, input_ids = planned.to(self.target.device), on_device(input_ids, self.target.device)
        ids = input_ids.flatten()
        with torch.no_grad():
            embeds = self.target.embed_tokens(input_ids)
        return UnrollInputs(
            aux=features.aux.to(self.head_dtype),
            embeds=embeds.to(self.head_dtype),
            supervision=supervision,
            teacher_hidden=features.last.flatten(0, 1)[supervision.teacher_positions],
            before=ids[supervision.teacher_positions],
            labels=ids[supervision.teacher_positions + 1],
            greedy=greedy,
        )

    def _part_features(self, batch: Batch, part: RowPart) -> TargetFeatures:
        """The features of a part of the batch's rows: `aux` of its positions, `last` also of those ahead."""
        if isinstance(self.features, StoredFeatures):
            whole = self.features(batch)
            return TargetFeatures(part.cut(whole.aux)[:, : part.count], part.cut(whole.last))
        return part.features(self.target, self.capture, on_device(part.cut(batch.input_ids), self.target.device))
