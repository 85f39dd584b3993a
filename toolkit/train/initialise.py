"""Where a head starts: at random, or from the target's own weights (fewer tokens to a good head).

Shapes: P positions, H hidden size, A auxiliary layers.

The head stands in for the target's last layer one position ahead: it reads position i and must say what that layer says
at i+1. So its layer starts as the last layer, its `lm_head` and `norm` as the target's, and `fc` as the ridge
regression from the features at i to the input of the last layer at i+1. A head of n layers stands in for the last n.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from toolkit.data.batches import Batch
from toolkit.heads.decoder_layer import DecoderLayer
from toolkit.heads.eagle3 import Eagle3Head
from toolkit.log import get_logger
from toolkit.targets.features import AuxCapture
from toolkit.targets.load import Target
from toolkit.tokenmap.token_map import TokenMap
from toolkit.train.copied_layers import Unlike, copy_decoder_layer, copy_first_layer, copy_norm
from toolkit.train.features import StoredFeatures
from toolkit.train.regression import Moments, ridge_regression

log = get_logger(__name__)

RANDOM_STD = 0.02
# Every fifth batch judges the fit.
CHECK_EVERY = 5
# Fewer positions fit the training data only: at 12 a column the demo's head guessed 38 % of their tokens before any
# training and 26 % of unseen ones.
POSITIONS_PER_COLUMN = 40


def initialise_random(head: nn.Module, seed: int) -> None:
    """Normal weights of deviation 0.02, norms at one, biases at zero; as published. Draws from its own generator."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * RANDOM_STD)


def initialise_from_target(
    head: Eagle3Head,
    target: Target,
    token_map: TokenMap,
    batches: list[Batch],
    seed: int,
    stored: StoredFeatures | None = None,
) -> float | None:
    """Copy what fits from the target's last layers, norm and output matrix, and solve for `fc` on `batches`.

    stored: the features of `batches`, which spare the target's forward. Parts that differ in shape or meaning (another
    attention, MLP or norm than the head's) stay random and are named in the log. Returns the regression's R2, None when
    no batches came.
    """
    initialise_random(head, seed)
    unlike = _copy_last_layers(head, target)
    with torch.no_grad():
        head.lm_head.weight.copy_(target.lm_head.weight[token_map.ids.to(target.device)])
        if not copy_norm(head.norm, target.final_norm, target.hidden_size):
            unlike.left.append("norm.weight")
    unlike.warn()
    return _solve_fc(head, target, batches, stored) if batches else None


def _copy_last_layers(head: Eagle3Head, target: Target) -> Unlike:
    first, *others = target.layers[-head.config.num_hidden_layers :]
    unlike = copy_first_layer(head.midlayer, first, target.hidden_size)
    for (number, layer), theirs in zip(head.layers.items(), others, strict=True):
        assert isinstance(layer, DecoderLayer), "Eagle3Head's further layers are decoder layers"
        further = copy_decoder_layer(layer, theirs, target.hidden_size)
        unlike.left += [f"layers.{number}.{name}" for name in further.left]
        unlike.dropped += [name for name in further.dropped if name not in unlike.dropped]
    return unlike


@torch.no_grad()
def _solve_fc(head: Eagle3Head, target: Target, batches: list[Batch], stored: StoredFeatures | None) -> float | None:
    """Ridge regression of the first copied layer's input at i+1 on the features at i; returns R2 on other positions."""
    ids = head.config.aux_layer_ids
    wanted = target.n_layers - head.config.num_hidden_layers
    fit, check = (Moments.empty(head.fc.in_features, target.hidden_size, target.device) for _ in range(2))
    for number, (batch, states) in enumerate(_states(target, (*ids, wanted), batches, stored)):
        pairs = answer_pairs(batch, target.device)
        x = head.before_fc(torch.cat([states[layer] for layer in ids], dim=-1)[:, :-1][pairs].float())
        y = states[wanted][:, 1:][pairs].float()
        (check if number % CHECK_EVERY == 1 else fit).add(x, y)
    weight, r2 = ridge_regression(fit, check)
    if weight is not None:
        head.fc.weight.copy_(weight.T)
    return r2


def _states(
    target: Target, layers: tuple[int, ...], batches: list[Batch], stored: StoredFeatures | None
) -> Iterator[tuple[Batch, dict[int, torch.Tensor]]]:
    """Every batch with the inputs [B, L, H] of these layers, from disk or by the target's forward."""
    if stored is not None:
        yield from ((batch, {layer: stored.layer(batch, layer) for layer in layers}) for batch in batches)
        return
    captured = tuple(sorted(set(layers)))
    capture = AuxCapture(target, captured)
    try:
        for batch in batches:
            target.body(input_ids=batch.input_ids.to(target.device), use_cache=False)
            yield batch, dict(zip(captured, capture.take_each(), strict=True))
    finally:
        capture.remove()


def answer_pairs(batch: Batch, device: torch.device) -> torch.Tensor:
    """[B, L-1] bool: i and i+1 both real, and i+1 about to write or writing an answer (where the head will work).

    i+1 is never a text's last id, whose states nobody computes while the text is written. Position 0 is left out: its
    states are an outlier by orders of magnitude in most models (attention sink).
    """
    length = batch.input_ids.shape[1]
    real = torch.arange(length - 1)[None, :] + 2 < batch.lengths[:, None]
    real[:, 0] = False
    return (real & batch.response[:, 1:]).to(device)


def regression_batches(batches: Iterable[Batch], columns: int) -> list[Batch]:
    """As many of the first batches as the regression needs."""
    taken, positions = [], 0
    for batch in batches:
        taken.append(batch)
        positions += int(batch.response.sum())
        if positions >= POSITIONS_PER_COLUMN * columns:
            break
    return taken
