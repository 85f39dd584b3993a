"""The KV cache on the pages of a page pool.

Shapes: E entries (positions of all pages), Hkv key heads, D head dim of keys, Dv of values; B rows, P pages of a table,
N new positions per row.
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
from toolkit.infer.kernels.paged_reference import Pages, places_in
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
        self._padding = pool.page_count * pool.page_size  # a page of its own: page 0 stays zero in plain torch
        entries = self._padding + pool.page_size
        # Of all layers in one tensor: a kernel moves their entries in one launch.
        self.keys, self.values = (list(self._zeros((shape.layers, entries, shape.kv_heads, width))) for width in widths)
        pool.attach(self)

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        """Return zeros: a masked value is multiplied by 0, and 0 * nan is nan. On a Linux CPU the system allocates
        memory at the first touch."""
        dtype, device = self.shape.dtype, self.shape.device
        size = math.prod(shape) * dtype.itemsize
        if device.type != "cpu" or sys.platform != "linux" or size == 0:
            return torch.zeros(shape, dtype=dtype, device=device)
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    def pages(self, layer: int, table: Tensor, span: int) -> Pages:
        """Return a layer's pages for rows with page table [B, P], read up to position `span`."""
        return Pages(self.keys[layer], self.values[layer], table, self.pool.page_size, span)

    def entries(self, table: Tensor, positions: Tensor) -> Tensor:
        """Return where plain torch writes `positions` [B, N] of rows with page table [B, P], [B, N] int64."""
        places, size = places_in(table, positions, self.pool.page_size), self.pool.page_size
        return torch.where(places < size, places + self._padding, places)

    def zero_pages(self, pages: Sequence[int]) -> None:
        """Write zeros to pages of all layers."""
        numbers = upload(pages, self.shape.device, torch.long)
        for store in (*self.keys, *self.values):
            store.view(-1, self.pool.page_size, *store.shape[1:]).index_fill_(0, numbers, 0)
