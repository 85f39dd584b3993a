"""`batch_invariant.attend_paths` in Triton: attention that gives a query the bits of plain decoding.

A query adds its keys in the order of the text, in blocks that are counted from position 0. One program adds all keys of
a query, so there is no split whose size could depend on the batch:

    keys of a node    committed 0 .. len-1 | its ancestors, itself last
    place in the row  the same             | len + path[0], len + path[1], ..
    blocks            0 .. block-1 | block .. 2 block-1 | ..              the same keys in the same places of a block

Prompts and trees run the same kernel, with a tile of one size. The queries of a prompt share a path, so a tile has
several of them; it has one node of a tree. A key that a query does not see adds exactly 0 to its sums.

Shapes: B rows, N queries per row, M nodes per row, Hq query heads, Hkv key heads, G = Hq / Hkv, D head dim of queries
and keys, Dv of values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.infer.kernels.paged_reference import Pages, Scoring
from toolkit.infer.kernels.triton.paged_attention import (
    KEY_BYTES,
    LOG2E,
    MAX_BLOCK,
    MAX_WIDTH,
    MIN_TILE,
    UPCAST,
    _fold,
)


@triton.jit(do_not_specialize=["path_row", "path_new", "count_row", "queries", "pages", "together"])
def _attend_paths(
    q, keys, values, table, lengths, path, counts, sinks, out, q_row, q_head, q_new, path_row, path_new, count_row,
    queries, kv_heads, pages, together, scale, softcap, window, page_size: tl.constexpr, groups: tl.constexpr,
    width: tl.constexpr, value_width: tl.constexpr, wide: tl.constexpr, value_wide: tl.constexpr, rows: tl.constexpr,
    block: tl.constexpr, upcast: tl.constexpr,
):  # fmt: skip
    row, kv_head = (tl.program_id(0) // kv_heads).to(tl.int64), tl.program_id(0) % kv_heads
    first_query, folded = tl.program_id(1) * together, tl.arange(0, rows)
    number, head = first_query + folded // groups, kv_head * groups + folded % groups
    real = (folded < together * groups) & (number < queries)
    dim, value_dim = tl.arange(0, wide), tl.arange(0, value_wide)
    begin = q + row * q_row + head.to(tl.int64) * q_head + number.to(tl.int64) * q_new
    asked = tl.load(begin[:, None] + dim[None, :], mask=real[:, None] & (dim < width)[None, :], other=0.0)
    if upcast:
        asked = asked.to(tl.float32)
    length = tl.load(lengths + row).to(tl.int32)
    stands = length - 1 + tl.load(counts + row * count_row + number, mask=real, other=0).to(tl.int32)
    end = tl.max(tl.where(real, stands, -1), axis=0) + 1
    first = 0
    if window is not None:
        lowest = tl.min(tl.where(real, stands, 2147483647), axis=0)
        first = tl.maximum(lowest - window + 1, 0) // block * block
    path += row * path_row + first_query.to(tl.int64) * path_new
    best = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    acc = tl.zeros((rows, value_wide), tl.float32)
    for position in range(first, end, block):
        at = position + tl.arange(0, block)
        inside, node_number = at < end, at - length
        node = tl.load(path + node_number, mask=inside & (node_number >= 0), other=0).to(tl.int32)
        place = tl.where(node_number < 0, at, length + node)
        allowed = at[None, :] <= stands[:, None]
        if window is not None:
            allowed = allowed & (stands[:, None] - at[None, :] < window)
        best, total, acc = _fold(
            best, total, acc, asked, keys + kv_head * width, values + kv_head * value_width, place, inside, allowed,
            table + row * pages, page_size, kv_heads * width, kv_heads * value_width, width, value_width, wide,
            value_wide, scale, softcap, upcast,
        )  # fmt: skip
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * LOG2E - best)
    whole = tl.where(total > 0, total, 1.0)  # padding may see no key
    begin = out + ((row * queries + number) * (kv_heads * groups) + head) * value_width
    stored = real[:, None] & (value_dim < value_width)[None, :]
    tl.store(begin[:, None] + value_dim[None, :], (acc / whole[:, None]).to(out.dtype.element_ty), mask=stored)


def attend_paths(q: Tensor, pages: Pages, lengths: Tensor, path: Tensor, counts: Tensor, scoring: Scoring) -> Tensor:
    """q [B, Hq, N, D] -> [B, N, Hq, Dv]; lengths [B], path [B, N or 1, M], counts [B, N]: see the reference."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    batch, heads, queries, width = q.shape
    _, kv_heads, value_width = pages.values.shape
    groups, size = heads // kv_heads, q.element_size()
    wide, value_wide = (max(MIN_TILE, triton.next_power_of_2(one)) for one in (width, value_width))
    assert max(wide, value_wide) <= MAX_WIDTH, f"heads of {width} and {value_width} leave no room for a tile"
    assert path.stride(2) == 1 or path.shape[2] == 1
    assert counts.stride(1) == 1 or queries == 1
    rows = max(MIN_TILE, triton.next_power_of_2(groups))
    shared = path.shape[1] == 1
    together = rows // groups if shared else 1
    out = torch.empty(batch, queries, heads, value_width, dtype=q.dtype, device=q.device)
    scale = scoring.scaling * LOG2E.value if scoring.softcap is None else scoring.scaling / scoring.softcap
    block = max(MIN_TILE, min(MAX_BLOCK[size], KEY_BYTES // (max(wide, value_wide) * size)))
    _attend_paths[(batch * kv_heads, triton.cdiv(queries, together))](
        q, pages.keys, pages.values, pages.table, lengths, path, counts, scoring.sinks, out, *q.stride()[:3],
        path.stride(0), 0 if shared else path.stride(1), counts.stride(0), queries, kv_heads, pages.table.shape[1],
        together, scale, scoring.softcap, scoring.window, page_size=pages.page_size, groups=groups, width=width,
        value_width=value_width, wide=wide, value_wide=value_wide, rows=rows, block=block, upcast=UPCAST, num_warps=4,
        num_stages=2,
    )  # fmt: skip
    return out
