"""The KV cache on the pages of a page pool, and windows: the rows that one forward writes and reads.

Shapes: E entries (positions of all pages), Hkv key heads, D head dim of keys, Dv of values, R rows of the pool. For a
window: B rows, N new positions per row, S positions read.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.infer.cache.page_pool import PagePool
from toolkit.infer.kernels.paged_reference import gather_pages, places_in, write_entries
from toolkit.infer.request.draft_tree import upload

NO_RESERVE = 0x4000  # MAP_NORESERVE: untouched addresses do not count as used memory


@dataclass(frozen=True)
class KVShape:
    """Shape of a KV cache. value_dim None: values are as wide as keys."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    value_dim: int | None = None

    @property
    def bytes_per_token(self) -> int:
        width = self.head_dim + (self.value_dim or self.head_dim)
        return self.layers * self.kv_heads * width * self.dtype.itemsize


class KVCache:
    """Keys [E, Hkv, D] and values [E, Hkv, Dv] of every layer.

    in_order: queries add their keys in the order of the text (`InOrderMetadata`)."""

    def __init__(self, shape: KVShape, pool: PagePool, *, in_order: bool = False) -> None:
        self.shape, self.pool, self.in_order = shape, pool, in_order
        widths = (shape.head_dim, shape.value_dim or shape.head_dim)
        entries = pool.page_count * pool.page_size
        self._memory: dict[int, mmap.mmap] = {}  # id of a tensor -> its memory map, on a Linux CPU
        self.keys, self.values = (self._layers((entries, shape.kv_heads, width)) for width in widths)
        rows, size = pool.rows, pool.pages_per_row * pool.page_size
        # Views [R, positions of a row, Hkv, D or Dv], made once: 60 new views per step would slow down batch 1.
        self.contiguous_keys, self.contiguous_values = (
            [store[: rows * size].view(rows, size, *store.shape[1:]) for store in stores] if pool.contiguous else []
            for stores in (self.keys, self.values)
        )
        # Elements of a contiguous row's keys, and the address of each layer's first row.
        self.row_numbers = size * shape.kv_heads * shape.head_dim
        self._layer_addresses = [
            (keys.data_ptr(), values.data_ptr())
            for keys, values in zip(self.contiguous_keys, self.contiguous_values, strict=True)
        ]
        pool.attach(self)

    def contiguous_addresses(self, layer: int, row: int) -> tuple[int, int]:
        """Return the addresses of a row's keys and values; the values must be as wide as the keys."""
        keys, values = self._layer_addresses[layer]
        skipped = row * self.row_numbers * self.shape.dtype.itemsize
        return keys + skipped, values + skipped

    def _layers(self, shape: tuple[int, ...]) -> list[Tensor]:
        """Return zeros of this shape for every layer."""
        if not self.pool.contiguous:  # in one tensor: a kernel moves entries of all layers in one launch
            return list(torch.zeros(self.shape.layers, *shape, dtype=self.shape.dtype, device=self.shape.device))
        # Some systems limit the size of a single allocation.
        return [self._zeros(shape) for _ in range(self.shape.layers)]

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        """Return zeros: a masked value is multiplied by 0, and 0 * nan is nan. On a Linux CPU the system allocates
        memory at the first touch."""
        dtype, device = self.shape.dtype, self.shape.device
        size = math.prod(shape) * dtype.itemsize
        if device.type != "cpu" or sys.platform != "linux" or size == 0:
            return torch.zeros(shape, dtype=dtype, device=device)
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
        zeros = torch.frombuffer(memory, dtype=dtype).view(shape)
        self._memory[id(zeros)] = memory
        return zeros

    def window(self, first_row: int, table: Tensor, positions: Tensor, span: int) -> Window:
        """Return a window of rows first_row .. first_row+B-1: page table [B, P], new positions [B, N], S = span."""
        return Window(self, first_row, table, positions, span)

    def copy_pages(self, destination: Sequence[int], source: Sequence[int]) -> None:
        """Copy whole pages of all layers."""
        to, of = (upload(pages, self.shape.device) for pages in (destination, source))
        for store in (*self.keys, *self.values):
            pages = store.view(self.pool.page_count, self.pool.page_size, *store.shape[1:])
            pages.index_copy_(0, to, pages.index_select(0, of))

    def zero_pages(self, pages: Sequence[int]) -> None:
        """Write zeros to pages of all layers."""
        numbers = upload(pages, self.shape.device, torch.long)
        for store in (*self.keys, *self.values):
            store.view(self.pool.page_count, self.pool.page_size, *store.shape[1:]).index_fill_(0, numbers, 0)

    def forget_pages(self, first: int, count: int) -> None:
        """Return the memory of pages first .. first+count-1 to the system; whole system pages then read as zeros."""
        for store in (*self.keys, *self.values):
            memory = self._memory.get(id(store))
            if memory is None:
                continue
            size = self.pool.page_size * store[0].nbytes
            start, end = first * size, (first + count) * size
            start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            if end - start >= mmap.PAGESIZE:
                memory.madvise(mmap.MADV_DONTNEED, start, (end - start) // mmap.PAGESIZE * mmap.PAGESIZE)


class Window:
    """Cache rows of one forward, built once for all its layers.

    Contiguous rows are read as views. Scattered pages are gathered; paged kernels must give equal results.
    """

    def __init__(self, cache: KVCache, first_row: int, table: Tensor, positions: Tensor, span: int) -> None:
        self._cache, self._span = cache, span
        self._rows = slice(first_row, first_row + len(table))
        self._table = table[:, : cache.pool.pages_of(span)]
        self._places = places_in(table, positions, cache.pool.page_size)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write keys [B, N, Hkv, D] and values [B, N, Hkv, Dv] to the window's new positions."""
        write_entries(self._cache.keys[layer], keys, self._places)
        write_entries(self._cache.values[layer], values, self._places)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys [B, S, Hkv, D] and values [B, S, Hkv, Dv] of positions 0..S-1."""
        cache = self._cache
        if cache.pool.contiguous:
            seen = self._rows, slice(self._span)
            return cache.contiguous_keys[layer][seen], cache.contiguous_values[layer][seen]
        where = self._table, cache.pool.page_size, self._span
        return gather_pages(cache.keys[layer], *where), gather_pages(cache.values[layer], *where)
