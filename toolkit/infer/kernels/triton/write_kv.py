"""`paged_reference.write_kv` in Triton: writes new keys and values to the pages of a cache, in one launch.

Shapes: B rows, N new positions per row, Hkv key heads, D head dim of keys, Dv of values, E entries.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # elements of a position's keys, and of its values, that one program copies


@triton.jit
def _copy(store, place, entry, head_stride, stride, at, heads, width: tl.constexpr):
    """Copy elements `at` of one position's heads * width from `entry` to its place in the store."""
    inside = at < heads * width
    numbers = tl.load(entry + (at // width) * head_stride + (at % width) * stride, mask=inside)
    tl.store(store + place * heads * width + at, numbers, mask=inside)


@triton.jit
def _write_entries(
    key_store, value_store, keys, values, places, new, heads,
    k_row, k_new, k_head, k_one, v_row, v_new, v_head, v_one,
    key_width: tl.constexpr, value_width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    row, position = number // new, number % new
    place = tl.load(places + number)
    at = tl.program_id(1) * block + tl.arange(0, block)
    _copy(key_store, place, keys + row * k_row + position * k_new, k_head, k_one, at, heads, key_width)
    _copy(value_store, place, values + row * v_row + position * v_new, v_head, v_one, at, heads, value_width)


def write_kv(key_store: Tensor, value_store: Tensor, keys: Tensor, values: Tensor, places: Tensor) -> None:
    """Write keys [B, N, Hkv, D] to key_store [E, Hkv, D] at entries places [B, N] int64; values [.., Dv] likewise."""
    rows, new, heads, width = keys.shape
    value_width = values.shape[3]
    assert key_store.is_contiguous() and value_store.is_contiguous() and places.is_contiguous()
    grid = (rows * new, triton.cdiv(heads * max(width, value_width), BLOCK))
    _write_entries[grid](
        key_store, value_store, keys, values, places, new, heads, *keys.stride(), *values.stride(),
        key_width=width, value_width=value_width, block=BLOCK,
    )  # fmt: skip
