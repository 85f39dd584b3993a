"""A block drafter in the manner of DFlash (arXiv 2602.06036) and DSpark: one pass drafts all tokens.

Shapes: T tokens, n blocks of b tokens, Ht target hidden size, H head hidden size, A auxiliary layers, D draft
vocabulary, r rank of the Markov bias.

    position        0 ..  t            t+1          t+2      ..  t+b
    token           x_0   x_t          x_{t+1}      ?            ?
    keys, values    from the target's  from the block itself; all queries of the block see all of them
                    features f_0..f_t
    query           -                  x_{t+1}, f_t  mask 1, f_t   mask b-1, f_t
    predicts        -                  x_{t+2}       x_{t+3}   ..  x_{t+1+b}

A query also reads f_t, the last known feature, on a path of its own; DFlash's read the context through attention alone.
The logits of every query get a bias of rank r that depends on the token before the predicted one (DSpark's Markov bias;
here its second factor is the output matrix times an H x r matrix, so few tokens train it). So drafting is one pass and
then a choice position by position.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.heads.aux_config import AuxHeadConfig
from toolkit.heads.decoder_layer import Attend, DecoderLayer
from toolkit.heads.draft_head import DraftHead, LayerCopy, OutputMatrix, Project, WarmStart
from toolkit.heads.head_config import HeadError
from toolkit.heads.layer_ops import RMSNorm
from toolkit.heads.rope import Rope

# Keys [T, kv_heads, hd], rotated, and values of the context in one layer. Called once per layer, in order.
Write = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True)
class BlockDraftConfig(AuxHeadConfig):
    """block_size: places of a block, b. markov_rank: r.

    Raises ValueError for less than two places, and for a sliding window.
    """

    own_settings = ("markov_rank",)

    block_size: int = 4
    markov_rank: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size < 2:
            raise ValueError(f"{self.kind} config: block_size is {self.block_size}; at least 2 is needed")
        if self.sliding_window is not None:
            raise ValueError(
                f"{self.kind} config: sliding_window is {self.sliding_window}, but a block sees all its context; leave "
                "it out"
            )

    @property
    def drafts_at_once(self) -> int:
        return self.block_size

    def for_steps(self, steps: int) -> Self:
        if steps < 2:
            raise HeadError(f"train.unroll.ttt_steps is {steps}; a block has at least 2 tokens")
        return replace(self, block_size=self.block_size - self.drafts_at_once + steps)


class BlockDraftHead(DraftHead):
    """What training and the drafter call of a block drafter. `config` has block_size, the places of a block b, and
    `drafts_at_once`, the last of them, which are drafts.

    has_confidence: whether `confident` says something. fc: gives the features' part in a block, `first_hidden`.
    """

    config: BlockDraftConfig
    has_confidence: bool = True
    fc: nn.Linear
    layers: nn.ModuleList

    @abstractmethod
    def write_context(self, hidden: Tensor, positions: Tensor, reach: int, write: Write) -> None:
        """Give the keys and values of known positions to `write`, layer by layer.

        hidden [T, ..]: of `first_hidden`; positions [T] int64, all below `reach`."""

    @abstractmethod
    def queries(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """The input [T, H] of the first layer; arguments as of `forward`."""

    def forward(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, reach: int, stage: int = 0
    ) -> Tensor:
        """Draft n blocks in one pass; T = n*b, block by block.

        embeds [T, H]: of the token x_{t+1} at the first place of a block; the others are not read. hidden [T, ..]: of
        `first_hidden` of f_t, at every place. positions [T]: t+1, t+2, .. Returns [T, H], the input of `read`.
        """
        x = self.queries(embeds, hidden)
        cos, sin = self.rope(positions, embeds, reach)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return x

    def normed(self, states: Tensor) -> Tensor:
        return self.norm(states)

    def layer_copies(self) -> list[LayerCopy]:
        """Its layers as copies of the target's last ones."""
        count = len(self.layers)
        return [LayerCopy(layer, at - count, prefix=f"layers.{at}.") for at, layer in enumerate(self.layers)]

    @abstractmethod
    def before(self, tokens: Tensor, embeds: Tensor) -> Tensor | None:
        """What the Markov bias reads of the tokens before the predicted ones: ids [...] and embeddings [..., H] ->
        [..., r]; None without a bias."""

    @abstractmethod
    def after(self, states: Tensor, tokens: Tensor, embeds: Tensor) -> Tensor:
        """Outputs of `read` [..., H], and ids [...] and embeddings [..., H] of the tokens before the predicted ones ->
        the input of `logits` and `confident`."""

    @abstractmethod
    def bias_rows(self, scores: Callable[[Tensor], Tensor]) -> Tensor | None:
        """The second factor of the bias, [r, D], if `scores` gives the logits [..., D] of normed states [..., H]; None
        without a bias."""

    @abstractmethod
    def confident(self, states: Tensor) -> Tensor | None:
        """Outputs of `after` -> logit [...] of the chance that the target accepts the draft, if it accepts those
        before; None: the head has no such output. The training of it does not change the rest of the head."""


@dataclass(frozen=True)
class BlockConfig(BlockDraftConfig):
    """Every place of a block drafts. Raises ValueError as `BlockDraftConfig`, and for a rank below 1."""

    kind = "block"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.markov_rank < 1:
            raise ValueError(f"block config: markov_rank is {self.markov_rank}; at least 1 is needed")

    def serving_keys(self) -> dict[str, Any]:
        # No other engine reads this form, so no existing architecture name fits.
        return {"architectures": ["BlockDraftHead"], "model_type": "block_draft_head"}


class BlockHead(BlockDraftHead):
    """`fc` (the keys' and the query's part of the features), `query`, `mask`, `layers.N.*`, `norm`, `lm_head`,
    `markov_in`, `markov_out`, `confidence`. The embedding is the target's."""

    config_class = BlockConfig
    config: BlockConfig

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        width, rank = config.hidden_size, config.markov_rank
        self.fc = nn.Linear(config.feature_size, 2 * width, bias=False)
        self.query = nn.Linear(width, width, bias=False)
        self.mask = nn.Embedding(config.block_size - 1, width)
        self.layers = nn.ModuleList(DecoderLayer(config, attention_bias=False) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(width, eps=config.rms_norm_eps)
        self.lm_head = OutputMatrix(width, config.draft_vocab_size, bias=False)
        self.markov_norm = RMSNorm(width, eps=config.rms_norm_eps)
        self.markov_in = nn.Linear(width, rank, bias=False)
        self.markov_out = nn.Linear(rank, width, bias=False)
        self.confidence = nn.Linear(width, 1)
        self.rope = Rope(config.rope_parameters, config.head_dim, config.max_position_embeddings)

    def first_hidden(self, features: Tensor) -> Tensor:
        """Features of the target [..., A*Ht] -> [..., 2H]: the input of the keys and values, and the query's part."""
        return self.fc(features)

    def write_context(self, hidden: Tensor, positions: Tensor, reach: int, write: Write) -> None:
        """As `BlockDraftHead.write_context`; hidden [T, 2H]."""
        state = hidden[..., : self.config.hidden_size]
        cos, sin = self.rope(positions, state, reach)
        layer: Any
        for layer in self.layers:
            write(*layer.self_attn.keys_values(layer.input_layernorm(state), cos, sin))

    def queries(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """As `BlockDraftHead.queries`; hidden [T, 2H]."""
        width, size = self.config.hidden_size, self.config.block_size
        masks = self.mask(torch.arange(size - 1, device=embeds.device)).to(embeds.dtype)
        anchors = embeds.view(-1, size, width)[:, :1]
        x = torch.cat((anchors, masks.expand(len(anchors), -1, -1)), dim=1).flatten(0, 1)
        return self.query(x) + hidden[..., width:]

    # -- logits --------------------------------------------------------------------------------------------------------

    def before(self, tokens: Tensor, embeds: Tensor) -> Tensor:
        return self.markov_in(self.markov_norm(embeds))

    def after(self, states: Tensor, tokens: Tensor, embeds: Tensor) -> Tensor:
        return self.normed(states) + self.markov_out(self.before(tokens, embeds))

    def bias_rows(self, scores: Callable[[Tensor], Tensor]) -> Tensor:
        weight = self.markov_out.weight
        return scores(self.markov_out(torch.eye(self.config.markov_rank, dtype=weight.dtype, device=weight.device)))

    def logits(self, states: Tensor, project: Project = F.linear) -> Any:
        """Outputs of `after` [T, H] -> logits [T, D] with the Markov bias, or the result of `project`."""
        return self.lm_head(states, project)

    def confident(self, states: Tensor) -> Tensor:
        return self.confidence(states.detach()).squeeze(-1)

    def warm_start(self) -> WarmStart:
        """Copy the target's last layers. `fc` gives the input of the first of them at t to the keys; with `query` it
        predicts that input at t+1 from f_t and x_{t+1}, as an EAGLE-3 head's fc does."""
        return WarmStart(
            copies=self.layer_copies(),
            last_norm=("norm.weight", self.norm),
            solved=self.fc,
            solved_reads=lambda _embeds, features: features,
            query=self.query,
            masks=self.mask,
        )
