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

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.heads.aux_config import AuxHeadConfig
from toolkit.heads.decoder_layer import Attend, DecoderLayer
from toolkit.heads.draft_head import DraftHead, LayerCopy, OutputMatrix, Project, WarmStart
from toolkit.heads.head_config import HeadError
from toolkit.heads.rope import Rope

# Keys [T, kv_heads, hd], rotated, and values of the context in one layer. Called once per layer, in order.
Write = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True)
class BlockConfig(AuxHeadConfig):
    """block_size: tokens that one pass drafts, b, the deepest served draft. markov_rank: r.

    Raises ValueError for less than two tokens, a rank below 1, and a sliding window.
    """

    kind = "block"
    own_settings = ("markov_rank",)

    block_size: int = 4
    markov_rank: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("block_size", 2), ("markov_rank", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"block config: {name} is {getattr(self, name)}; at least {least} is needed")
        if self.sliding_window is not None:
            raise ValueError(
                f"block config: sliding_window is {self.sliding_window}, but a block sees all its context; leave it out"
            )

    @property
    def drafts_at_once(self) -> int:
        return self.block_size

    def for_steps(self, steps: int) -> BlockConfig:
        if steps < 2:
            raise HeadError(f"train.unroll.ttt_steps is {steps}; a block has at least 2 tokens")
        return replace(self, block_size=steps)

    def serving_keys(self) -> dict[str, Any]:
        # No other engine reads this form, so no existing architecture name fits.
        return {"architectures": ["BlockDraftHead"], "model_type": "block_draft_head"}


class BlockHead(DraftHead):
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
        self.norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.lm_head = OutputMatrix(width, config.draft_vocab_size, bias=False)
        self.markov_norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.markov_in = nn.Linear(width, rank, bias=False)
        self.markov_out = nn.Linear(rank, width, bias=False)
        self.confidence = nn.Linear(width, 1)
        self.rope = Rope(config.rope_parameters, config.head_dim, config.max_position_embeddings)

    def first_hidden(self, features: Tensor) -> Tensor:
        """Features of the target [..., A*Ht] -> [..., 2H]: the input of the keys and values, and the query's part."""
        return self.fc(features)

    def write_context(self, hidden: Tensor, positions: Tensor, reach: int, write: Write) -> None:
        """Give the keys and values of known positions to `write`, layer by layer.

        hidden [T, 2H]: of `first_hidden`; positions [T] int64, all below `reach`."""
        state = hidden[..., : self.config.hidden_size]
        cos, sin = self.rope(positions, state, reach)
        layer: Any
        for layer in self.layers:
            write(*layer.self_attn.keys_values(layer.input_layernorm(state), cos, sin))

    def forward(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, reach: int, stage: int = 0
    ) -> Tensor:
        """Draft n blocks in one pass; T = n*b, block by block.

        embeds [T, H]: of the token x_{t+1} at the first place of a block; the others are not read. hidden [T, 2H]: of
        f_t, at every place. positions [T]: t+1, t+2, .. Returns [T, H], the input of `read`.
        """
        width, size = self.config.hidden_size, self.config.block_size
        masks = self.mask(torch.arange(size - 1, device=embeds.device)).to(embeds.dtype)
        anchors = embeds.view(-1, size, width)[:, :1]
        x = torch.cat((anchors, masks.expand(len(anchors), -1, -1)), dim=1).flatten(0, 1)
        x = self.query(x) + hidden[..., width:]
        cos, sin = self.rope(positions, embeds, reach)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return x

    # -- logits --------------------------------------------------------------------------------------------------------

    def normed(self, states: Tensor) -> Tensor:
        return self.norm(states)

    def after(self, states: Tensor, embeds: Tensor) -> Tensor:
        """Outputs of `read` [..., H] and the embeddings [..., H] of the tokens before the predicted ones -> the input
        of the output matrix and of `confident`, [..., H]."""
        return self.normed(states) + self.markov_out(self.before(embeds))

    def before(self, embeds: Tensor) -> Tensor:
        """What the Markov bias reads of the token before: embeddings [..., H] -> [..., r]."""
        return self.markov_in(self.markov_norm(embeds))

    def logits(self, states: Tensor, project: Project = F.linear) -> Any:
        """Outputs of `after` [T, H] -> logits [T, D] with the Markov bias, or the result of `project`."""
        return self.lm_head(states, project)

    def confident(self, states: Tensor) -> Tensor:
        """Outputs of `after` [..., H] -> logit [...] of the chance that the target accepts the draft, if it
        accepts those before. The training of it does not change the head."""
        return self.confidence(states.detach()).squeeze(-1)

    def warm_start(self) -> WarmStart:
        """Copy the target's last layers. `fc` gives the input of the first of them at t to the keys; with `query` it
        predicts that input at t+1 from f_t and x_{t+1}, as an EAGLE-3 head's fc does."""
        count = len(self.layers)
        return WarmStart(
            copies=[
                LayerCopy(layer, number - count, prefix=f"layers.{number}.") for number, layer in enumerate(self.layers)
            ],
            last_norm=("norm.weight", self.norm),
            solved=self.fc,
            solved_reads=lambda _embeds, features: features,
            query=self.query,
            masks=self.mask,
        )
