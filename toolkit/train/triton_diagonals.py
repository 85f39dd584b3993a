"""The diagonals of training-time test (`ttt.plain_merge` and its backward) on an NVIDIA GPU in Triton.

Each root has one key of its own from every later step. As separate operations these keys take a dozen passes over the
queries a step; here the queries are read once each way, and once more for each diagonal's gradients.

Shapes: B sequences, N queries, D diagonals, hd head dim, kv key/value heads, h = kv*G query heads. In memory positions
stand before heads.

    _merge           forward: one program for each tile of queries of a head, over the diagonals
    _merge_queries   of the backward: the same loop
    _merge_keys      of the backward: one program for each tile of a key head and diagonal, over the G heads; without
                     atomic additions
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.train.triton_attention import UPCAST, _by_position, _rows, _store_rows

ELEMENTS = 2048  # of a tile; `_merge_queries` holds five tiles in fp32 registers
LENGTHS = ("queries", "batch", "diagonals")  # not specialised, as in triton_attention.py


@triton.jit
def _own(
    keys, values, diagonal, sequence, kv_head, at, queries, batch, kv_heads, width: tl.constexpr, wide: tl.constexpr,
    upcast: tl.constexpr,
):  # fmt: skip
    """A tile of the keys and values of a diagonal, in fp32."""
    begin = ((tl.cast(diagonal, tl.int64) * batch + sequence) * queries * kv_heads + kv_head) * width
    key = _rows(keys + begin, at, queries, kv_heads * width, width, wide, upcast)
    value = _rows(values + begin, at, queries, kv_heads * width, width, wide, upcast)
    return key.to(tl.float32), value.to(tl.float32)


@triton.jit(do_not_specialize=LENGTHS)
def _merge(
    q, keys, values, out, lse, queries, batch, diagonals, kv_heads, scale, groups: tl.constexpr, width: tl.constexpr,
    wide: tl.constexpr, rows: tl.constexpr, upcast: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    heads = kv_heads * groups
    sequence, head = (group // heads).to(tl.int64), group % heads
    at = tl.program_id(0) * rows + tl.arange(0, rows)
    begin = (sequence * queries * heads + head) * width
    own = _rows(q + begin, at, queries, heads * width, width, wide, upcast).to(tl.float32)
    acc = _rows(out + begin, at, queries, heads * width, width, wide, upcast).to(tl.float32)
    of_row = group.to(tl.int64) * queries + at
    best = tl.load(lse + of_row, mask=at < queries, other=0.0)
    total = tl.full((rows,), 1.0, tl.float32)
    for diagonal in range(diagonals):
        key, value = _own(
            keys, values, diagonal, sequence, head // groups, at, queries, batch, kv_heads, width, wide, upcast
        )
        score = tl.sum(own * key, axis=1) * scale
        newest = tl.maximum(best, score)
        shrink, weight = tl.exp(best - newest), tl.exp(score - newest)
        acc = acc * shrink[:, None] + value * weight[:, None]
        total, best = total * shrink + weight, newest
    _store_rows(out + begin, at, queries, heads * width, acc / total[:, None], width, wide)
    tl.store(lse + of_row, best + tl.log(total), mask=at < queries)


@triton.jit(do_not_specialize=LENGTHS)
def _merge_queries(
    grad, q, keys, values, out, lse, delta, dq, queries, batch, diagonals, kv_heads, scale, groups: tl.constexpr,
    width: tl.constexpr, wide: tl.constexpr, rows: tl.constexpr, upcast: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    heads = kv_heads * groups
    sequence, head = (group // heads).to(tl.int64), group % heads
    at = tl.program_id(0) * rows + tl.arange(0, rows)
    begin = (sequence * queries * heads + head) * width
    own = _rows(q + begin, at, queries, heads * width, width, wide, upcast).to(tl.float32)
    upstream = _rows(grad + begin, at, queries, heads * width, width, wide, upcast).to(tl.float32)
    result = _rows(out + begin, at, queries, heads * width, width, wide, upcast).to(tl.float32)
    own_delta = tl.sum(upstream * result, axis=1)
    of_row = group.to(tl.int64) * queries + at
    tl.store(delta + of_row, own_delta, mask=at < queries)
    own_lse = tl.load(lse + of_row, mask=at < queries, other=0.0)
    acc = _rows(dq + begin, at, queries, heads * width, width, wide, upcast)
    for diagonal in range(diagonals):
        key, value = _own(
            keys, values, diagonal, sequence, head // groups, at, queries, batch, kv_heads, width, wide, upcast
        )
        weight = tl.exp(tl.sum(own * key, axis=1) * scale - own_lse)
        change = (tl.sum(upstream * value, axis=1) - own_delta) * weight * scale
        acc += change[:, None] * key
    _store_rows(dq + begin, at, queries, heads * width, acc, width, wide)


@triton.jit(do_not_specialize=LENGTHS)
def _merge_keys(
    grad, q, keys, values, lse, delta, dk, dv, queries, batch, kv_heads, scale, groups: tl.constexpr,
    width: tl.constexpr, wide: tl.constexpr, rows: tl.constexpr, upcast: tl.constexpr,
):  # fmt: skip
    group, diagonal = tl.program_id(1), tl.program_id(2)
    sequence, kv_head = (group // kv_heads).to(tl.int64), group % kv_heads
    heads = kv_heads * groups
    at = tl.program_id(0) * rows + tl.arange(0, rows)
    key, value = _own(keys, values, diagonal, sequence, kv_head, at, queries, batch, kv_heads, width, wide, upcast)
    key_sum, value_sum = tl.zeros((rows, wide), tl.float32), tl.zeros((rows, wide), tl.float32)
    for member in range(groups):
        head = kv_head * groups + member
        begin = (sequence * queries * heads + head) * width
        own = _rows(q + begin, at, queries, heads * width, width, wide, upcast).to(tl.float32)
        upstream = _rows(grad + begin, at, queries, heads * width, width, wide, upcast).to(tl.float32)
        of_row = (sequence * heads + head) * queries + at
        own_lse = tl.load(lse + of_row, mask=at < queries, other=0.0)
        own_delta = tl.load(delta + of_row, mask=at < queries, other=0.0)
        weight = tl.exp(tl.sum(own * key, axis=1) * scale - own_lse)
        change = (tl.sum(upstream * value, axis=1) - own_delta) * weight * scale
        key_sum += change[:, None] * own
        value_sum += weight[:, None] * upstream
    place = ((diagonal.to(tl.int64) * batch + sequence) * queries * kv_heads + kv_head) * width
    _store_rows(dk + place, at, queries, kv_heads * width, key_sum, width, wide)
    _store_rows(dv + place, at, queries, kv_heads * width, value_sum, width, wide)


def merge(
    q: Tensor, out: Tensor, lse: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """`ttt.plain_merge`; out, in q's dtype, and lse may be overwritten."""
    q, out, lse = _by_position(q), _by_position(out), lse.contiguous()
    batch, queries, heads, _ = q.shape
    sizes = _sizes(q, keys)
    _merge[(triton.cdiv(queries, sizes["rows"]), batch * heads)](
        q, _stacked(keys), _stacked(values), out, lse, queries, batch, len(keys), keys[0].shape[1], **sizes
    )
    return out.transpose(1, 2), lse


def merge_backward(
    grad: Tensor, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], out: Tensor, lse: Tensor, dq: Tensor
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """`ttt.plain_merge_backward`; dq, in fp32, may be overwritten."""
    q, grad, out, dq = _by_position(q), _by_position(grad.to(q.dtype)), _by_position(out), _by_position(dq)
    lse = lse.contiguous()
    batch, queries, heads, _ = q.shape
    kv_heads, stacked, sizes = keys[0].shape[1], (_stacked(keys), _stacked(values)), _sizes(q, keys)
    delta, (dk, dv) = torch.empty_like(lse), (torch.empty_like(one) for one in stacked)
    tiles = triton.cdiv(queries, sizes["rows"])
    _merge_queries[(tiles, batch * heads)](
        grad, q, *stacked, out, lse, delta, dq, queries, batch, len(keys), kv_heads, **sizes
    )
    _merge_keys[(tiles, batch * kv_heads, len(keys))](
        grad, q, *stacked, lse, delta, dk, dv, queries, batch, kv_heads, **sizes
    )
    return dq.transpose(1, 2), *([one.transpose(1, 2) for one in each.unbind()] for each in (dk, dv))  # type: ignore[return-value]


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """D times [B, kv, N, hd] -> [D, B, N, kv, hd]."""
    return torch.stack([one.transpose(1, 2) for one in parts])


def _sizes(q: Tensor, keys: Sequence[Tensor]) -> dict[str, Any]:
    """Sizes of the kernels for q [B, N, h, hd]."""
    width = q.shape[-1]
    wide = triton.next_power_of_2(width)
    return {
        "scale": width**-0.5, "groups": q.shape[2] // keys[0].shape[1], "width": width, "wide": wide,
        "rows": max(1, ELEMENTS // wide), "upcast": UPCAST,
    }  # fmt: skip
