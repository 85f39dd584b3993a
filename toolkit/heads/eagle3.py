"""The EAGLE-3 draft head (arXiv 2503.01840).

Shapes: T tokens, Ht target hidden size, H head hidden size, A auxiliary layers, D draft vocabulary, hd head dim.

The input at position i is the pair (feature of position i, embedding of token i+1). The output is the logits of token
i+2:

    position         i          i+1         i+2
    token            x_i        x_{i+1}     x_{i+2}  <- predicted
    embedding                   e_{i+1}
    feature          f_i
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from toolkit.heads.decoder_layer import Attend, AttendingLayer, Attention, DecoderLayer, GatedMLP, RMSNorm, Rope
from toolkit.heads.draft_head import DraftHead, LayerCopy, OutputMatrix, WarmStart
from toolkit.heads.head_config import AuxHeadConfig, EngineNames


@dataclass(frozen=True)
class Eagle3Config(AuxHeadConfig):
    """The head's shapes and arithmetic.

    The fields here are the variants of published heads; the defaults are those of EAGLE-3.
    fc_norm: one RMSNorm per feature before `fc` (EAGLE-3.1).
    norm_before_fc: one RMSNorm over the concatenated features (`input_norm`, NVIDIA's gpt-oss heads).
    norm_before_residual: the layer's residual is the normed hidden state (speculators).
    norm_output: the next step reads the state after the final norm (EAGLE-3.1).
    qk_norm: RMSNorm over hd of each query and key (Qwen3's layer).
    num_hidden_layers: layers after the first are plain decoder layers over its output, without the embedding
        (speculators, vLLM).
    Raises ValueError for fc_norm with norm_before_fc.
    """

    kind = "eagle3"
    engine_names = EngineNames(sglang="EAGLE3", vllm="eagle3", use_eagle3=True)
    own_settings = ("fc_norm", "norm_output")

    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    fc_bias: bool = False
    attention_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("eagle3 config: fc_norm and norm_before_fc are both set; one norm before fc is possible")


class DraftLayer(AttendingLayer):
    """The first layer. Its attention reads the concatenation (embedding of the token, hidden state)."""

    norm_before_attention = "hidden_norm"

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = Attention(config, 2 * config.hidden_size, config.attention_bias, qk_norm=config.qk_norm)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        *heads, hidden = self.before(embeds, hidden, cos, sin)
        return self.after(attend(*heads), hidden)

    # Two functions of tensors, so that they can be compiled around an attention that cannot.
    def before(
        self, embeds: torch.Tensor, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The arguments of an `Attend`, and the residual [T, H]."""
        x, normed = self.pair(embeds, hidden)
        return *self.self_attn.heads(x, cos, sin), normed if self.norm_before_residual else hidden

    def pair(self, embeds: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The input of the attention [T, 2H], and the normed hidden state."""
        normed = self.hidden_norm(hidden)
        return torch.cat((self.input_layernorm(embeds), normed), dim=-1), normed

    def after(self, attended: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.self_attn.o_proj(attended.flatten(-2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Head(DraftHead):
    """The EAGLE-3 head with EAGLE's parameter names: `fc`, `midlayer.*`, `norm`, `lm_head`.

    Layers after the first are `layers.1.*` and so on, as in speculators and vLLM. The embedding is the target's.
    """

    config_class = Eagle3Config
    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        layers, width, eps = len(config.aux_layer_ids), config.target_hidden_size, config.rms_norm_eps
        if config.norm_before_fc:
            self.input_norm = RMSNorm(layers * width, eps=eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(width, eps=eps) for _ in range(layers))
        self.fc = nn.Linear(layers * width, config.hidden_size, bias=config.fc_bias)
        self.midlayer = DraftLayer(config)
        self.layers = nn.ModuleDict(
            {
                str(number): DecoderLayer(config, attention_bias=config.attention_bias, qk_norm=config.qk_norm)
                for number in range(1, config.num_hidden_layers)
            }
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = OutputMatrix(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rope = Rope(config.rope_parameters, config.head_dim, config.max_position_embeddings)

    def before_fc(self, features: Tensor) -> Tensor:
        """Features of the target [..., A*Ht] -> input of `fc` [..., A*Ht]."""
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            chunks = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return features

    def first_hidden(self, features: Tensor) -> Tensor:
        return self.fc(self.before_fc(features))

    def forward(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, reach: int, mtp_layer: int = 0
    ) -> Tensor:
        """As `DraftHead.forward`. The result is before the final norm unless `norm_output`."""
        cos, sin = self.rope(positions, embeds, reach)
        hidden = self.midlayer(embeds, hidden, cos, sin, attend)
        for layer in self.layers.values():
            hidden = layer(hidden, cos, sin, attend)
        return self.norm(hidden) if self.config.norm_output else hidden

    @property
    def writes_alone(self) -> bool:
        return not self.layers

    def keys_values(self, embeds: Tensor, hidden: Tensor, positions: Tensor, reach: int) -> tuple[Tensor, Tensor]:
        x, _ = self.midlayer.pair(embeds, hidden)
        return self.midlayer.self_attn.keys_values(x, *self.rope(positions, embeds, reach))

    def normed(self, states: Tensor) -> Tensor:
        return states if self.config.norm_output else self.norm(states)

    def warm_start(self) -> WarmStart:
        """Copy the target's last n layers into a head of n layers, which predicts one position ahead."""
        count = self.config.num_hidden_layers
        further = [
            LayerCopy(layer, int(number) - count, prefix=f"layers.{number}.")
            for number, layer in self.layers.items()
            if isinstance(layer, DecoderLayer)
        ]
        return WarmStart(
            copies=[LayerCopy(self.midlayer, -count), *further],
            last_norm=("norm.weight", self.norm),
            solved=self.fc,
            solved_reads=lambda _embeds, features: self.before_fc(features),
        )
