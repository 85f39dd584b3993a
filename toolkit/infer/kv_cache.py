"""The key/value cache: one slot per running request, its positions side by side.

Shapes: L layers, R rows (slots), S positions a row, Hkv key heads, D head dim.

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
    """What one cache entry holds."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


class KVCache:
    """Keys and values [L, 2, R, S, Hkv, D]; rows and positions grow geometrically, as they are needed."""

    def __init__(self, shape: KVShape) -> None:
        self.shape = shape
        self.rows = 0
        self.span = 0
        self._allocate(0, 0)

    def _allocate(self, rows: int, span: int) -> None:
        shape = self.shape
        # Zeros, not garbage: a masked key is multiplied by 0, and 0 * nan is nan.
        self.store = torch.zeros(
            shape.layers, 2, rows, span, shape.kv_heads, shape.head_dim, dtype=shape.dtype, device=shape.device
        )
        self.rows, self.span = rows, span
        self.keys = list(self.store[:, 0].unbind(0))  # per layer [R, S, Hkv, D]
        self.values = list(self.store[:, 1].unbind(0))
        self.flat_keys = [layer.view(rows * span, shape.kv_heads, shape.head_dim) for layer in self.keys]
        self.flat_values = [layer.view(rows * span, shape.kv_heads, shape.head_dim) for layer in self.values]

    def reserve(self, rows: int, span: int) -> None:
        """Make room for `rows` rows of `span` positions; what is cached is kept."""
        if rows <= self.rows and span <= self.span:
            return
        old, old_rows, old_span = self.store, self.rows, self.span
        rows = self.rows if rows <= self.rows else max(rows, 2 * self.rows)
        span = self.span if span <= self.span else max(span, self.span * 3 // 2)
        self._allocate(rows, -(-span // ROW_STEP) * ROW_STEP)
        if old.numel():
            self.store[:, :, :old_rows, :old_span] = old

    def move_row(self, destination: int, source: int, length: int) -> None:
        """Copy the first `length` positions of row `source` over row `destination`."""
        self.store[:, :, destination, :length] = self.store[:, :, source, :length]

    def move_entries(self, destination: Tensor, source: Tensor) -> None:
        """Copy entries between flat places (row * S + position), [M] each, in every layer."""
        shape = self.shape
        flat = self.store.view(shape.layers * 2, self.rows * self.span, shape.kv_heads, shape.head_dim)
        flat.index_copy_(1, destination, flat.index_select(1, source))
