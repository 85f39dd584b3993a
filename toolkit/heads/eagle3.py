"""The EAGLE-3 draft head (arXiv 2503.01840): its parameters and arithmetic, the same file for training and serving.

Token-major, no caches, no masks, no step counters: the attention is handed in.

Shapes: T tokens, Ht target hidden size, H head hidden size, A auxiliary layers, D draft vocabulary, hd head dim.

One token of input at position i is the pair (feature of position i, embedding of token i+1); its logits are over
token i+2:

    position         i          i+1         i+2
    token            x_i        x_{i+1}     x_{i+2}  <- predicted
    embedding                   e_{i+1}
    feature          f_i
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from toolkit.heads.decoder_layer import Attend, Attention, DecoderLayer, GatedMLP
from toolkit.heads.head_config import HeadConfig, layer_like_target
from toolkit.heads.rope import Rope


@dataclass(frozen=True)
class Eagle3Config(HeadConfig):
    """Everything that fixes the head's shapes and arithmetic. `aux_layer_ids` index HF `hidden_states`.

    The rest are the variants that published heads differ in; the defaults are EAGLE-3's own.
    fc_norm: one RMSNorm per feature before `fc` (EAGLE-3.1). norm_before_fc: one RMSNorm over all features side by side
    (`input_norm`, NVIDIA's gpt-oss heads). norm_before_residual: the layer's residual is the normed hidden state
    (speculators). norm_output: the next step reads the state after the final norm (EAGLE-3.1). qk_norm: RMSNorm over
    each query's and key's hd (Qwen3's layer). num_hidden_layers: layers, those after the first plain decoder layers
    over its output, without the embedding (speculators, vLLM). Raises ValueError for fc_norm with norm_before_fc, and
    for less than one layer.
    """

    target_hidden_size: int
    draft_vocab_size: int
    aux_layer_ids: tuple[int, ...]
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    fc_bias: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    num_hidden_layers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_hidden_layers < 1:
            raise ValueError(f"eagle3 config: num_hidden_layers is {self.num_hidden_layers}; at least 1 is needed")
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("eagle3 config: fc_norm and norm_before_fc are both set; one norm before fc is possible")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Eagle3Config:
        return cls(**{**values, "aux_layer_ids": tuple(values["aux_layer_ids"])})

    @classmethod
    def from_target_config(
        cls, config: Any, *, vocab_size: int, draft_vocab_size: int, aux_layer_ids: tuple[int, ...], **own: Any
    ) -> Eagle3Config:
        """A head as wide as the target: `config` is the target's (text) configuration, `own` are variants above."""
        return cls(
            **layer_like_target(config, vocab_size),
            target_hidden_size=config.hidden_size,
            draft_vocab_size=draft_vocab_size,
            aux_layer_ids=tuple(aux_layer_ids),
            **own,
        )


class DraftLayer(nn.Module):
    """The first layer, whose attention reads the token's embedding beside the hidden state (embedding first)."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm_before_residual = config.norm_before_residual
        # Embedding and hidden state side by side: twice the width.
        self.self_attn = Attention(config, 2 * config.hidden_size, config.attention_bias, qk_norm=config.qk_norm)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        normed = self.hidden_norm(hidden)
        x = torch.cat((self.input_layernorm(embeds), normed), dim=-1)
        hidden = (normed if self.norm_before_residual else hidden) + self.self_attn(x, cos, sin, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


# Normed states [T, H] and the output matrix [D, H] -> logits [T, D]; training hands in what needs no logits of all T.
Project = Callable[[torch.Tensor, torch.Tensor], Any]


class OutputMatrix(nn.Linear):
    """A linear layer whose product is handed in: a trainer that shards weights has them whole in a forward alone."""

    takes_product = True

    def forward(self, input: torch.Tensor, project: Project = F.linear) -> Any:
        return project(input, self.weight)


class Eagle3Head(nn.Module):
    """EAGLE-3's head with EAGLE's names: `fc`, `midlayer.*`, `norm`, `lm_head`. The embedding is the target's.

    Layers after the first are `layers.1.*` and so on, as speculators and vLLM count them.
    """

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        layers, width, eps = len(config.aux_layer_ids), config.target_hidden_size, config.rms_norm_eps
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(layers * width, eps=eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(width, eps=eps) for _ in range(layers))
        self.fc = nn.Linear(layers * width, config.hidden_size, bias=config.fc_bias)
        self.midlayer = DraftLayer(config)
        self.layers = nn.ModuleDict(
            {
                str(number): DecoderLayer(config, attention_bias=config.attention_bias, qk_norm=config.qk_norm)
                for number in range(1, config.num_hidden_layers)
            }
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = OutputMatrix(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rope = Rope(config.rope_parameters, config.head_dim, config.max_position_embeddings)

    def before_fc(self, aux: torch.Tensor) -> torch.Tensor:
        """Features of the target [T, A*Ht] -> what `fc` reads of them, [T, A*Ht]."""
        if self.config.norm_before_fc:
            aux = self.input_norm(aux)
        if self.config.fc_norm:
            chunks = aux.chunk(len(self.fc_norm), dim=-1)
            aux = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return aux

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        """Features of the target [T, A*Ht] -> the head's hidden state [T, H]."""
        return self.fc(self.before_fc(aux))

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend, reach: int
    ) -> torch.Tensor:
        """One pass of the draft layers.

        embeds [T, H]: embedding of the token after each position; hidden [T, H]: fused feature, or the head's
        own output of the step before; positions [T] int64, all below `reach`. Returns [T, H], before the final norm
        unless `norm_output`: the next step's `hidden` and what `logits` reads.
        """
        cos, sin = self.rope(positions, embeds, reach)
        hidden = self.midlayer(embeds, hidden, cos, sin, attend)
        for layer in self.layers.values():
            hidden = layer(hidden, cos, sin, attend)
        return self.norm(hidden) if self.config.norm_output else hidden

    def logits(self, hidden: torch.Tensor, project: Project = F.linear) -> Any:
        """[T, H] -> [T, D] over the draft vocabulary, or whatever `project` makes of the normed states."""
        return self.lm_head(hidden if self.config.norm_output else self.norm(hidden), project)
