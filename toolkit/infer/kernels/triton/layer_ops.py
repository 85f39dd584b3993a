"""`heads/decoder_layer.py` and `reference.rms_norm` in Triton: the small operations between the products of a layer.

Shapes: T tokens, hd head dim, I intermediate size, H hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from toolkit.infer.kernels import reference
from toolkit.infer.kernels.paged_reference import Pages
from toolkit.infer.kernels.triton.entries import place_of
from toolkit.infer.kernels.triton.launch import dependent, depends, wait_for_earlier
from toolkit.infer.kernels.triton.skinny_product import MAX_ROWS, skinny_product

MOST_SCALED_ROWS = 8 * MAX_ROWS  # beyond, float8 weights are converted whole
skinny_rows = MAX_ROWS  # rows of a product up to which our own runs; benchmarks set it to 0
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


@triton.jit
def _gate(gate, up, product, gate_row, up_row, width, block: tl.constexpr, pdl: tl.constexpr):
    wait_for_earlier(pdl)
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    x = tl.load(gate + row * gate_row + at, mask=at < width, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_row + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(product + row * width + at, (x / (1.0 + tl.exp(-x)) * y).to(product.dtype.element_ty), mask=at < width)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """The product of SwiGLU: silu(gate) * up, [T, I] each."""
    rows, width = gate.shape
    assert gate.stride(1) == up.stride(1) == 1
    product = torch.empty(rows, width, dtype=gate.dtype, device=gate.device)
    _gate[(rows, triton.cdiv(width, BLOCK))](
        gate, up, product, gate.stride(0), up.stride(0), width, block=BLOCK, **dependent(gate)
    )
    return product


@triton.jit
def _norm(
    x, weight, normed, eps, stride, width: tl.constexpr, offset, rounded: tl.constexpr, wide: tl.constexpr,
    pdl: tl.constexpr,
):  # fmt: skip
    wait_for_earlier(pdl)
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
            num_warps=min(16, max(1, wide // 256)), **dependent(rows),
        )  # fmt: skip
    return normed


@triton.jit
def _weighted(numbers, weight, inside):
    """Normed numbers times their weights, rounded as Llama's norm does; in fp32."""
    factor = tl.load(weight, mask=inside, other=0.0)
    numbers = numbers.to(weight.dtype.element_ty).to(tl.float32) * factor.to(tl.float32)
    return numbers.to(weight.dtype.element_ty).to(tl.float32)


@triton.jit
def _rotated_head(source, norm, eps, target, cos, sin, width: tl.constexpr, wide: tl.constexpr):
    """Norm (unless `norm` is None), rotate and write one head at `source`; cos and sin of its token."""
    at = tl.arange(0, wide)
    inside, half = at < width, width // 2
    turned = (at + half) % width
    own = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(source + turned, mask=inside, other=0.0).to(tl.float32)
    if norm is not None:
        scale = tl.rsqrt(tl.sum(own * own, axis=0) / width + eps)
        own = _weighted(own * scale, norm + at, inside)
        other = _weighted(other * scale, norm + turned, inside)
    by_cos = own * tl.load(cos + at, mask=inside, other=0.0).to(tl.float32)
    by_sin = tl.where(at < half, -other, other) * tl.load(sin + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + at, (by_cos + by_sin).to(target.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["table_row", "first", "new"])
def _rotate_joined(
    joined, cos, sin, q_norm, k_norm, eps, queries, keys, values, table, starts, table_row, first, new, joined_row,
    cos_row, q_heads: tl.constexpr, kv_heads: tl.constexpr, width: tl.constexpr, wide: tl.constexpr,
    page_size: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    wait_for_earlier(pdl)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = token
    if table is not None:
        row = token // new
        place = place_of(table + row * table_row, tl.load(starts + row) + first + token % new, page_size)
    source = joined + token * joined_row + head * width
    cos += token * cos_row
    sin += token * cos_row
    key_head, value_head = head - q_heads, head - q_heads - kv_heads
    if head < q_heads:
        _rotated_head(source, q_norm, eps, queries + (token * q_heads + head) * width, cos, sin, width, wide)
    elif head < q_heads + kv_heads:
        _rotated_head(source, k_norm, eps, keys + (place * kv_heads + key_head) * width, cos, sin, width, wide)
    else:
        at = tl.arange(0, wide)
        numbers = tl.load(source + at, mask=at < width)
        tl.store(values + (place * kv_heads + value_head) * width + at, numbers, mask=at < width)


def rotate_joined(
    joined: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: tuple[int, int],
    norms: tuple[Tensor, Tensor, float] | None,
    pages: Pages | None,
    starts: Tensor | None,
    first: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See the reference."""
    rows, new, size = joined.shape
    (q_heads, kv_heads), tokens = heads, rows * new
    width = size // (q_heads + 2 * kv_heads)
    assert joined.stride(2) == cos.stride(2) == sin.stride(2) == 1 and cos.stride() == sin.stride()
    assert cos.shape == (rows, new, width) and joined.is_contiguous() and cos.is_contiguous()
    queries = joined.new_empty(rows, new, q_heads, width)
    if pages is None:
        keys, values = (joined.new_empty(rows, new, kv_heads, width) for _ in range(2))
        table, table_row, page_size = None, 0, 1
    else:
        assert pages.keys.is_contiguous() and pages.values.is_contiguous() and pages.table.stride(1) == 1
        keys, values, table = pages.keys, pages.values, pages.table
        table_row, page_size = table.stride(0), pages.page_size
    q_norm, k_norm, eps = (None, None, 0.0) if norms is None else norms
    _rotate_joined[(tokens, q_heads + 2 * kv_heads)](
        joined, cos, sin, q_norm, k_norm, eps, queries, keys, values, table, starts, table_row, first, new, size,
        width, q_heads=q_heads, kv_heads=kv_heads, width=width, wide=triton.next_power_of_2(width),
        page_size=page_size, num_warps=1, **dependent(joined),
    )  # fmt: skip
    return queries, keys, values


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """See the reference."""
    if bias is not None and residual is not None:
        return reference.linear(x, weight, bias, residual)
    rows = x.flatten(0, -2)
    added = bias.expand(len(rows), -1) if bias is not None else None if residual is None else residual.flatten(0, -2)
    if _is_skinny(rows, weight):
        out = skinny_product(rows, weight, residual=added, pdl=depends(x))
    elif added is None:
        out = F.linear(rows, weight)
    else:
        out = torch.addmm(added, rows, weight.t())  # the sum is the product's epilogue
    return out.view(*x.shape[:-1], len(weight))


def gated_linear(x: Tensor, gate_up: Tensor) -> Tensor:
    """See the reference."""
    rows = x.flatten(0, -2)
    if _is_skinny(rows, gate_up):
        out = skinny_product(rows, gate_up, gated=True, pdl=depends(x))
    else:
        out = gated(*F.linear(rows, gate_up).chunk(2, dim=-1))
    return out.view(*x.shape[:-1], len(gate_up) // 2)


def scaled_product(x: Tensor, levels: Tensor, scales: Tensor) -> Tensor:
    """See the reference."""
    if 0 < len(x) <= MOST_SCALED_ROWS and x.dtype == torch.bfloat16:
        parts = [skinny_product(part, levels, scales=scales, pdl=depends(x)) for part in x.split(MAX_ROWS)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    return reference.scaled_product(x, levels, scales)


def _is_skinny(rows: Tensor, weight: Tensor) -> bool:
    return 0 < len(rows) <= skinny_rows and rows.dtype == torch.bfloat16 and weight.is_contiguous()
