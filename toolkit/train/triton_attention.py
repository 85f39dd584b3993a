"""`causal_attention.py` on an NVIDIA GPU: FlashAttention-2 (arXiv 2307.08691) in Triton. reach: a `KeyRange` or None.

Shapes: B sequences, N queries, L keys, hd head dim, kv key/value heads, h = kv*G query heads. The memory layout has
positions before heads, as the draft layer writes them: [B, N, h, hd].

    forward           one program for each tile of queries of a head, over the keys that the tile sees
    queries' part     of the backward: the same loop
    keys' part        of the backward: one program for each tile of keys of a key head, over the queries of all G heads
                      that see the tile; without atomic additions, so that the sums are the same in every run

The diagonals of training-time test (`ttt.plain_merge` and its backward): each root has one key of its own from every of
D later steps. As separate operations these keys take a dozen passes over the queries a step; here the queries are read
once each way, and once more for each diagonal's gradients.

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
from triton.runtime import JITFunction

LOG2E = tl.constexpr(1.4426950408889634)
PRECISION = tl.constexpr("tf32x3")  # of fp32, as in the engine's paged_attention.py: the error of fp32, on tensor cores
# By bytes of an element: bytes of a tile of queries in forward, and rows of any other tile. Tiles of fp32 are smaller,
# since tf32x3 keeps two parts of every factor in registers.
QUERY_BYTES, MAX_BLOCK = {2: 32768, 4: 16384}, {2: 64, 4: 32}
TILE_BYTES, STAGED_ROW = 16384, 256  # of any other tile at most; of a row with two pipeline stages at most
MIN_TILE = 16  # the least that tl.dot takes
LENGTHS = ("queries", "keys")  # not specialised: they differ between batches, and each value would be compiled
DIAGONAL_LENGTHS = ("queries", "batch", "diagonals")
ELEMENTS = 2048  # of a tile of diagonals; `_merge_queries` holds five tiles in fp32 registers


@triton.jit
def _rows(begin, at, count, step, width: tl.constexpr, wide: tl.constexpr, upcast: tl.constexpr):
    """Load rows `at` of [count, width], `step` elements apart, as [.., wide], with zeros past either end."""
    dim = tl.arange(0, wide)
    mask = (at < count)[:, None] & (dim < width)[None, :]
    x = tl.load(begin + at.to(tl.int64)[:, None] * step + dim[None, :], mask=mask, other=0.0)
    if upcast:
        x = x.to(tl.float32)
    return x


@triton.jit
def _store_rows(begin, at, count, step, x, width: tl.constexpr, wide: tl.constexpr):
    dim = tl.arange(0, wide)
    mask = (at < count)[:, None] & (dim < width)[None, :]
    tl.store(begin + at.to(tl.int64)[:, None] * step + dim[None, :], x.to(begin.dtype.element_ty), mask=mask)


@triton.jit
def _seen(first, last, sequence, at, queries):
    """The first and the last key that each of the queries `at` sees; an empty range past the last query."""
    inside = at < queries
    if first is None:
        low, high = tl.zeros_like(at), tl.where(inside, at, -1)
    else:
        begin = sequence.to(tl.int64) * queries
        low = tl.load(first + begin + at, mask=inside, other=2**31 - 1).to(tl.int32)
        high = tl.load(last + begin + at, mask=inside, other=-1).to(tl.int32)
    return low, high


@triton.jit(do_not_specialize=LENGTHS)
def _forward(
    q, k, v, first, last, out, lse, queries, keys, kv_heads, scale, groups: tl.constexpr, width: tl.constexpr,
    wide: tl.constexpr, rows: tl.constexpr, block: tl.constexpr, upcast: tl.constexpr,
):  # fmt: skip
    # The last tiles see the most keys, so they begin first.
    tile, group = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    heads = kv_heads * groups
    sequence, head = (group // heads).to(tl.int64), group % heads
    at = tile * rows + tl.arange(0, rows)
    own = _rows(q + (sequence * queries * heads + head) * width, at, queries, heads * width, width, wide, upcast)
    low, high = _seen(first, last, sequence, at, queries)
    k += (sequence * keys * kv_heads + head // groups) * width
    v += (sequence * keys * kv_heads + head // groups) * width
    best = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    acc = tl.zeros((rows, wide), tl.float32)
    for start in range(tl.min(low, axis=0) // block * block, tl.max(high, axis=0) + 1, block):
        place = start + tl.arange(0, block)
        key = _rows(k, place, keys, kv_heads * width, width, wide, upcast)
        value = _rows(v, place, keys, kv_heads * width, width, wide, upcast)
        scores = tl.dot(own, tl.trans(key), input_precision=PRECISION) * scale
        visible = (place[None, :] >= low[:, None]) & (place[None, :] <= high[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        newest = tl.maximum(best, tl.max(scores, axis=1))
        # For a query that has seen no key yet, -inf minus -inf would be nan.
        base = tl.where(newest == float("-inf"), 0.0, newest)
        weights, shrink = tl.exp2(scores - base[:, None]), tl.exp2(best - base)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        best = newest
    total = tl.where(at < queries, total, 1.0)
    _store_rows(
        out + (sequence * queries * heads + head) * width, at, queries, heads * width, acc / total[:, None], width, wide
    )
    tl.store(lse + group.to(tl.int64) * queries + at, (best + tl.log2(total)) / LOG2E, mask=at < queries)


@triton.jit
def _changes(scores, products, lse, delta, visible):
    """Attention weights and gradients of the scores, from base-2 scores and the products of values and gradient."""
    weights = tl.where(visible, tl.exp2(scores - lse * LOG2E), 0.0)
    return weights, weights * (products - delta)


@triton.jit(do_not_specialize=LENGTHS)
def _queries_part(
    grad, q, k, v, first, last, lse, delta, dq, queries, keys, kv_heads, scale, groups: tl.constexpr,
    width: tl.constexpr, wide: tl.constexpr, rows: tl.constexpr, block: tl.constexpr, upcast: tl.constexpr,
):  # fmt: skip
    tile, group = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    heads = kv_heads * groups
    sequence, head = (group // heads).to(tl.int64), group % heads
    at = tile * rows + tl.arange(0, rows)
    begin = (sequence * queries * heads + head) * width
    own = _rows(q + begin, at, queries, heads * width, width, wide, upcast)
    upstream = _rows(grad + begin, at, queries, heads * width, width, wide, upcast)
    of_row = group.to(tl.int64) * queries + at
    own_lse = tl.load(lse + of_row, mask=at < queries, other=0.0)
    own_delta = tl.load(delta + of_row, mask=at < queries, other=0.0)
    low, high = _seen(first, last, sequence, at, queries)
    k += (sequence * keys * kv_heads + head // groups) * width
    v += (sequence * keys * kv_heads + head // groups) * width
    acc = tl.zeros((rows, wide), tl.float32)
    for start in range(tl.min(low, axis=0) // block * block, tl.max(high, axis=0) + 1, block):
        place = start + tl.arange(0, block)
        key = _rows(k, place, keys, kv_heads * width, width, wide, upcast)
        value = _rows(v, place, keys, kv_heads * width, width, wide, upcast)
        scores = tl.dot(own, tl.trans(key), input_precision=PRECISION) * (scale * LOG2E)
        products = tl.dot(upstream, tl.trans(value), input_precision=PRECISION)
        visible = (place[None, :] >= low[:, None]) & (place[None, :] <= high[:, None])
        _, change = _changes(scores, products, own_lse[:, None], own_delta[:, None], visible)
        acc += tl.dot(change.to(key.dtype), key, input_precision=PRECISION)
    _store_rows(dq + begin, at, queries, heads * width, acc * scale, width, wide)


@triton.jit(do_not_specialize=LENGTHS)
def _keys_part(
    grad, q, k, v, first, last, begins, ends, lse, delta, dk, dv, queries, keys, kv_heads, scale, groups: tl.constexpr,
    width: tl.constexpr, wide: tl.constexpr, rows: tl.constexpr, block: tl.constexpr, upcast: tl.constexpr,
):  # fmt: skip
    tile, group = tl.program_id(0), tl.program_id(1)
    sequence, kv_head = (group // kv_heads).to(tl.int64), group % kv_heads
    heads = kv_heads * groups
    place = tile * block + tl.arange(0, block)
    own_place = (sequence * keys * kv_heads + kv_head) * width
    key = _rows(k + own_place, place, keys, kv_heads * width, width, wide, upcast)
    value = _rows(v + own_place, place, keys, kv_heads * width, width, wide, upcast)
    key_sum, value_sum = tl.zeros((block, wide), tl.float32), tl.zeros((block, wide), tl.float32)
    begin, end = tile * block, queries
    if first is not None:
        of_tile = sequence * tl.num_programs(0) + tile
        begin, end = tl.load(begins + of_tile).to(tl.int32), tl.load(ends + of_tile).to(tl.int32)
    for member in range(groups):
        head = kv_head * groups + member
        of_head = (sequence * queries * heads + head) * width
        of_row = (sequence * heads + head) * queries
        for start in range(begin, end, rows):
            at = start + tl.arange(0, rows)
            query = _rows(q + of_head, at, queries, heads * width, width, wide, upcast)
            upstream = _rows(grad + of_head, at, queries, heads * width, width, wide, upcast)
            row_lse = tl.load(lse + of_row + at, mask=at < queries, other=0.0)
            row_delta = tl.load(delta + of_row + at, mask=at < queries, other=0.0)
            low, high = _seen(first, last, sequence, at, queries)
            scores = tl.dot(key, tl.trans(query), input_precision=PRECISION) * (scale * LOG2E)
            products = tl.dot(value, tl.trans(upstream), input_precision=PRECISION)
            visible = (place[:, None] >= low[None, :]) & (place[:, None] <= high[None, :])
            weights, change = _changes(scores, products, row_lse[None, :], row_delta[None, :], visible)
            value_sum += tl.dot(weights.to(upstream.dtype), upstream, input_precision=PRECISION)
            key_sum += tl.dot(change.to(query.dtype), query, input_precision=PRECISION)
    _store_rows(dk + own_place, place, keys, kv_heads * width, key_sum * scale, width, wide)
    _store_rows(dv + own_place, place, keys, kv_heads * width, value_sum, width, wide)


# Triton's interpreter computes wrong results in bf16, so values are converted to fp32 right after every load.
UPCAST = not isinstance(_forward, JITFunction)


def attend(q: Tensor, k: Tensor, v: Tensor, reach: Any = None) -> tuple[Tensor, Tensor]:
    """`causal_attention.causal_attention`: q [B, h, N, hd], k and v [B, kv, L, hd] -> like q, and [B, h, N] fp32."""
    q, k, v = (_by_position(x) for x in (q, k, v))
    batch, queries, heads, width = q.shape
    first, last = _bounds(reach)
    out = torch.empty_like(q)
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    sizes = _sizes(q, k, backward=False)
    _forward[(triton.cdiv(queries, sizes["rows"]), batch * heads)](
        q, k, v, first, last, out, lse, queries, k.shape[1], k.shape[2], width**-0.5 * LOG2E.value, **sizes
    )
    return out.transpose(1, 2), lse


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, reach: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`causal_attention.causal_attention_backward`; the gradient of q is in fp32, because the caller adds to it."""
    grad, q, k, v = (_by_position(x) for x in (grad.to(q.dtype), q, k, v))
    batch, queries, heads, width = q.shape
    keys, kv_heads = k.shape[1:3]
    first, last = _bounds(reach)
    lse = lse.contiguous()
    delta = (grad.transpose(1, 2).to(lse.dtype) * out).sum(-1).contiguous()
    dq, dk, dv = torch.empty_like(q, dtype=torch.float32), torch.empty_like(k), torch.empty_like(v)
    sizes = _sizes(q, k, backward=True)
    _queries_part[(triton.cdiv(queries, sizes["rows"]), batch * heads)](
        grad, q, k, v, first, last, lse, delta, dq, queries, keys, kv_heads, width**-0.5, **sizes
    )
    tiles = triton.cdiv(keys, sizes["block"])
    begins = ends = None
    if reach is not None:
        edges = torch.arange(0, tiles + 1, device=q.device) * sizes["block"]
        # first and last ascend, so the queries that see a tile of keys are consecutive.
        begins = torch.searchsorted(reach.last.contiguous(), edges[:-1].expand(batch, -1).contiguous())
        ends = torch.searchsorted(reach.first.contiguous(), edges[1:].expand(batch, -1).contiguous())
    _keys_part[(tiles, batch * kv_heads)](
        grad, q, k, v, first, last, begins, ends, lse, delta, dk, dv, queries, keys, kv_heads, width**-0.5, **sizes
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _by_position(x: Tensor) -> Tensor:
    """[B, heads, N, hd] -> [B, N, heads, hd], the layout that the draft layer writes."""
    return x.transpose(1, 2).contiguous()


def _bounds(reach: Any) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if reach is None else (reach.first.contiguous(), reach.last.contiguous())


def _sizes(q: Tensor, k: Tensor, backward: bool) -> dict[str, Any]:
    """Compile-time sizes of the kernels for q [B, N, h, hd] and k [B, L, kv, hd]. Backward holds twice as many tiles in
    shared memory; they fit the GPU with the least of it (tests/infer/kernels)."""
    width, groups = q.shape[-1], q.shape[2] // k.shape[2]
    wide, size = max(MIN_TILE, triton.next_power_of_2(width)), q.element_size()
    row_bytes = wide * size
    block = max(MIN_TILE, min(MAX_BLOCK[size], TILE_BYTES // row_bytes))
    rows = block if backward else max(MIN_TILE, min(128, QUERY_BYTES[size] // row_bytes))
    return {
        "groups": groups, "width": width, "wide": wide, "rows": rows, "block": block, "upcast": UPCAST,
        "num_warps": 8 if size == 4 or rows * wide >= 128 * 128 else 4,
        "num_stages": 1 if backward or row_bytes > STAGED_ROW else 2,
    }  # fmt: skip


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


@triton.jit(do_not_specialize=DIAGONAL_LENGTHS)
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


@triton.jit(do_not_specialize=DIAGONAL_LENGTHS)
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


@triton.jit(do_not_specialize=DIAGONAL_LENGTHS)
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
    sizes = _diagonal_sizes(q, keys)
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
    kv_heads, stacked, sizes = keys[0].shape[1], (_stacked(keys), _stacked(values)), _diagonal_sizes(q, keys)
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


def _diagonal_sizes(q: Tensor, keys: Sequence[Tensor]) -> dict[str, Any]:
    """Sizes of the kernels for q [B, N, h, hd]."""
    width = q.shape[-1]
    wide = triton.next_power_of_2(width)
    return {
        "scale": width**-0.5, "groups": q.shape[2] // keys[0].shape[1], "width": width, "wide": wide,
        "rows": max(1, ELEMENTS // wide), "upcast": UPCAST,
    }  # fmt: skip
