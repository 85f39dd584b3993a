"""Where heads that share the target's output matrix (eagle2, mtp) start from the target's own weights.

As in `initialise.py` the head stands in for the target's last layer one position ahead, but what it reads at i is the
last state of position i and the embedding of token i+1.

- An MTP layer has all parts of that layer: they are copied, its last norm is the target's, and `eh_proj` is the ridge
  regression from what it reads at i to the input of the target's last layer at i+1. Further layers do one position
  later what the first does, so they start like it.
- eagle2 has no norm in front of its attention nor behind its layer, and must write the next state itself. So `fc` is
  the regression straight to the last state at i+1, and the layers add nothing to it at first (o_proj, down_proj zero).

Shapes: P positions, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from toolkit.data.batches import Batch
from toolkit.heads.decoder_layer import DecoderLayer
from toolkit.heads.eagle2 import Eagle2Head
from toolkit.heads.mtp import MtpHead
from toolkit.targets.features import AuxCapture, target_features
from toolkit.targets.target import Target
from toolkit.train.copied_layers import Unlike, copy_decoder_layer, copy_norm
from toolkit.train.initialise import CHECK_EVERY, answer_pairs, initialise_random
from toolkit.train.regression import Moments, ridge_regression

# (embeddings [P, H] of tokens i+1, last states [P, H] of i) -> what the linear layer reads of them, [P, 2H].
Read = Callable[[Tensor, Tensor], Tensor]


@torch.no_grad()
def start_mtp(head: MtpHead, target: Target, batches: list[Batch], seed: int) -> float | None:
    """Start as the text above says. Parts that the target's last layer lacks, or has in another shape or meaning, stay
    random and are named in the log. Returns the regression's R2, None when no batches came."""
    initialise_random(head, seed)
    first = head.layer(0)
    unlike = copy_decoder_layer(first, target.layers[-1], target.hidden_size)
    last_norm = first.shared_head["norm"]
    assert isinstance(last_norm, nn.RMSNorm), "shared_head holds the layer's last norm"
    if not copy_norm(last_norm, target.final_norm, target.hidden_size):
        unlike.left.append("shared_head.norm.weight")
    unlike.warn()

    def read(embeds: Tensor, states: Tensor) -> Tensor:
        pair = (first.enorm(embeds), first.hnorm(states))
        return torch.cat(pair if head.config.embedding_first else pair[::-1], dim=-1)

    r2 = _solve(first.eh_proj, target, batches, target.n_layers - 1, read) if batches else None
    for layer in head.layers[1:]:
        layer.load_state_dict(first.state_dict())
    return r2


@torch.no_grad()
def start_eagle2(head: Eagle2Head, target: Target, batches: list[Batch], seed: int) -> float | None:
    """As `start_mtp`."""
    initialise_random(head, seed)
    zeroed = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
    for number, layer in enumerate(head.layers):
        assert isinstance(layer, DecoderLayer), "Eagle2Head's layers are decoder layers"
        unlike = copy_decoder_layer(layer, target.layers[-1], target.hidden_size)
        for name in zeroed:
            layer.get_parameter(name).zero_()
        if number == 0:  # each is a copy of the same
            Unlike([name for name in unlike.left if name not in zeroed], unlike.dropped).warn()
    return _solve(head.fc, target, batches, None, lambda *pair: torch.cat(pair, dim=-1)) if batches else None


def _solve(linear: nn.Linear, target: Target, batches: list[Batch], wanted: int | None, read: Read) -> float | None:
    """Ridge regression at i of the state that enters layer `wanted` at i+1, or of the last state there (None)."""
    capture = AuxCapture(target, (0 if wanted is None else wanted,))
    fit, check = (Moments.empty(linear.in_features, target.hidden_size, target.device) for _ in range(2))
    try:
        for number, batch in enumerate(batches):
            features = target_features(target, capture, batch.input_ids)
            following = features.last if wanted is None else features.aux
            pairs = answer_pairs(batch, target.device)
            embeds = target.embed_tokens(batch.input_ids.to(target.device))[:, 1:][pairs]
            x = read(embeds.float(), features.last[:, :-1][pairs].float())
            (check if number % CHECK_EVERY == 1 else fit).add(x, following[:, 1:][pairs].float())
    finally:
        capture.remove()
    weight, r2 = ridge_regression(fit, check)
    if weight is not None:
        linear.weight.copy_(weight.T)
    return r2
