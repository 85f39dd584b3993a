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
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from toolkit.models.rope import Rope, rotate

# q [T, heads, hd], k and v [T, kv_heads, hd], rotated -> [T, heads, hd]; the scale 1/sqrt(hd) is the attention's job.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Eagle3Config:
    """Everything that fixes the head's shapes and arithmetic. `aux_layer_ids` index HF `hidden_states`."""

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    draft_vocab_size: int
    max_position_embeddings: int
    rope_parameters: dict[str, Any]
    aux_layer_ids: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "aux_layer_ids": list(self.aux_layer_ids)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Eagle3Config:
        return cls(**{**values, "aux_layer_ids": tuple(values["aux_layer_ids"])})

    @classmethod
    def from_target_config(
        cls, config: Any, *, vocab_size: int, draft_vocab_size: int, aux_layer_ids: tuple[int, ...]
    ) -> Eagle3Config:
        """A head as wide as the target: `config` is the target's (text) configuration."""
        heads = config.num_attention_heads
        return cls(
            hidden_size=config.hidden_size,
            target_hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=heads,
            num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
            vocab_size=vocab_size,
            draft_vocab_size=draft_vocab_size,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=full_attention_rope(config),
            aux_layer_ids=tuple(aux_layer_ids),
        )


def full_attention_rope(config: Any) -> dict[str, Any]:
    """The target's rope settings; where layers differ (Gemma 3), those of its full-attention layers."""
    rope = dict(getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0})
    rope = dict(rope.get("full_attention", rope))
    # A partial rotary factor belongs to the target's own attention; the head rotates whole heads.
    rope.pop("partial_rotary_factor", None)
    return rope


class Attention(nn.Module):
    """Projections of width 2H in (embedding and hidden side by side) and H out."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        q = rotate(self.q_proj(x).unflatten(-1, (-1, self.head_dim)), cos, sin)
        k = rotate(self.k_proj(x).unflatten(-1, (-1, self.head_dim)), cos, sin)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        return self.o_proj(attend(q, k, v).flatten(-2))


class GatedMLP(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """One decoder layer whose attention reads the token's embedding beside the hidden state (embedding first)."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        x = torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), dim=-1)
        hidden = hidden + self.self_attn(x, cos, sin, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Head(nn.Module):
    """EAGLE-3's head with EAGLE's names: `fc`, `midlayer.*`, `norm`, `lm_head`. The embedding is the target's."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.aux_layer_ids) * config.target_hidden_size, config.hidden_size, bias=False)
        self.midlayer = DraftLayer(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rope = Rope(config.rope_parameters, config.head_dim, config.max_position_embeddings)

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        """Features of the target [T, A*Ht] -> the head's hidden state [T, H]."""
        return self.fc(aux)

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend, reach: int
    ) -> torch.Tensor:
        """One pass of the draft layer.

        embeds [T, H]: embedding of the token after each position; hidden [T, H]: fused feature, or the head's
        own output of the step before; positions [T] int64, all below `reach`. Returns [T, H] before the final norm:
        the next step's `hidden` and what `logits` reads.
        """
        cos, sin = self.rope(positions, embeds, reach)
        return self.midlayer(embeds, hidden, cos, sin, attend)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, D] over the draft vocabulary."""
        return self.lm_head(self.norm(hidden))
