"""The common parts of draft heads: a Llama-like decoder layer that takes its attention as an argument, its rotary
embedding, and the small operations between its products.

Inputs are token-major, without caches, masks or step counters. The functions `rotate`, `gated` and `rms_norm` define
the small operations. Training, and serving on a CPU, run them; serving on a GPU hands in kernels by `using`.

Shapes: T tokens, H hidden size, hd head dim, I intermediate size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

from toolkit.heads.head_config import HeadConfig

# In the other types the frequencies depend on the sequence length, so a table cannot hold them.
STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

# q [T, heads, hd], k and v [T, kv_heads, hd], q and k rotated -> [T, heads, hd]. The attention applies the scale
# 1/sqrt(hd). Values may be narrower than keys; so is then the result. Called once per attention layer of a pass, in
# order.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class KVSizes(NamedTuple):
    """Sizes of the keys and values of one position in an attention layer."""

    kv_heads: int
    key_dim: int
    value_dim: int


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the rotary embedding to q [T, heads, hd] and k [T, kv_heads, hd]; cos and sin [T, 1, hd]."""
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """The product of SwiGLU (arXiv 2002.05202): silu(gate) * up, [T, I] each."""
    return F.silu(gate) * up


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm (arXiv 1910.07467) of x [..., H] by weight [H]."""
    return F.rms_norm(x, weight.shape, weight, eps)


class LayerOps(NamedTuple):
    """The functions of this module, or kernels that compute the same without gradients."""

    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = rotate
    gated: Callable[[Tensor, Tensor], Tensor] = gated
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm


PLAIN = LayerOps()


class RMSNorm(nn.RMSNorm):
    """torch's norm, by the operations that layers use now."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None, "a head states the epsilon of its norms"
        return layer_ops().rms_norm(x, self.weight, self.eps)


class _Current(threading.local):
    """The operations of this thread."""

    ops: LayerOps = PLAIN


_current = _Current()


def layer_ops() -> LayerOps:
    """The operations that layers use now. A compiled layer uses the plain ones, which the compiler fuses."""
    return PLAIN if torch.compiler.is_compiling() else _current.ops


@contextmanager
def using(ops: LayerOps) -> Iterator[None]:
    """Context manager: the layers of this thread use `ops`."""
    before, _current.ops = _current.ops, ops
    try:
        yield
    finally:
        _current.ops = before


class Rope:
    """Rotary position embedding (arXiv 2104.09864) of Hugging Face's Llama, with its scaling rules.

    cos/sin tables, computed in fp32. Not a module: a cast of the head to bf16 must not round the frequencies.

    inv_freq: [head_dim / 2], after scaling. scaling: the factor of cos and sin.
    """

    def __init__(self, rope_parameters: dict[str, Any], head_dim: int, max_position_embeddings: int) -> None:
        rope_type = rope_parameters.get("rope_type", "default")
        if rope_type not in STATIC_ROPE_TYPES:
            raise ValueError(
                f"rope_type {rope_type!r} is not supported in a draft head; {', '.join(STATIC_ROPE_TYPES)} are"
            )
        try:
            config = LlamaConfig(
                hidden_size=head_dim,
                num_attention_heads=1,
                head_dim=head_dim,
                max_position_embeddings=max_position_embeddings,
                rope_parameters=dict(rope_parameters),
            )
            with torch.device("cpu"):  # a head on the meta device has frequencies too
                source = LlamaRotaryEmbedding(config)
        except Exception as error:  # whatever transformers makes of a wrong or missing value
            raise ValueError(f"rope {rope_parameters} cannot be used: {' '.join(str(error).split())}") from error
        self.inv_freq = source.inv_freq.float()
        self.scaling = float(source.attention_scaling)
        self._tables: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        # A CUDA graph reads the table of its capture by address, so old tables are kept. Sizes double, so all old
        # tables together are smaller than the newest.
        self._outgrown: list[Tensor] = []

    def __call__(self, positions: Tensor, like: Tensor, reach: int) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, head_dim] for `positions` [T] on `like`'s device, in its dtype; positions < `reach`."""
        cos, sin = self._table(like, reach)[positions].chunk(2, dim=-1)
        return cos, sin

    def _table(self, like: Tensor, reach: int) -> Tensor:
        """cos and sin side by side, [S, 1, 2 * head_dim], of positions 0 .. S-1, S >= `reach`."""
        key = (like.device, like.dtype)
        if key not in self._tables or len(self._tables[key]) < reach:
            size = max(512, 1 << (reach - 1).bit_length())
            angles = torch.outer(torch.arange(size, dtype=torch.float32), self.inv_freq.to("cpu"))
            angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
            if key in self._tables:
                self._outgrown.append(self._tables[key])
            self._tables[key] = (torch.cat((angles.cos(), angles.sin()), dim=-1) * self.scaling).to(*key)
        return self._tables[key]


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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        return self.o_proj(attend(*self.heads(x, cos, sin)).flatten(-2))

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """The arguments of an `Attend`; x [T, input_size]."""
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return *layer_ops().rotate(q, k, cos, sin), v

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
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

    def forward(self, x: Tensor) -> Tensor:
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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """[T, H] -> [T, H]."""
        x = x + self.self_attn(self.read(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))

    def read(self, x: Tensor) -> Tensor:
        """The input of the attention."""
        return self.input_layernorm(x) if self.input_norm else x

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values that `forward` hands to `attend`."""
        return self.self_attn.keys_values(self.read(x), cos, sin)
