"""`paged_reference` in Triton: attention for prompts, decoding and trees.

Shapes: B rows, N queries (new positions) per row, Hq query heads, Hkv key heads, G = Hq / Hkv, D head dim of queries
and keys, Dv of values, M nodes per row, S parts of a row's keys.

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

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction

from toolkit.infer.kernels.paged_reference import Pages, Scoring
from toolkit.infer.kernels.triton.launch import dependent, wait_for_earlier

PART_KEYS = 256  # minimum number of keys per part, if there are enough keys
MAX_PARTS = 64
# By bytes of an element: keys of a tile at most, and elements of its queries or scores, which are fewer in fp32, since
# tf32x3 keeps two parts of every factor in registers.
MAX_BLOCK, MAX_TILE = {2: 64, 4: 32}, {2: 16384, 4: 4096}
KEY_BYTES = 16384  # of a tile's keys (and again of its values) in one stage
MAX_WIDTH = 256  # of a head; a wider head leaves no room for a tile
MIN_TILE = 16  # the minimum of tl.dot on a GPU; Triton's interpreter would accept less
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
    q, q_head, q_new, group, tile, queries, kv_heads, groups: tl.constexpr, width: tl.constexpr, wide: tl.constexpr,
    rows: tl.constexpr, upcast: tl.constexpr,
):  # fmt: skip
    """q: pointer to the row's first query.

    Return the tile's queries [rows, wide], the query number of each tile row, and whether that query exists."""
    folded = tile * rows + tl.arange(0, rows)
    number = folded // groups
    head = (group % kv_heads) * groups + folded % groups
    real = number < queries
    dim = tl.arange(0, wide)
    begin = q + head.to(tl.int64) * q_head + number.to(tl.int64) * q_new
    loaded = tl.load(begin[:, None] + dim[None, :], mask=real[:, None] & (dim < width)[None, :], other=0.0)
    if upcast:
        loaded = loaded.to(tl.float32)
    return loaded, number, real


@triton.jit
def _leave(
    best, total, acc, parts, part_lse, sinks, group, tile, part, part_count, queries, kv_heads, number, real, first,
    groups: tl.constexpr, value_width: tl.constexpr, value_wide: tl.constexpr, rows: tl.constexpr,
    whole: tl.constexpr,
):  # fmt: skip
    """Write the tile's part [rows, Dv] and its log-sum-exp; `whole`: this is the only part, so write the output, in
    which the row's queries are from `first` on."""
    folded = tile * rows + tl.arange(0, rows)
    value_dim = tl.arange(0, value_wide)
    stored = real[:, None] & (value_dim < value_width)[None, :]
    if whole:
        head = (group % kv_heads) * groups + folded % groups
        if sinks is not None:
            sink = tl.load(sinks + head).to(tl.float32) * LOG2E
            total += tl.exp2(sink - best)
        begin = parts + ((first + number) * (kv_heads * groups) + head) * value_width
        tl.store(begin[:, None] + value_dim[None, :], (acc / total[:, None]).to(parts.dtype.element_ty), mask=stored)
    else:
        seen = total > 0
        place = (group.to(tl.int64) * (queries * groups) + folded) * part_count + part
        begin = parts + place * value_width
        weight = tl.where(seen, total, 1.0)
        # A part without an allowed key is not read.
        tl.store(begin[:, None] + value_dim[None, :], acc / weight[:, None], mask=stored & seen[:, None])
        tl.store(part_lse + place, tl.where(seen, best + tl.log2(weight), float("-inf")), mask=real)


@triton.jit
def _queries_of(begins, row, queries):
    """The place of a row's first query among those of all rows, and their number: `queries` without begins."""
    first, count = row.to(tl.int64) * queries, queries
    if begins is not None:
        first = tl.load(begins + row)
        count = (tl.load(begins + row + 1) - first).to(tl.int32)
    return first, count


@triton.jit(do_not_specialize=["queries", "pages", "part_count"])
def causal_parts(
    q, keys, values, table, starts, begins, sinks, parts, part_lse, q_row, q_head, q_new, queries, kv_heads, pages,
    part_count, scale, softcap, window, page_size: tl.constexpr, groups: tl.constexpr, width: tl.constexpr,
    value_width: tl.constexpr, wide: tl.constexpr, value_wide: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
    whole: tl.constexpr, upcast: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    wait_for_earlier(pdl)
    group, tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, kv_head = group // kv_heads, group % kv_heads
    first_query, count = _queries_of(begins, row, queries)
    if begins is None:
        q += row.to(tl.int64) * q_row
    else:
        q += first_query * q_new
    loaded, number, real = _load_queries(
        q, q_head, q_new, group, tile, count, kv_heads, groups, width, wide, rows, upcast
    )
    start = tl.load(starts + row).to(tl.int32)
    stands = start + number
    end = start + tl.minimum((tile * rows + rows - 1) // groups, count - 1) + 1
    end = tl.where(tile * rows < count * groups, end, 0)  # a tile after the row's last query reads no key
    first = 0
    if window is not None:
        first = tl.maximum(start + tile * rows // groups - window + 1, 0) // block * block
    own = tl.cdiv(tl.cdiv(tl.maximum(end - first, 0), block), part_count) * block
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
        first_query, groups, value_width, value_wide, rows, whole,
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
        q + row.to(tl.int64) * q_row, q_head, q_new, group, tile, queries, kv_heads, groups, width, wide, rows, upcast
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
        best, total, acc, parts, part_lse, None, group, tile, part, part_count, queries, kv_heads, number, real, 0,
        groups, value_width, value_wide, rows, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["queries", "part_count"])
def merge_parts(
    parts, part_lse, begins, sinks, out, queries, kv_heads, part_count, groups: tl.constexpr,
    value_width: tl.constexpr, value_wide: tl.constexpr, parts_wide: tl.constexpr, pdl: tl.constexpr,
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
    first, count = _queries_of(begins, group // kv_heads, queries)
    place = out + ((first + folded // groups) * (kv_heads * groups) + head) * value_width + value_dim
    stored = tl.where(folded // groups < count, value_width, 0)  # after the row's last query nothing
    tl.store(place, merged.to(out.dtype.element_ty), mask=value_dim < stored)


# Triton's interpreter computes wrong results in bf16: convert to fp32 right after every load.
UPCAST = not isinstance(merge_parts, JITFunction)


def attend_causal(
    q: Tensor, pages: Pages, starts: Tensor, scoring: Scoring, begins: Tensor | None = None, longest: int = 0
) -> Tensor:
    """q [B, Hq, N, D] -> [B, N, Hq, Dv]. Query n of row b has position starts[b] + n; it attends to keys up to it.

    begins, longest: of rows of several lengths in q [1, Hq, T, D], see the reference."""
    launch = _Launch(q, pages, scoring, None if begins is None else (len(starts), longest))
    parts = launch.part_count(pages.span)
    if launch.programs * launch.tiles >= _processors(q.device):
        parts = 1  # there is work for all; parts of a long prompt would be tens of MB in fp32
    out, part_out, part_lse = launch.outputs(parts)
    whole = parts == 1
    causal_parts[(launch.programs, launch.tiles, parts)](
        launch.q, pages.keys, pages.values, pages.table, starts, begins, scoring.sinks if whole else None,
        out if whole else part_out, part_lse, *launch.q.stride()[:3], launch.queries, launch.kv_heads,
        pages.table.shape[1], parts, launch.scale, scoring.softcap, scoring.window, whole=whole, **launch.constants,
    )  # fmt: skip
    if not whole:
        launch.merge(part_out, part_lse, parts, out, begins)
    return out


def attend_tree(
    q: Tensor, pages: Pages, lengths: Tensor, mask: Tensor, depths: Tensor | None, scoring: Scoring
) -> Tensor:
    """q [B, Hq, N, D] of the newest N of M nodes -> [B, N, Hq, Dv]; lengths [B], mask [B, N, M], depths [B, M]."""
    assert scoring.window is None or depths is not None, "a window needs the nodes' depths"
    nodes = mask.shape[2]
    assert mask.stride(2) == 1 or nodes == 1
    launch = _Launch(q, pages, scoring)
    parts = 1 + launch.part_count(pages.span - nodes, beside=1)
    out, part_out, part_lse = launch.outputs(parts)
    tree_parts[(launch.programs, launch.tiles, parts)](
        launch.q, pages.keys, pages.values, pages.table, lengths, mask.view(torch.uint8), depths, part_out,
        part_lse, *launch.q.stride()[:3], *mask.stride()[:2], 0 if depths is None else depths.stride(0),
        launch.queries, nodes, launch.kv_heads, pages.table.shape[1], parts, launch.scale, scoring.softcap,
        scoring.window, **launch.constants,
    )  # fmt: skip
    launch.merge(part_out, part_lse, parts, out)
    return out


class _Launch:
    """Launch parameters of one layer's attention: tiles of the N * G queries of a key head, for all rows and heads."""

    def __init__(self, q: Tensor, pages: Pages, scoring: Scoring, ragged: tuple[int, int] | None = None) -> None:
        """ragged: number of rows that stand one after another in q, and most queries of one."""
        self.q = q if q.stride(-1) == 1 else q.contiguous()
        rows, heads, self.queries, width = q.shape
        _, self.kv_heads, value_width = pages.values.shape
        self._scoring, self._groups, self._value_width = scoring, heads // self.kv_heads, value_width
        self._shape = (rows, self.queries, heads, value_width)
        if ragged is not None:
            rows, self.queries = ragged
        wide, self._value_wide = (max(MIN_TILE, triton.next_power_of_2(one)) for one in (width, value_width))
        assert max(wide, self._value_wide) <= MAX_WIDTH, f"heads of {width} and {value_width} leave no room for a tile"
        size, widest, folded = q.element_size(), max(wide, self._value_wide), self.queries * self._groups
        block = max(MIN_TILE, min(MAX_BLOCK[size], KEY_BYTES // (widest * size)))
        largest = MAX_TILE[size] // max(widest, block)
        tile = max(MIN_TILE, min(triton.next_power_of_2(folded), largest))
        self.tiles, self.programs = triton.cdiv(folded, tile), rows * self.kv_heads
        self.scale = scoring.scaling * LOG2E.value if scoring.softcap is None else scoring.scaling / scoring.softcap
        self.constants = {
            "page_size": pages.page_size, "groups": self._groups, "width": width, "value_width": value_width,
            "wide": wide, "value_wide": self._value_wide, "rows": tile, "block": block, "upcast": UPCAST,
            **dependent(q), "num_warps": 8 if tile == largest else 4,
            "num_stages": min(4, 2 * KEY_BYTES // (block * widest * size)),
        }  # fmt: skip

    def part_count(self, keys: int, beside: int = 0) -> int:
        """Number of parts of `keys` keys that gives all multiprocessors work; `beside`: parts used for other keys."""
        if self._scoring.window is not None:
            keys = min(keys, self._scoring.window + self.queries)
        wanted = triton.cdiv(2 * _processors(self.q.device), self.tiles * self.programs)
        return max(1, min(wanted, triton.cdiv(keys, PART_KEYS), MAX_PARTS - beside))

    def outputs(self, parts: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Allocate the output [B, N, Hq, Dv] and, for several parts, buffers of the parts and their log-sum-exps."""
        device = self.q.device
        out = torch.empty(self._shape, dtype=self.q.dtype, device=device)
        if parts == 1:
            return out, None, None
        shape = (self.programs, self.queries * self._groups, parts)
        part_out = torch.empty((*shape, self._value_width), dtype=torch.float32, device=device)
        return out, part_out, torch.empty(shape, dtype=torch.float32, device=device)

    def merge(
        self, part_out: Tensor | None, part_lse: Tensor | None, parts: int, out: Tensor, begins: Tensor | None = None
    ) -> None:
        merge_parts[(self.programs * self.queries * self._groups,)](
            part_out, part_lse, begins, self._scoring.sinks, out, self.queries, self.kv_heads, parts,
            groups=self._groups, value_width=self._value_width, value_wide=self._value_wide,
            parts_wide=triton.next_power_of_2(parts), **dependent(self.q),
        )  # fmt: skip


@cache
def _processors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU; an H200's number for Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
