"""`paged_reference` in Triton: the write of new keys and values, and the move of those of accepted nodes.

Shapes: B rows, N new positions per row, A longest path, Hkv key heads, D head dim of keys, Dv of values, E entries.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from toolkit.infer.kernels.paged_reference import Pages

WRITTEN = 1024  # elements of a position's keys, and of its values, that one program copies


@triton.jit
def place_of(table, position, page_size: tl.constexpr):
    """The entry of a position (int64) of the row whose page table is at `table`."""
    return tl.load(table + position // page_size).to(tl.int64) * page_size + position % page_size


@triton.jit
def _copy(store, place, entry, head_stride, stride, at, heads, width: tl.constexpr):
    """Copy elements `at` of one position's heads * width from `entry` to its place in the store."""
    inside = at < heads * width
    numbers = tl.load(entry + (at // width).to(tl.int64) * head_stride + (at % width) * stride, mask=inside)
    tl.store(store + place * heads * width + at, numbers, mask=inside)


@triton.jit(do_not_specialize=["table_row", "first", "new"])
def _write_new(
    key_store, value_store, keys, values, table, starts, table_row, first, new, heads,
    k_row, k_new, k_head, k_one, v_row, v_new, v_head, v_one,
    page_size: tl.constexpr, key_width: tl.constexpr, value_width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    row, position = number // new, number % new
    place = place_of(table + row * table_row, tl.load(starts + row) + first + position, page_size)
    at = tl.program_id(1) * block + tl.arange(0, block)
    _copy(key_store, place, keys + row * k_row + position * k_new, k_head, k_one, at, heads, key_width)
    _copy(value_store, place, values + row * v_row + position * v_new, v_head, v_one, at, heads, value_width)


def write_kv(pages: Pages, keys: Tensor, values: Tensor, starts: Tensor, first: int) -> None:
    """Write keys [B, N, Hkv, D] and values [B, N, Hkv, Dv] of each row at N positions from starts[b] + first on."""
    rows, new, heads, width = keys.shape
    value_width = values.shape[3]
    assert pages.keys.is_contiguous() and pages.values.is_contiguous() and pages.table.stride(1) == 1
    grid = (rows * new, triton.cdiv(heads * max(width, value_width), WRITTEN))
    _write_new[grid](
        pages.keys, pages.values, keys, values, pages.table, starts, pages.table.stride(0), first, new, heads,
        *keys.stride(), *values.stride(), page_size=pages.page_size, key_width=width, value_width=value_width,
        block=WRITTEN,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_row", "path_row"])
def _move_path(
    keys, values, table, lengths, path, accepted, key_layer, value_layer, table_row, length_stride, path_row,
    accepted_stride, page_size: tl.constexpr, key_size: tl.constexpr, value_size: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Move a slice of the entries of one row's path in one layer.

    Node t of the path is never before node t, so no later source is overwritten.
    """
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at = tl.program_id(2) * block + tl.arange(0, block)
    keys += layer * key_layer
    values += layer * value_layer
    table += row * table_row
    length = tl.load(lengths + row * length_stride)
    for step in range(1, tl.load(accepted + row * accepted_stride).to(tl.int32) + 1):
        node = tl.load(path + row * path_row + step)
        source, place = place_of(table, length + node, page_size), place_of(table, length + step, page_size)
        _copy(keys, place, keys + source * key_size, key_size, 1, at, 1, key_size)
        _copy(values, place, values + source * value_size, value_size, 1, at, 1, value_size)


def compact(
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    table: Tensor,
    page_size: int,
    lengths: Tensor,
    path: Tensor,
    accepted: Tensor,
) -> None:
    """Move the entries of node path[b, t], t <= accepted[b], from lengths[b] + path[b, t] to lengths[b] + t.

    keys, values: of every layer, [E, Hkv, D] and [E, Hkv, Dv], side by side in one tensor each.
    """
    sizes = [one[0][0].numel() for one in (keys, values)]
    grid = (len(table), len(keys), triton.cdiv(max(sizes), WRITTEN))
    _move_path[grid](
        keys[0], values[0], table, lengths, path, accepted, _layer_stride(keys), _layer_stride(values),
        table.stride(0), lengths.stride(0), path.stride(0), accepted.stride(0), page_size=page_size, key_size=sizes[0],
        value_size=sizes[1], block=WRITTEN,
    )  # fmt: skip


def _layer_stride(stores: Sequence[Tensor]) -> int:
    """Elements from one layer to the next."""
    size = stores[0].numel()
    for number, store in enumerate(stores):
        begin = store.data_ptr() - stores[0].data_ptr()
        assert begin == number * size * store.element_size(), "the layers are not side by side in one tensor"
    return size
