"""The protocol of a draft head. Training, serving and checkpoints use a head through it alone, whatever its kind.

One module of this folder is one kind of head: a `HeadConfig` (shapes, what is read of the target, names and keys of
other engines) and a `DraftHead` (parameters, arithmetic, start from the target); `registry.py` lists the kinds.

What every kind has is its config, its start and how it is scored: by an output matrix of its own, or by the target's.
`first_hidden`, `forward` and `read` are what the unroll and the drafter ask of a head that drafts token by token. A
kind that drafts in another way leaves them out, and comes with an unroll and a drafter of its own.

Token-major, no caches, no masks, no step counters: the attention is handed in.

Shapes: T tokens, W feature width, H head hidden size, D rows of the head's own output matrix, P positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.heads.decoder_layer import Attend, AttendingLayer
from toolkit.heads.head_config import HeadConfig
from toolkit.heads.rope import Rope

# Normed states [T, H] and the output matrix [D, H] -> logits [T, D]; training hands in what needs no logits of all T.
Project = Callable[..., Any]


class OutputMatrix(nn.Linear):
    """A linear layer whose product is handed in: a trainer that shards weights has them whole in a forward alone."""

    takes_product = True

    def forward(self, input: Tensor, project: Project = F.linear) -> Any:
        return project(input, self.weight)


class LayerCopy(NamedTuple):
    """`layer` starts as the target's layer number `source`, which counts from the end (-1: the last).

    prefix: stands before the names of its parameters in the log. zeroed: parameters that start at zero instead.
    """

    layer: AttendingLayer
    source: int = -1
    prefix: str = ""
    zeroed: tuple[str, ...] = ()


@dataclass(frozen=True)
class WarmStart:
    """How a head starts from the target's weights. `train/initialise.py` does it.

    copies: layers that start as layers of the target. last_norm: the norm before the output matrix, which starts as the
    target's, and its name; None: the head has none. solved: the linear layer that a ridge regression solves for, from
    the features of position i and the embedding of token i+1 to the state of the target at i+1 that
    `HeadConfig.regressed_layer` names. solved_reads: (embeddings [P, H], features [P, W]) -> what `solved` reads.
    repeats: layers that start as the first of the copies does after the regression.
    """

    copies: Sequence[LayerCopy]
    last_norm: tuple[str, nn.RMSNorm] | None
    solved: nn.Linear
    solved_reads: Callable[[Tensor, Tensor], Tensor]
    repeats: Sequence[nn.Module] = ()


class DraftHead(nn.Module):
    """Base of every kind of head. The token embedding is the target's.

    rope: the rotation of its layers. norm, lm_head: present where `config.own_vocabulary` is.
    """

    config_class: ClassVar[type[HeadConfig]]
    config: HeadConfig
    rope: Rope
    norm: nn.RMSNorm
    lm_head: OutputMatrix

    def first_hidden(self, features: Tensor) -> Tensor:
        """[..., W] -> [..., H]: what stage 0 reads where the target's features are known."""
        return features

    def forward(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, reach: int, stage: int = 0
    ) -> Tensor:
        """One pass of a stage.

        embeds [T, H]: embedding of the token after each position; hidden [T, H]: what `first_hidden` or the pass before
        gave; positions [T] int64, all below `reach`. Returns [T, H], what the next pass reads as hidden.
        """
        raise NotImplementedError(f"{type(self).__name__} does not draft token by token")

    def read(self, stage: int, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., H]: what the output matrix, the head's or the target's, reads of a stage's output."""
        return hidden

    def logits(self, states: Tensor, project: Project = F.linear) -> Any:
        """States as `read` gives them [T, H] -> [T, D], or what `project` makes of them and the output matrix."""
        raise NotImplementedError(f"the target's output matrix scores the states of {type(self).__name__}")

    def warm_start(self) -> WarmStart:
        """Where each part starts when the head starts from the target."""
        raise NotImplementedError(f"{type(self).__name__} has no start from the target")
