"""A decoder layer of Llama and the families that share it on a CPU (decoder_layer.cpp): one native call, or for many
new tokens two around the attention. transformers runs some thirty operations for it.

Shapes: B rows, N tokens per row, H hidden size, Hq/Hkv heads, D head dim.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.infer.cpu.blocked_product import BlockedLinear, JoinedProduct
from toolkit.infer.cpu.compile_cpp import load_vectorised
from toolkit.infer.kernels.paged_reference import Scoring

SOURCE = Path(__file__).with_suffix(".cpp")


class _Linear(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("w", "scale", "bias")] + [
        (name, ctypes.c_int64) for name in ("outputs", "inputs")
    ]


class _Norm(ctypes.Structure):
    _fields_ = [("weight", ctypes.c_void_p), ("eps", ctypes.c_double)]


class _Layer(ctypes.Structure):
    _fields_ = (
        [(name, _Linear) for name in ("qkv", "out", "gate_up", "down")]
        + [(name, _Norm) for name in ("before", "after", "queries", "keys")]
        + [(name, ctypes.c_int64) for name in ("hidden", "query_heads", "key_heads", "head_dim", "intermediate")]
    )


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """None if the CPU lacks AVX2 or FMA, or if the library cannot be compiled."""
    library = load_vectorised(SOURCE)
    if library is not None:
        whole, before = library.toolkit_decoder_layer, library.toolkit_before_attention
        after = library.toolkit_after_attention
        whole.argtypes = [ctypes.c_void_p] * 8 + [ctypes.c_double]
        before.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int64]
        after.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64]
        whole.restype = before.restype = after.restype = None
    return library


class DecoderLayer:
    """The forward of one layer. place: its number in the cache. scoring: of its attention."""

    def __init__(self, layer: Any, place: int, scoring: Scoring, library: ctypes.CDLL) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._place, self._scoring = place, scoring
        self._whole = library.toolkit_decoder_layer
        self._before, self._after = library.toolkit_before_attention, library.toolkit_after_attention
        width, hidden = attention.head_dim, attention.q_proj.in_features
        queries, keys = attention.q_proj.out_features // width, attention.k_proj.out_features // width
        self._heads, self._width = (queries, keys, keys), width
        norms = layer.input_layernorm, layer.post_attention_layernorm
        of_heads = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        self._layer = _Layer(
            *map(_linear, (attention.q_proj, attention.o_proj, mlp.gate_proj, mlp.down_proj)),
            *map(_norm, (*norms, *of_heads)), hidden, queries, keys, width, mlp.down_proj.in_features,
        )  # fmt: skip
        self._address = ctypes.addressof(self._layer)
        # C++ has their addresses.
        self._held = [*layer.parameters(), *layer.buffers(), attention.q_proj.joined, mlp.gate_proj.joined]

    def __call__(
        self,
        hidden_states: Tensor,
        *_unused: Any,
        position_embeddings: tuple[Tensor, Tensor],
        attention_metadata: Any,
        **_more: Any,
    ) -> Tensor:
        """hidden_states [B, N, H] -> [B, N, H]; position_embeddings: cos and sin [B, N, D]."""
        x, (rows, tokens, _) = hidden_states.contiguous(), hidden_states.shape
        cos, sin = position_embeddings
        if len(cos) != rows:
            cos, sin = cos.expand(rows, -1, -1).contiguous(), sin.expand(rows, -1, -1).contiguous()
        out, rotation = torch.empty_like(x), (cos.data_ptr(), sin.data_ptr())
        in_place = attention_metadata.row_attention(self._place, self._scoring, x.dtype)
        if in_place is not None:
            attention, keys, values = in_place
            attention.check(rows, tokens)
            self._whole(
                self._address, ctypes.addressof(attention.rows), x.data_ptr(), *rotation, keys.data_ptr(),
                values.data_ptr(), out.data_ptr(), self._scoring.scaling,
            )  # fmt: skip
            return out
        qkv, count = x.new_empty(rows, tokens, sum(self._heads), self._width), rows * tokens
        self._before(self._address, x.data_ptr(), *rotation, qkv.data_ptr(), count)
        q, k, v = qkv.transpose(1, 2).split_with_sizes(self._heads, 1)
        attended = attention_metadata.attend(self._place, q, k, v, self._scoring).contiguous()
        self._after(self._address, x.data_ptr(), attended.data_ptr(), out.data_ptr(), count)
        return out


def decoder_layer(layer: Any, place: int, scoring: Scoring) -> DecoderLayer | None:
    """The layer in native calls; None unless its weights are packed for them.

    layer: of Llama's parts. Its weights may change in place later.
    """
    library, attention, mlp = load_library(), layer.self_attn, layer.mlp
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    packed = all(isinstance(one, BlockedLinear) and one.blocked for one in linears)
    parts = (one for one in layer.modules() if one is not layer)
    hooked = any(one._forward_hooks or one._forward_pre_hooks for one in parts)
    if library is None or hooked or not packed or any(one.joined is None for one in (attention.q_proj, mlp.gate_proj)):
        return None
    lanes = mlp.gate_proj.blocks.shape[2] // 2
    fits = attention.head_dim % (2 * lanes) == 0 and layer.input_layernorm.weight.numel() % lanes == 0
    return DecoderLayer(layer, place, scoring, library) if fits else None


def _linear(linear: BlockedLinear) -> _Linear:
    of: BlockedLinear | JoinedProduct = linear if linear.joined is None else linear.joined
    outputs = linear.out_features if linear.joined is None else linear.joined.outputs
    scale = linear.block_scale if linear.joined is None else linear.joined.scale
    addresses = [None if one is None else one.data_ptr() for one in (of.blocks, scale, of.bias)]
    return _Linear(*addresses, outputs, linear.in_features)


def _norm(norm: Any) -> _Norm:
    return _Norm(None, 0) if norm is None else _Norm(norm.weight.data_ptr(), norm.variance_epsilon)
