"""The key/value cache: one slot per running request, its positions side by side.

Shapes: L layers, R rows (slots), S positions a row, Hkv key heads, D head dim of keys, Dv of values.

Running requests always hold rows 0..B-1: a new one is appended, and the last row fills the hole of a finished one.
So every forward works on a contiguous range of rows and on a view of the first positions; nothing is gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROW_STEP = 64  # positions are allocated in multiples of this


@dataclass(frozen=True)
class KVShape:
    """What one cache entry holds; value_dim None: values are as wide as keys."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    value_dim: int | None = None


class KVCache:
    """Keys [L, R, S, Hkv, D] and values [L, R, S, Hkv, Dv]; rows and positions grow geometrically, as needed."""

    def __init__(self, shape: KVShape) -> None:
        self.shape = shape
        self.rows = 0
        self.span = 0
        self._allocate(0, 0)

    def _allocate(self, rows: int, span: int) -> None:
        self.rows, self.span = rows, span
        self.stores = (self._zeros(self.shape.head_dim), self._zeros(self.shape.value_dim or self.shape.head_dim))
        self.keys, self.values = (list(store.unbind(0)) for store in self.stores)  # per layer [R, S, Hkv, D or Dv]
        self.flat_keys, self.flat_values = (list(store.flatten(1, 2).unbind(0)) for store in self.stores)

    def _zeros(self, width: int) -> Tensor:
        # Zeros, not garbage: a masked key is multiplied by 0, and 0 * nan is nan.
        shape = self.shape
        return torch.zeros(
            shape.layers, self.rows, self.span, shape.kv_heads, width, dtype=shape.dtype, device=shape.device
        )

    def reserve(self, rows: int, span: int) -> None:
        """Make room for `rows` rows of `span` positions; what is cached is kept."""
        if rows <= self.rows and span <= self.span:
            return
        before, old_rows, old_span = self.stores, self.rows, self.span
        rows = self.rows if rows <= self.rows else max(rows, 2 * self.rows)
        span = self.span if span <= self.span else max(span, self.span * 3 // 2)
        self._allocate(rows, -(-span // ROW_STEP) * ROW_STEP)
        for store, old in zip(self.stores, before, strict=True):
            store[:, :old_rows, :old_span] = old

    def move_row(self, destination: int, source: int, length: int) -> None:
        """Copy the first `length` positions of row `source` over row `destination`."""
        for store in self.stores:
            store[:, destination, :length] = store[:, source, :length]

    def move_entries(self, destination: Tensor, source: Tensor) -> None:
        """Copy entries between flat places (row * S + position), [M] each, in every layer."""
        for store in self.stores:
            flat = store.flatten(1, 2)
            flat.index_copy_(1, destination, flat.index_select(1, source))
