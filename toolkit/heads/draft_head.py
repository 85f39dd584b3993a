"""The protocol of a draft head. Training, serving and checkpoints use every kind of head through this protocol.

Each kind of head is one module of this folder: a `HeadConfig` (shapes, features of the target, names and keys of other
engines) and a `DraftHead` (parameters, forward, warm start). `head_kinds.py` lists the kinds.

Every kind has a config, a warm start, and an output matrix: its own or the target's. The training unroll and the
drafter call `first_hidden` and `forward`.

Inputs are token-major, without caches, masks or step counters. The caller passes the attention as an argument.

Shapes: T tokens, W feature width, H head hidden size, D rows of the head's own output matrix, P positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.head_kinds import HEAD_KINDS
from toolkit.heads.decoder_layer import Attend, KVSizes, Rope
from toolkit.heads.head_config import HeadConfig

# Normed states [T, H] and the output matrix [D, H] -> logits [T, D]. Training passes a function that avoids the logits
# of all T tokens at once.
Project = Callable[..., Any]


class OutputMatrix(nn.Linear):
    """A linear layer that takes its product as an argument: a sharded weight is whole only inside its forward."""

    takes_product = True

    def forward(self, input: Tensor, project: Project = F.linear) -> Any:
        return project(input, self.weight)


class LayerCopy(NamedTuple):
    """Initialise `layer` from the target's layer `source`, counted from the end (-1: the last).

    prefix: of its parameter names in the log. zeroed: parameters that start at zero instead.
    """

    layer: nn.Module
    source: int = -1
    prefix: str = ""
    zeroed: tuple[str, ...] = ()


@dataclass(frozen=True)
class WarmStart:
    """How to initialise a head from the target's weights. `train/warm_start.py` applies it.

    copies: layers copied from the target. last_norm: name and module of the norm before the output matrix, copied from
    the target; None: the head has no such norm. solved: the linear layer solved by ridge regression, from the features
    of position i and the embedding of token i+1 to the target's state at i+1 (see `HeadConfig.regressed_layer`).
    solved_reads: (embeddings [P, H], features [P, W]) -> the input of `solved`. repeats: layers that start as a copy of
    the first of `copies` after the regression.
    ahead: False: `solved` predicts the state at i itself, from features alone.
    same_norms: norms that start as a copy of another norm of the head, after `copies`.
    """

    copies: Sequence[LayerCopy]
    last_norm: tuple[str, nn.Module] | None
    solved: nn.Linear
    solved_reads: Callable[[Tensor, Tensor], Tensor]
    repeats: Sequence[nn.Module] = ()
    ahead: bool = True
    same_norms: Sequence[tuple[nn.Module, nn.Module]] = ()


class DraftHead(nn.Module, ABC):
    """Base class of the draft heads. The token embedding is the target's.

    rope: the rotary embedding of its layers. norm, lm_head: present if `config.own_vocabulary`.
    """

    config_class: ClassVar[type[HeadConfig]]
    config: HeadConfig
    rope: Rope
    norm: nn.RMSNorm
    lm_head: OutputMatrix

    def first_hidden(self, features: Tensor) -> Tensor:
        """The input of MTP layer 0 at positions with known target features: [..., W] -> [..., H]."""
        return features

    @abstractmethod
    def forward(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, reach: int, mtp_layer: int = 0
    ) -> Tensor:
        """Run one pass, by MTP layer `mtp_layer`; other heads have one.

        embeds [T, H]: embedding of the token after each position; hidden [T, H]: output of `first_hidden` or of the
        previous pass; positions [T] int64, all below `reach`. Returns [T, H], the `hidden` of the next pass.
        """

    @property
    def writes_alone(self) -> bool:
        """Whether the keys and values of a position depend on its own inputs alone: there is one attention layer."""
        return False

    def keys_values(self, embeds: Tensor, hidden: Tensor, positions: Tensor, reach: int) -> tuple[Tensor, Tensor]:
        """The keys and values [T, kv_heads, hd] that `forward` hands to its attention; only if `writes_alone`."""
        raise NotImplementedError

    def normed(self, states: Tensor) -> Tensor:
        """Outputs of `forward` [..., H] -> the input of the output matrix."""
        return states

    def logits(self, states: Tensor, project: Project = F.linear) -> Any:
        """Outputs of `forward` [T, H] -> logits [T, D], or the result of `project` with the output matrix.

        Only of heads with an output matrix (`config.own_vocabulary`); the target's matrix scores the states of others.
        """
        if not self.config.own_vocabulary:
            raise TypeError(f"{type(self).__name__} has no output matrix; score its states with the target's")
        return self.lm_head(self.normed(states), project)

    def map_rows(self, places: Tensor) -> None:
        """Take another draft vocabulary, apart from the output matrix: places [D] of its ids in the old one, -1 if that
        lacks them."""

    @property
    def zeroed(self) -> tuple[str, ...]:
        """Names of the parameters that start at zero in a new head."""
        return ()

    def read_target(self, embed: Callable[[Tensor], Tensor]) -> None:
        """Take what the head holds of the target's embedding: ids [n] -> [n, H]. Called before the first forward, and
        when the target's weights have changed."""

    def kv_sizes(self) -> KVSizes:
        """Sizes of the keys and values of its attention layers, which are all alike."""
        config = self.config
        return KVSizes(config.num_key_value_heads, config.head_dim, config.head_dim)

    def extended(self, project: Project) -> Project:
        """`project`, as a head without an output matrix calls it with the target's."""
        return project

    def cast(self, device: torch.device | str, dtype: torch.dtype) -> Self:
        """Move the head to a device and its parameters to a dtype; buffers (the biases of experts' scores) keep theirs.

        Returns the head."""
        buffers = {name: buffer for name, buffer in self.named_buffers()}
        self.to(device=device, dtype=dtype)
        for name, buffer in buffers.items():
            path, _, own = name.rpartition(".")
            setattr(self.get_submodule(path), own, buffer.to(device))
        return self

    @abstractmethod
    def warm_start(self) -> WarmStart:
        """How to initialise each part of the head from the target."""


def head_class(kind: str) -> type[DraftHead]:
    """The class of a kind of head. Raises KeyError for a name that the registry lacks."""
    return getattr(import_module(f"toolkit.heads.{kind}"), HEAD_KINDS[kind].head)


def build_head(config: HeadConfig) -> DraftHead:
    """A head of this configuration with torch's default initialisation."""
    return head_class(config.kind)(config)


@torch.no_grad()
def empty_head(config: HeadConfig) -> DraftHead:
    """A head with NaN weights, for loading a checkpoint: a weight that is not loaded becomes visible.

    Raises HeadError for a number that no head can have."""
    config.check_numbers()
    head = build_head(config)
    for parameter in head.parameters():
        parameter.fill_(float("nan"))
    return head
