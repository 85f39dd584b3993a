"""Multi-token prediction layers in DeepSeek-V3's form (arXiv 2412.19437, section 2.2), with a Llama-like decoder layer.

Token-major, no caches, no masks, no step counters: the attention is handed in.

Shapes: T tokens, H hidden size (the target's).

Layer k (from 0) reads at position i the hidden state that layer k-1 left there (layer 0: the target's) and the
embedding of token i+1+k; the target's output matrix turns its normed output into token i+2+k:

    position i           layer 0             layer 1             layer 2
    hidden state         target's h_i        layer 0's at i      layer 1's at i
    embedding            x_{i+1}             x_{i+2}             x_{i+3}
    predicts             x_{i+2}             x_{i+3}             x_{i+4}

With fewer layers than steps the last layer is recursed: at position i+1 it reads its own state of position i, and the
token it predicted there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from toolkit.heads.decoder_layer import Attend, DecoderLayer
from toolkit.heads.head_config import HeadConfig, layer_like_target
from toolkit.heads.rope import Rope

NormSide = Literal["post_norm", "pre_norm"]


@dataclass(frozen=True)
class MtpConfig(HeadConfig):
    """The choices in which published MTP layers differ; the defaults are DeepSeek-V3's as SGLang serves it.

    num_mtp_layers: layer k drafts level k+1, the last one all further levels.
    embedding_first: `eh_proj` reads (embedding, hidden); MiMo-7B reads (hidden, embedding).
    target_hidden: the target's state before or after its final norm. state: a layer's state before or after its own
    `shared_head.norm`; this is what the next layer, or the recursion, reads. The output matrix always reads it normed.
    zero_first_embedding: the embedding at position 0 is zeroed (MiMo, and vLLM's DeepSeek).
    Raises ValueError for a choice that does not exist.
    """

    num_mtp_layers: int = 1
    embedding_first: bool = True
    target_hidden: NormSide = "post_norm"
    state: NormSide = "post_norm"
    zero_first_embedding: bool = False
    attention_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("target_hidden", "state"):
            if getattr(self, name) not in ("post_norm", "pre_norm"):
                raise ValueError(f"mtp config: {name} is {getattr(self, name)!r}; post_norm or pre_norm is needed")
        if self.num_mtp_layers < 1:
            raise ValueError(f"mtp config: num_mtp_layers is {self.num_mtp_layers}; at least 1 is needed")

    @classmethod
    def from_target_config(cls, config: Any, *, vocab_size: int, **own: Any) -> MtpConfig:
        """A head for the target of this (text) configuration; `own` are the fields above."""
        return cls(**layer_like_target(config, vocab_size), **own)


class MtpLayer(DecoderLayer):
    """One MTP layer: DeepSeek's names, its decoder layer's parts standing in place."""

    def __init__(self, config: MtpConfig) -> None:
        super().__init__(config, attention_bias=config.attention_bias)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = nn.RMSNorm(size, eps=eps)
        self.hnorm = nn.RMSNorm(size, eps=eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.shared_head = nn.ModuleDict({"norm": nn.RMSNorm(size, eps=eps)})


class MtpHead(nn.Module):
    """`layers.N.{enorm, hnorm, eh_proj, self_attn, ..., shared_head.norm}`; embedding and output are the target's."""

    def __init__(self, config: MtpConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(MtpLayer(config) for _ in range(config.num_mtp_layers))
        self.rope = Rope(config.rope_parameters, config.head_dim, config.max_position_embeddings)

    def forward(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        reach: int,
        layer: int = 0,
    ) -> torch.Tensor:
        """One pass of one layer.

        embeds [T, H], hidden [T, H] as drawn above, positions [T] int64 below `reach`. Returns the layer's state
        [T, H]: what the next layer, or its own next step, reads as `hidden`.
        """
        config, module = self.config, self.layer(layer)
        if config.zero_first_embedding:
            embeds = embeds.masked_fill((positions == 0)[:, None], 0.0)
        cos, sin = self.rope(positions, embeds, reach)
        pair = (module.enorm(embeds), module.hnorm(hidden))
        x = module.eh_proj(torch.cat(pair if config.embedding_first else pair[::-1], dim=-1))
        x = module(x, cos, sin, attend)
        return module.shared_head["norm"](x) if config.state == "post_norm" else x

    def normed(self, state: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """A layer's state [T, H] as the target's output matrix reads it."""
        return state if self.config.state == "post_norm" else self.layer(layer).shared_head["norm"](state)

    def layer(self, number: int) -> MtpLayer:
        """Layer `number`, from 0."""
        layer = self.layers[number]
        assert isinstance(layer, MtpLayer), "MtpHead's layers are MTP layers"
        return layer
