"""A decoder layer of Llama and the families that share it, or of a draft head, on a CPU (decoder_layer.cpp): one native
call, or for many new tokens two around the attention. In torch it takes some thirty operations.

Shapes: B rows, N tokens per row, T = B*N, H hidden size, Hq/Hkv heads, D head dim.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.heads.decoder_layer import rms_norm
from toolkit.infer.cpu.blocked_product import BlockedLinear
from toolkit.infer.cpu.compile_cpp import load_cpp
from toolkit.infer.kernels.paged_reference import Scoring

SOURCE = Path(__file__).with_suffix(".cpp")
LANES = 16  # most numbers of a vector


class _Linear(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("w", "scale", "bias")] + [
        (name, ctypes.c_int64) for name in ("outputs", "inputs")
    ]


class _Norm(ctypes.Structure):
    _fields_ = [("weight", ctypes.c_void_p), ("eps", ctypes.c_double), ("rounded", ctypes.c_int64)]


class _Layer(ctypes.Structure):
    _fields_ = (
        [(name, _Linear) for name in ("qkv", "out", "gate_up", "down")]
        + [(name, _Norm) for name in ("before", "after", "queries", "keys", "of_embeds")]
        + [
            (name, ctypes.c_int64)
            for name in ("hidden", "query_heads", "key_heads", "head_dim", "intermediate", "adds_normed")
        ]
    )


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """None if the CPU lacks AVX2 or FMA, or if the library cannot be compiled."""
    library = load_cpp(SOURCE)
    if library is not None:
        address, number = ctypes.c_void_p, ctypes.c_int64
        inputs: list[Any] = [address] * 4 + [number]  # x, embeds, cos, sin, stride
        whole, before = library.toolkit_decoder_layer, library.toolkit_before_attention
        after, norm = library.toolkit_after_attention, library.toolkit_rms_norm
        whole.argtypes = [address, address, *inputs, address, address, address, ctypes.c_double]
        before.argtypes = [address, *inputs, address, number]
        after.argtypes = [address, address, address, address, number]
        norm.argtypes = [address, address, ctypes.c_double, address, number, number]
        whole.restype = before.restype = after.restype = norm.restype = None
    return library


class NativeLayer:
    """A layer with Llama's parts. before: the norm before its attention, or None. of_embeds: that of the embeddings,
    for a layer that reads them too. adds_normed: the residual is the normed hidden state."""

    def __init__(
        self, layer: Any, library: ctypes.CDLL, before: Any, of_embeds: Any = None, adds_normed: bool = False
    ) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._whole = library.toolkit_decoder_layer
        self._before, self._after = library.toolkit_before_attention, library.toolkit_after_attention
        width, hidden = attention.head_dim, attention.o_proj.out_features
        queries, keys = attention.q_proj.out_features // width, attention.k_proj.out_features // width
        self._heads, self._width = (queries, keys, keys), width
        of_heads = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        self._layer = _Layer(
            *map(_linear, (attention.q_proj, attention.o_proj, mlp.gate_proj, mlp.down_proj)),
            *map(_norm, (before, layer.post_attention_layernorm, *of_heads, of_embeds)), hidden, queries, keys, width,
            mlp.down_proj.in_features, adds_normed,
        )  # fmt: skip
        self._address = ctypes.addressof(self._layer)
        # C++ has their addresses.
        self._held = [*layer.parameters(), *layer.buffers()]

    def run(
        self,
        x: Tensor,
        embeds: Tensor | None,
        rotation: tuple[Tensor, Tensor],
        stride: int,
        shape: tuple[int, int],
        attend: tuple[Any, int, Scoring],
    ) -> Tensor:
        """x and embeds [T, H], contiguous -> [T, H]; T may be two dimensions.

        rotation: cos and sin [T, D], `stride` from row to row. shape: (B, N). attend: the attention metadata, the
        layer's number in the cache, the scoring.
        """
        (rows, tokens), (metadata, place, scoring), out = shape, attend, torch.empty_like(x)
        of_embeds = None if embeds is None else embeds.data_ptr()
        inputs = (x.data_ptr(), of_embeds, *(one.data_ptr() for one in rotation), stride)
        in_place = metadata.row_attention(place, scoring, x.dtype)
        if in_place is not None:
            attention, keys, values = in_place
            attention.check(rows, tokens)
            self._whole(
                self._address, ctypes.addressof(attention.rows), *inputs, keys.data_ptr(), values.data_ptr(),
                out.data_ptr(), scoring.scaling,
            )  # fmt: skip
            return out
        qkv, count = x.new_empty(rows, tokens, sum(self._heads), self._width), rows * tokens
        self._before(self._address, *inputs, qkv.data_ptr(), count)
        q, k, v = qkv.transpose(1, 2).split_with_sizes(self._heads, 1)
        attended = metadata.attend(place, q, k, v, scoring).contiguous()
        self._after(self._address, x.data_ptr(), attended.data_ptr(), out.data_ptr(), count)
        return out


class DecoderLayer(NativeLayer):
    """The forward of a target's layer. place: its number in the cache. scoring: of its attention."""

    def __init__(self, layer: Any, place: int, scoring: Scoring, library: ctypes.CDLL) -> None:
        super().__init__(layer, library, layer.input_layernorm)
        self._place, self._scoring = place, scoring

    def __call__(
        self,
        hidden_states: Tensor,
        *_unused: Any,
        position_embeddings: tuple[Tensor, Tensor],
        attention_metadata: Any,
        **_more: Any,
    ) -> Tensor:
        """hidden_states [B, N, H] -> [B, N, H]; position_embeddings: cos and sin [B, N, D]."""
        x, rows = hidden_states.contiguous(), len(hidden_states)
        cos, sin = position_embeddings
        if len(cos) != rows:
            cos, sin = cos.expand(rows, -1, -1), sin.expand(rows, -1, -1)
        cos, sin = cos.contiguous(), sin.contiguous()
        where = attention_metadata, self._place, self._scoring
        return self.run(x, None, (cos, sin), cos.shape[2], (rows, x.shape[1]), where)


class HeadLayer(NativeLayer):
    """The forward of a draft head's layer, one of `AttendingLayer`, with its arguments; the last is a `PagedAttend`."""

    def __init__(self, layer: Any, library: ctypes.CDLL) -> None:
        before = getattr(layer, layer.norm_before_attention, None)
        of_embeds = layer.input_layernorm if layer.norm_before_attention != "input_layernorm" else None
        super().__init__(layer, library, before, of_embeds, getattr(layer, "norm_before_residual", False))

    def __call__(self, *given: Any) -> Tensor:
        """(embeds [T, H] if the layer reads them,) hidden [T, H], cos and sin [T, 1, D], attend -> [T, H]."""
        *inputs, cos, sin, attend = given
        *embeds, x = (one.contiguous() for one in inputs)
        where = attend.metadata, attend.next_place(), attend.scoring
        return self.run(x, embeds[0] if embeds else None, (cos, sin), cos.stride(0), attend.shape, where)


def decoder_layer(layer: Any, place: int, scoring: Scoring) -> DecoderLayer | None:
    """The layer in native calls; None unless its weights are packed for them.

    layer: of Llama's parts. Its weights may change in place later.
    """
    library = load_library()
    if library is None or not _is_packed(layer, layer.input_layernorm.weight.numel()):
        return None
    return DecoderLayer(layer, place, scoring, library)


def head_layer(layer: Any) -> HeadLayer | None:
    """A draft head's layer, an `AttendingLayer`, in native calls; None unless its weights are packed for them.

    They may change in place later."""
    library = load_library()
    if library is None or not _is_packed(layer, layer.post_attention_layernorm.weight.numel()):
        return None
    return HeadLayer(layer, library)


def head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`heads.decoder_layer.rms_norm` in one native call for bfloat16 rows."""
    library, size = load_library(), len(weight)
    if library is None or x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16 or size % LANES:
        return rms_norm(x, weight, eps)
    x = x.contiguous()
    out = torch.empty_like(x)
    library.toolkit_rms_norm(x.data_ptr(), weight.data_ptr(), eps, out.data_ptr(), x.numel() // size, size)
    return out


def _is_packed(layer: Any, hidden: int) -> bool:
    """Whether the products of a layer with Llama's parts, of `hidden` numbers, can be native, and nothing hooks in."""
    attention, mlp = layer.self_attn, layer.mlp
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    packed = all(isinstance(one, BlockedLinear) and one.blocked for one in linears)
    parts = (one for one in layer.modules() if one is not layer)
    hooked = any(one._forward_hooks or one._forward_pre_hooks for one in parts)
    others = {one.dtype for one in layer.parameters()} - {torch.bfloat16}  # norms are read by address
    if hooked or others or not packed or any(one.joined is None for one in (attention.q_proj, mlp.gate_proj)):
        return False
    lanes = mlp.gate_proj.packed.shape[2] // 2
    return bool(attention.head_dim % (2 * lanes) == 0 and hidden % lanes == 0)


def _linear(linear: BlockedLinear) -> _Linear:
    joined, outputs = linear.joined, linear.out_features
    parts: tuple[Tensor | None, ...] = (linear.packed, linear.scale, linear.bias)
    if joined is not None:
        parts, outputs = (joined.blocks, joined.scale, joined.bias), joined.outputs
    return _Linear(*(None if one is None else one.data_ptr() for one in parts), outputs, linear.in_features)


def _norm(norm: Any) -> _Norm:
    if norm is None:
        return _Norm(None, 0, 0)
    theirs = getattr(norm, "variance_epsilon", None)  # transformers': it rounds before the weight
    return _Norm(norm.weight.data_ptr(), norm.eps if theirs is None else theirs, theirs is not None)
