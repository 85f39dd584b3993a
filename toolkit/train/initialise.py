"""Initial weights of a head: random, or from the target's weights, with which training needs fewer tokens.

Shapes: P positions, H hidden size, W feature width, C columns of the regression's input.

A head replaces the target's last layers one position ahead: it reads position i and predicts their output at i+1. So
its layers start as copies of the target's last layers, its norm and output matrix as the target's. Its input layer
starts as a ridge regression to the input of the first copied layer at i+1. `DraftHead.warm_start` lists the parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from toolkit.data.batches import Batch
from toolkit.heads.draft_head import DraftHead, WarmStart
from toolkit.targets.features import AuxCapture
from toolkit.targets.target import Target
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.copied_layers import CopyReport, copy_decoder_layer, copy_norm
from toolkit.train.features import StoredFeatures

RANDOM_STD = 0.02
# Every fifth batch is left out of the fit and gives its R2.
CHECK_EVERY = 5
# With fewer positions the regression overfits: at 12 a column the demo's head predicted 38 % of the fitted tokens
# before any training, but only 26 % of other tokens.
POSITIONS_PER_COLUMN = 40
# The penalty, with all columns scaled to variance 1. On the demo target a larger one has a better R2 on other positions
# (0.30 at 0.3, 0.25 here), but its head predicts fewer of their tokens (24 %, 27 % here).
RIDGE = 1e-3


def initialise_random(head: nn.Module, seed: int) -> None:
    """Normal weights of standard deviation 0.02 and biases at zero, as EAGLE-3 was published; a new head's norms are at
    one as they are. Draws from a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.dim() == 1 and name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * RANDOM_STD)


@torch.no_grad()
def initialise_from_target(
    head: DraftHead,
    target: Target,
    token_map: TokenMap,
    batches: list[Batch],
    seed: int,
    stored: StoredFeatures | None = None,
) -> float | None:
    """Initialise the parts of `head.warm_start()` from the target, with a regression over `batches`.

    stored: the features of `batches`; None computes them with the target's forward. Parts that differ in shape or
    meaning (another attention, MLP or norm than the head's) stay random, and the log lists them. Returns the R2 of the
    regression; None without batches for it.
    """
    initialise_random(head, seed)
    start = head.warm_start()
    report = _copy_layers(start, target)
    for norm, copied in start.same_norms:
        norm.load_state_dict(copied.state_dict())
    if head.config.own_vocabulary:
        head.lm_head.weight.copy_(target.lm_head.weight[token_map.ids.to(target.device)])
    if start.last_norm is not None:
        name, norm = start.last_norm
        if not copy_norm(norm, target.final_norm, target.hidden_size):
            report.not_copied.append(name)
    report.warn()
    r2 = _regress(head, start, target, batches, stored) if batches else None
    for layer in start.repeats:
        layer.load_state_dict(start.copies[0].layer.state_dict())
    return r2


def _copy_layers(start: WarmStart, target: Target) -> CopyReport:
    report = CopyReport([], [])
    for layer, source, prefix, zeroed in start.copies:
        of_layer = copy_decoder_layer(layer, _source(layer, target, source), target.hidden_size)
        for name in zeroed:
            layer.get_parameter(name).zero_()
        report.not_copied += [prefix + name for name in of_layer.not_copied if name not in zeroed]
        report.dropped += of_layer.dropped
    return report


def _source(layer: nn.Module, target: Target, number: int) -> nn.Module:
    """The layer of the target to copy: the last of those with the class and attention of `layer`, else `number`."""
    own = {name: part.shape for name, part in layer.named_parameters()}
    alike = [
        one
        for one in target.layers
        if isinstance(one, type(layer)) and all(own.get(name) == part.shape for name, part in one.named_parameters())
    ]
    return alike[number] if len(alike) >= -number else target.layers[number]


def _regress(
    head: DraftHead, start: WarmStart, target: Target, batches: list[Batch], stored: StoredFeatures | None
) -> float | None:
    """Solve for `start.solved` by ridge regression; returns its R2 on positions that took no part in the fit."""
    columns = start.solved.in_features
    fit, check = (Moments.empty(columns, target.hidden_size, target.device) for _ in range(2))
    for number, (batch, read, wanted) in enumerate(_inputs_and_labels(head, target, batches, stored)):
        pairs = answer_pairs(batch, target.device)
        embeds = target.embed_tokens(batch.input_ids.to(target.device))[:, 1:][pairs].float()
        x = start.solved_reads(embeds, read[:, :-1][pairs].float())
        states = wanted[:, 1:] if start.ahead else wanted[:, :-1]
        (check if number % CHECK_EVERY == 1 else fit).add(x, states[pairs].float())
    weight, r2 = ridge_regression(fit, check)
    if weight is not None:
        start.solved.weight.copy_(weight.T)
    return r2


def _inputs_and_labels(
    head: DraftHead, target: Target, batches: list[Batch], stored: StoredFeatures | None
) -> Iterator[tuple[Batch, Tensor, Tensor]]:
    """Every batch with the features [B, L, W] that the head reads, and the states [B, L, H] that the fit predicts."""
    read = head.config.features.layer_ids(target.n_layers) or (None,)
    counted = head.config.regressed_layer
    wanted = None if counted is None else target.n_layers - counted
    for batch, states in _states(target, {*read, wanted}, batches, stored):
        yield batch, torch.cat([states[layer] for layer in read], dim=-1), states[wanted]


def _states(
    target: Target, layers: set[int | None], batches: list[Batch], stored: StoredFeatures | None
) -> Iterator[tuple[Batch, dict[int | None, Tensor]]]:
    """Every batch with the inputs [B, L, H] of these layers (None: the last state), from disk or from a forward."""
    if stored is not None:
        yield from ((batch, {layer: stored.layer(batch, layer) for layer in layers}) for batch in batches)
        return
    captured = tuple(sorted(layer for layer in layers if layer is not None))
    capture = AuxCapture(target, captured) if captured else None
    try:
        for batch in batches:
            last = target.body(input_ids=batch.input_ids.to(target.device), use_cache=False).last_hidden_state
            inputs = [] if capture is None else capture.take_each()
            yield batch, {None: last, **dict(zip(captured, inputs, strict=True))}
    finally:
        if capture is not None:
            capture.remove()


def answer_pairs(batch: Batch, device: torch.device) -> Tensor:
    """Mask [B, L-1] bool of positions i: token i+2 is a response token, so the head will draft there.

    i+1 is never the last id of a text: decoding ends before it computes that state, so it is not stored. Position 0 is
    left out: in most models its states are outliers by orders of magnitude (attention sink).
    """
    length = batch.input_ids.shape[1]
    real = torch.arange(length - 1)[None, :] + 2 < batch.lengths[:, None]
    real[:, 0] = False
    return (real & batch.response[:, 1:]).to(device)


def regression_batches(batches: Iterable[Batch], columns: int, most: int | None = None) -> list[Batch]:
    """The first batches, as many as a regression with `columns` inputs needs; up to the one that reaches `most` answer
    tokens."""
    wanted = POSITIONS_PER_COLUMN * columns
    wanted = wanted if most is None else min(wanted, most)
    taken, positions = [], 0
    for batch in batches:
        taken.append(batch)
        positions += int(batch.response.sum())
        if positions >= wanted:
            break
    return taken


@dataclass
class Moments:
    """Sums over positions, in float64: gram [C, C], cross [C, H], and square and total [H] of y."""

    gram: Tensor
    cross: Tensor
    square: Tensor
    total: Tensor
    positions: int = 0

    @classmethod
    def empty(cls, columns: int, width: int, device: torch.device) -> Moments:
        sizes = ((columns, columns), (columns, width), (width,), (width,))
        gram, cross, square, total = (torch.zeros(*size, dtype=torch.float64, device=device) for size in sizes)
        return cls(gram, cross, square, total)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add the positions of x [P, C] and y [P, H], fp32."""
        self.gram += (x.T @ x).double()
        self.cross += (x.T @ y).double()
        self.square += (y.double() ** 2).sum(0)
        self.total += y.double().sum(0)
        self.positions += len(x)

    def __add__(self, other: Moments) -> Moments:
        names = ("gram", "cross", "square", "total", "positions")
        return Moments(*(getattr(self, name) + getattr(other, name) for name in names))

    def r2(self, weight: Tensor) -> float:
        """Share of the variance over these positions that x @ weight [C, H] explains, as the mean over y's columns.

        It is a mean of shares, because a few channels of a hidden state hold most of its variance but matter little to
        the output matrix.
        """
        residual = self.square - 2 * (weight * self.cross).sum(0) + (weight * (self.gram @ weight)).sum(0)
        spread = self.square - self.total**2 / max(self.positions, 1)
        return float((1.0 - residual / spread.clamp(min=1e-12)).mean())


def ridge_regression(fit: Moments, check: Moments) -> tuple[Tensor | None, float | None]:
    """Weight [C, H] fitted on all positions, and the R2 on `check` of a fit on `fit`; each None without positions."""
    both = fit + check
    return _solve(both) if both.positions else None, check.r2(_solve(fit)) if check.positions else None


def _solve(moments: Moments) -> Tensor:
    """Columns are scaled to variance 1 first: some channels of hidden states are a hundred times larger than others."""
    count = max(moments.positions, 1)
    scale = (moments.gram.diagonal() / count).sqrt().clamp(min=1e-6)
    gram = moments.gram / count / scale[:, None] / scale[None, :]
    gram.diagonal().add_(RIDGE)
    return torch.linalg.solve(gram, moments.cross / count / scale[:, None]) / scale[:, None]
