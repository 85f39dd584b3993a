"""`heads/layer_ops.py` and `reference.rms_norm` in Triton: the small operations between the products of a layer.

Shapes: T tokens, hd head dim, I intermediate size, H hidden size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # elements of a program


@triton.jit
def _turn(x, turned, cos, sin, head, stride, width: tl.constexpr, wide: tl.constexpr):
    """Rotate one head at `x`; cos and sin of its token."""
    at = tl.arange(0, wide)
    inside, half = at < width, width // 2
    # Convert to fp32 right after the load: Triton's interpreter computes wrong results in bf16.
    own = tl.load(x + head * stride + at, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(x + head * stride + (at + half) % width, mask=inside, other=0.0).to(tl.float32)
    by_cos = own * tl.load(cos + at, mask=inside, other=0.0).to(tl.float32)
    by_sin = tl.where(at < half, -other, other) * tl.load(sin + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(turned + head * width + at, (by_cos + by_sin).to(turned.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    q, k, cos, sin, turned_q, turned_k, q_token, q_head, k_token, k_head, cos_token, sin_token,
    q_heads: tl.constexpr, k_heads: tl.constexpr, width: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos += token * cos_token
    sin += token * sin_token
    if head < q_heads:
        _turn(q + token * q_token, turned_q + token * q_heads * width, cos, sin, head, q_head, width, wide)
    else:
        own = head - q_heads
        _turn(k + token * k_token, turned_k + token * k_heads * width, cos, sin, own, k_head, width, wide)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the rotary embedding to q [T, heads, hd] and k [T, kv_heads, hd]; cos and sin [T, 1, hd]."""
    tokens, heads, width = q.shape
    assert q.stride(2) == k.stride(2) == cos.stride(2) == sin.stride(2) == 1
    turned_q, turned_k = (torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in (q, k))
    _rotate[(tokens, heads + k.shape[1])](
        q, k, cos, sin, turned_q, turned_k, *q.stride()[:2], *k.stride()[:2], cos.stride(0), sin.stride(0),
        q_heads=heads, k_heads=k.shape[1], width=width, wide=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return turned_q, turned_k


@triton.jit(do_not_specialize=["count"])
def _gate(gate, up, product, count, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    x = tl.load(gate + at, mask=at < count, other=0.0).to(tl.float32)
    y = tl.load(up + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(product + at, (x / (1.0 + tl.exp(-x)) * y).to(product.dtype.element_ty), mask=at < count)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """The product of SwiGLU: silu(gate) * up, [T, I] each."""
    gate, up = gate.contiguous(), up.contiguous()
    product = torch.empty_like(gate)
    _gate[(triton.cdiv(gate.numel(), BLOCK),)](gate, up, product, gate.numel(), block=BLOCK)
    return product


@triton.jit
def _norm(x, weight, normed, eps, stride, width: tl.constexpr, offset, rounded: tl.constexpr, wide: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, wide)
    numbers = tl.load(x + row * stride + at, mask=at < width, other=0.0).to(tl.float32)
    numbers /= tl.sqrt(tl.sum(numbers * numbers, axis=0) / width + eps)
    factor = tl.load(weight + at, mask=at < width, other=0.0).to(tl.float32)
    if rounded:
        numbers = numbers.to(normed.dtype.element_ty).to(tl.float32)
    tl.store(normed + row * width + at, (numbers * (offset + factor)).to(normed.dtype.element_ty), mask=at < width)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, rounded: bool) -> Tensor:
    """RMSNorm of x [..., H] by weight [H] + offset; rounded: see the reference."""
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    wide = triton.next_power_of_2(width)
    if len(rows):
        _norm[(len(rows),)](
            rows, weight, normed, eps, rows.stride(0), width=width, offset=offset, rounded=rounded, wide=wide,
            num_warps=min(16, max(1, wide // 256)),
        )  # fmt: skip
    return normed
