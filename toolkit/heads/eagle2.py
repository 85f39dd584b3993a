"""The draft head of EAGLE and EAGLE-2 (arXiv 2401.15077, 2406.16858): one architecture, two ways to draft with it.

Token-major, no caches, no masks, no step counters: the attention is handed in.

Shapes: T tokens, H hidden size (the target's), V target vocabulary.

The feature is the target's hidden state AFTER its final norm, which the output matrix reads. The head predicts the
next feature from (feature of position i, embedding of token i+1); the target's own output matrix turns it into a token:

    position         i          i+1         i+2
    token            x_i        x_{i+1}     x_{i+2}  <- predicted, by the target's lm_head from f'_{i+1}
    embedding                   e_{i+1}
    feature          f_i        f'_{i+1}    (the head's output, which the next step reads in the place of f_{i+1})
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from toolkit.heads.decoder_layer import Attend, DecoderLayer
from toolkit.heads.head_config import HeadConfig, layer_like_target
from toolkit.heads.rope import Rope


@dataclass(frozen=True)
class Eagle2Config(HeadConfig):
    """fc_bias: `fc` has a bias (EAGLE's `bias`). attention_bias: q, k and v have one (EAGLE's `qkv_bias`)."""

    num_hidden_layers: int = 1
    fc_bias: bool = True
    attention_bias: bool = False

    @classmethod
    def from_target_config(cls, config: Any, *, vocab_size: int, **own: Any) -> Eagle2Config:
        """A head for the target of this (text) configuration; `own` are the fields above."""
        return cls(**layer_like_target(config, vocab_size), **own)


class Eagle2Head(nn.Module):
    """EAGLE's names: `fc`, `layers.N.*`. Embedding and output matrix are the target's."""

    def __init__(self, config: Eagle2Config) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        # EAGLE's first layer reads fc's output without a norm.
        self.layers = nn.ModuleList(
            DecoderLayer(config, attention_bias=config.attention_bias, input_norm=number > 0)
            for number in range(config.num_hidden_layers)
        )
        self.rope = Rope(config.rope_parameters, config.head_dim, config.max_position_embeddings)

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend, reach: int
    ) -> torch.Tensor:
        """One pass: embeds [T, H] of the token after each position, hidden [T, H] its feature, positions [T] < reach.

        Returns the next feature [T, H]: what the target's output matrix reads, and the next step's `hidden`.
        """
        cos, sin = self.rope(positions, embeds, reach)
        x = self.fc(torch.cat((embeds, hidden), dim=-1))
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return x
