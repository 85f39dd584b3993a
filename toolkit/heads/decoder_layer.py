"""The common parts of draft heads: a Llama-like decoder layer that takes its attention as an argument.

Inputs are token-major, without caches, masks or step counters.

Shapes: T tokens, H hidden size, hd head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import nn

from toolkit.heads.head_config import HeadConfig
from toolkit.heads.layer_ops import RMSNorm, layer_ops

# q [T, heads, hd], k and v [T, kv_heads, hd], q and k rotated -> [T, heads, hd]. The attention applies the scale
# 1/sqrt(hd). Values may be narrower than keys; so is then the result. Called once per attention layer of a pass, in
# order.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class KVSizes(NamedTuple):
    """Sizes of the keys and values of one position in an attention layer."""

    kv_heads: int
    key_dim: int
    value_dim: int


class Attention(nn.Module):
    """Grouped-query attention from `input_size` to H. bias: of q, k and v.

    qk_norm: RMSNorm of each head's query and key before the rotation (Qwen3).
    """

    def __init__(self, config: HeadConfig, input_size: int, bias: bool = False, *, qk_norm: bool = False) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, q_size, bias=bias)
        self.k_proj = nn.Linear(input_size, kv_size, bias=bias)
        self.v_proj = nn.Linear(input_size, kv_size, bias=bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)
        self.qk_norm = qk_norm
        if qk_norm:
            self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        return self.o_proj(attend(*self.heads(x, cos, sin)).flatten(-2))

    def heads(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The arguments of an `Attend`; x [T, input_size]."""
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return *layer_ops().rotate(q, k, cos, sin), v

    def keys_values(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys, rotated, and values [T, kv_heads, hd] of positions without a query; x [T, input_size]."""
        k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.k_proj, self.v_proj))
        k = self.k_norm(k) if self.qk_norm else k
        return layer_ops().rotate(k, k, cos, sin)[1], v


class GatedMLP(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(layer_ops().gated(self.gate_proj(x), self.up_proj(x)))


class AttendingLayer(nn.Module):
    """A layer that takes its attention as an argument.

    norm_before_attention: the name of its counterpart of Llama's `input_layernorm`."""

    norm_before_attention: ClassVar[str] = "input_layernorm"


class DecoderLayer(AttendingLayer):
    """Llama's decoder layer. Without `input_norm` its attention reads the residual stream without a norm."""

    def __init__(
        self, config: HeadConfig, *, attention_bias: bool, input_norm: bool = True, qk_norm: bool = False
    ) -> None:
        super().__init__()
        if input_norm:
            self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.input_norm = input_norm
        self.self_attn = Attention(config, config.hidden_size, attention_bias, qk_norm=qk_norm)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        read = self.input_layernorm(x) if self.input_norm else x
        x = x + self.self_attn(read, cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))
