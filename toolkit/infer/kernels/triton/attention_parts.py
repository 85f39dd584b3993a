"""Triton kernels of paged attention; `paged_attention.py` launches them.

Shapes: B rows, N queries per row, Hq query heads, Hkv key heads, G = Hq / Hkv, D head dim of queries and keys, Dv of
values, M nodes per row, S parts of a row's keys.

The N * G queries of one key head are the rows of tiles (row n * G + g), so that a tile reads each key once. The keys
are split into parts, which are merged by log-sum-exp (flash-decoding, arXiv 2311.01282):

    keys of a row     committed ...........................  nodes
    programs          part 0 | part 1 | .. | part S-2        part S-1 under the ancestor mask          (trees)
                      part 0 | part 1 | .. | part S-1                                                 (causal)
    merge             out = sum_s 2^(lse_s - lse) out_s,  lse = log2(sum_s 2^lse_s + 2^sink)

The number of parts depends on values that the host knows; the start of each part depends on the lengths on the device.
So all rounds of one bucket have the same launch, and a CUDA graph can record it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from toolkit.infer.kernels.triton.launch import wait_for_earlier

LOG2E = tl.constexpr(1.4426950408889634)
# Of fp32: each factor is the sum of two tf32 numbers, which tensor cores multiply with the error of fp32. "ieee" would
# multiply on the other cores, with so many registers that tens of KB of them are spilled.
PRECISION = tl.constexpr("tf32x3")


@triton.jit
def _fold(
    best, total, acc, q, keys, values, position, inside, allowed, table, page_size: tl.constexpr, entry, value_entry,
    width: tl.constexpr, value_width: tl.constexpr, wide: tl.constexpr, value_wide: tl.constexpr, scale, softcap,
    upcast: tl.constexpr,
):  # fmt: skip
    """Update the online softmax (best score, sum of weights, weighted values) with the keys at `position`.

    keys, values: pointers to this key head in entry 0. entry, value_entry: elements from one entry to the next.
    inside: positions that exist; other positions are not read. allowed [rows, positions]. Scores are in log2 units.
    """
    page = tl.load(table + position // page_size, mask=inside, other=0).to(tl.int64)
    place = page * page_size + position % page_size
    dim, value_dim = tl.arange(0, wide), tl.arange(0, value_wide)
    k = tl.load(keys + place[None, :] * entry + dim[:, None], mask=inside[None, :] & (dim < width)[:, None], other=0.0)
    v = tl.load(
        values + place[:, None] * value_entry + value_dim[None, :],
        mask=inside[:, None] & (value_dim < value_width)[None, :], other=0.0,
    )  # fmt: skip
    if upcast:
        k, v = k.to(tl.float32), v.to(tl.float32)
    scores = tl.dot(q, k, input_precision=PRECISION) * scale
    if softcap is not None:
        # tanh(x) = 1 - 2 / (e^2x + 1); an overflow of e^2x gives the correct limit.
        scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores) + 1.0)) * LOG2E
    scores = tl.where(allowed, scores, float("-inf"))
    newest = tl.maximum(best, tl.max(scores, axis=1))
    # For a row without an allowed key so far, -inf - -inf would be nan.
    base = tl.where(newest == float("-inf"), 0.0, newest)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(best - base)
    total = total * shrink + tl.sum(weights, axis=1)
    acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return newest, total, acc


@triton.jit
def _load_queries(
    q, q_row, q_head, q_new, group, tile, queries, kv_heads, groups: tl.constexpr, width: tl.constexpr,
    wide: tl.constexpr, rows: tl.constexpr, upcast: tl.constexpr,
):  # fmt: skip
    """Return the tile's queries [rows, wide], the query number of each tile row, and whether that query exists."""
    folded = tile * rows + tl.arange(0, rows)
    number = folded // groups
    head = (group % kv_heads) * groups + folded % groups
    real = number < queries
    dim = tl.arange(0, wide)
    begin = q + (group // kv_heads).to(tl.int64) * q_row + head.to(tl.int64) * q_head + number.to(tl.int64) * q_new
    loaded = tl.load(begin[:, None] + dim[None, :], mask=real[:, None] & (dim < width)[None, :], other=0.0)
    if upcast:
        loaded = loaded.to(tl.float32)
    return loaded, number, real


@triton.jit
def _leave(
    best, total, acc, parts, part_lse, sinks, group, tile, part, part_count, queries, kv_heads, number, real,
    groups: tl.constexpr, value_width: tl.constexpr, value_wide: tl.constexpr, rows: tl.constexpr,
    whole: tl.constexpr,
):  # fmt: skip
    """Write the tile's part [rows, Dv] and its log-sum-exp; `whole`: this is the only part, so write the output."""
    folded = tile * rows + tl.arange(0, rows)
    value_dim = tl.arange(0, value_wide)
    stored = real[:, None] & (value_dim < value_width)[None, :]
    if whole:
        head = (group % kv_heads) * groups + folded % groups
        if sinks is not None:
            sink = tl.load(sinks + head).to(tl.float32) * LOG2E
            total += tl.exp2(sink - best)
        row = (group // kv_heads).to(tl.int64) * queries + number
        begin = parts + (row * (kv_heads * groups) + head) * value_width
        tl.store(begin[:, None] + value_dim[None, :], (acc / total[:, None]).to(parts.dtype.element_ty), mask=stored)
    else:
        seen = total > 0
        place = (group.to(tl.int64) * (queries * groups) + folded) * part_count + part
        begin = parts + place * value_width
        weight = tl.where(seen, total, 1.0)
        # A part without an allowed key is not read.
        tl.store(begin[:, None] + value_dim[None, :], acc / weight[:, None], mask=stored & seen[:, None])
        tl.store(part_lse + place, tl.where(seen, best + tl.log2(weight), float("-inf")), mask=real)


@triton.jit(do_not_specialize=["queries", "pages", "part_count"])
def causal_parts(
    q, keys, values, table, starts, sinks, parts, part_lse, q_row, q_head, q_new, queries, kv_heads, pages, part_count,
    scale, softcap, window, page_size: tl.constexpr, groups: tl.constexpr, width: tl.constexpr,
    value_width: tl.constexpr, wide: tl.constexpr, value_wide: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
    whole: tl.constexpr, upcast: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    wait_for_earlier(pdl)
    group, tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, kv_head = group // kv_heads, group % kv_heads
    loaded, number, real = _load_queries(
        q, q_row, q_head, q_new, group, tile, queries, kv_heads, groups, width, wide, rows, upcast
    )
    start = tl.load(starts + row).to(tl.int32)
    stands = start + number
    end = start + tl.minimum((tile * rows + rows - 1) // groups, queries - 1) + 1
    first = 0
    if window is not None:
        first = tl.maximum(start + tile * rows // groups - window + 1, 0) // block * block
    own = tl.cdiv(tl.cdiv(end - first, block), part_count) * block
    first += part * own
    last = tl.minimum(first + own, end)
    best = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    acc = tl.zeros((rows, value_wide), tl.float32)
    for position in range(first, last, block):
        at = position + tl.arange(0, block)
        allowed = at[None, :] <= stands[:, None]
        if window is not None:
            allowed = allowed & (stands[:, None] - at[None, :] < window)
        best, total, acc = _fold(
            best, total, acc, loaded, keys + kv_head * width, values + kv_head * value_width, at, at < last, allowed,
            table + row.to(tl.int64) * pages, page_size, kv_heads * width, kv_heads * value_width, width, value_width,
            wide, value_wide, scale, softcap, upcast,
        )  # fmt: skip
    _leave(
        best, total, acc, parts, part_lse, sinks, group, tile, part, part_count, queries, kv_heads, number, real,
        groups, value_width, value_wide, rows, whole,
    )  # fmt: skip


@triton.jit(do_not_specialize=["mask_row", "mask_new", "depth_row", "queries", "nodes", "pages", "part_count"])
def tree_parts(
    q, keys, values, table, lengths, mask, depths, parts, part_lse, q_row, q_head, q_new, mask_row, mask_new, depth_row,
    queries, nodes, kv_heads, pages, part_count, scale, softcap, window, page_size: tl.constexpr, groups: tl.constexpr,
    width: tl.constexpr, value_width: tl.constexpr, wide: tl.constexpr, value_wide: tl.constexpr, rows: tl.constexpr,
    block: tl.constexpr, upcast: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    wait_for_earlier(pdl)
    group, tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, kv_head = group // kv_heads, group % kv_heads
    loaded, number, real = _load_queries(
        q, q_row, q_head, q_new, group, tile, queries, kv_heads, groups, width, wide, rows, upcast
    )
    length = tl.load(lengths + row).to(tl.int32)
    stands = tl.zeros((rows,), tl.int32)
    first = 0
    if window is not None:
        depth = tl.load(depths + row * depth_row + nodes - queries + number, mask=real, other=0).to(tl.int32)
        stands = length + depth
        first = tl.maximum(length - window + 1, 0) // block * block
    # All parts but the last split the committed positions; the last part has the nodes.
    own = tl.cdiv(tl.cdiv(length - first, block), part_count - 1) * block
    first += part * own
    end = tl.minimum(first + own, length)
    best = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    acc = tl.zeros((rows, value_wide), tl.float32)
    for position in range(first, end, block):
        at = position + tl.arange(0, block)
        allowed = (at < end)[None, :] & real[:, None]
        if window is not None:
            allowed = allowed & (stands[:, None] - at[None, :] < window)
        best, total, acc = _fold(
            best, total, acc, loaded, keys + kv_head * width, values + kv_head * value_width, at, at < end, allowed,
            table + row.to(tl.int64) * pages, page_size, kv_heads * width, kv_heads * value_width, width, value_width,
            wide, value_wide, scale, softcap, upcast,
        )  # fmt: skip
    mask += row.to(tl.int64) * mask_row
    for first_node in range(0, tl.where(part == part_count - 1, nodes, 0), block):
        node = first_node + tl.arange(0, block)
        inside = node < nodes
        of_node = (number * mask_new)[:, None] + node[None, :]
        allowed = tl.load(mask + of_node, mask=real[:, None] & inside[None, :], other=0) != 0
        if window is not None:
            below = tl.load(depths + row * depth_row + node, mask=inside, other=0).to(tl.int32)
            allowed = allowed & (stands[:, None] - (length + below)[None, :] < window)
        best, total, acc = _fold(
            best, total, acc, loaded, keys + kv_head * width, values + kv_head * value_width, length + node, inside,
            allowed, table + row.to(tl.int64) * pages, page_size, kv_heads * width, kv_heads * value_width, width,
            value_width, wide, value_wide, scale, softcap, upcast,
        )  # fmt: skip
    _leave(
        best, total, acc, parts, part_lse, None, group, tile, part, part_count, queries, kv_heads, number, real,
        groups, value_width, value_wide, rows, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["queries", "part_count"])
def merge_parts(
    parts, part_lse, sinks, out, queries, kv_heads, part_count, groups: tl.constexpr, value_width: tl.constexpr,
    value_wide: tl.constexpr, parts_wide: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Merge the parts [S, Dv] of one query of one head, weighted by their log-sum-exps."""
    wait_for_earlier(pdl)
    number = tl.program_id(0)
    group, folded = number // (queries * groups), number % (queries * groups)
    head = (group % kv_heads) * groups + folded % groups
    part, value_dim = tl.arange(0, parts_wide), tl.arange(0, value_wide)
    begin = number.to(tl.int64) * part_count
    lse = tl.load(part_lse + begin + part, mask=part < part_count, other=float("-inf"))
    best = tl.max(lse, axis=0)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        best = tl.maximum(best, sink)
    weights = tl.exp2(lse - best)
    total = tl.sum(weights, axis=0)
    if sinks is not None:
        total += tl.exp2(sink - best)
    numbers = tl.load(
        parts + (begin + part)[:, None] * value_width + value_dim[None, :],
        mask=(lse > float("-inf"))[:, None] & (value_dim < value_width)[None, :], other=0.0,
    )  # fmt: skip
    merged = tl.sum(numbers * weights[:, None], axis=0) / total
    row = (group // kv_heads).to(tl.int64) * queries + folded // groups
    place = out + (row * (kv_heads * groups) + head) * value_width + value_dim
    tl.store(place, merged.to(out.dtype.element_ty), mask=value_dim < value_width)
