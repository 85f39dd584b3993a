"""Attention metadata for paged kernels: they read keys and values in place, through the page tables, without a gather.

Shapes: B rows, N new tokens per row, M new and earlier uncommitted entries of a row (tree nodes), Hq and Hkv heads, D
head dim of queries and keys, Dv of values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from toolkit.infer.cache.kv_cache import KVCache
from toolkit.infer.kernels import reference
from toolkit.infer.kernels.dispatch import Ops
from toolkit.infer.kernels.paged_reference import Pages, Scoring, pack_bits


class _PagedRows:
    """Rows written at entries places [B, N] and read through the page table [B, P] up to position `span`."""

    def __init__(self, cache: KVCache, ops: Ops, table: Tensor, places: Tensor, span: int) -> None:
        self._cache, self._write_kv, self._span = cache, ops.write_kv, span
        self._table, self._places = table, places

    def write(self, layer: int, k: Tensor, v: Tensor) -> Pages:
        """Write k [B, Hkv, N, D] and v [B, Hkv, N, Dv] to the layer's pages; return the pages."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        self._write_kv(keys, values, k.transpose(1, 2), v.transpose(1, 2), self._places)
        return Pages(keys, values, self._table, self._cache.pool.page_size, self._span)


class PagedPromptMetadata:
    """The next `tokens` prompt tokens (padded on the right) of rows with starts[b] tokens in the cache already."""

    def __init__(self, cache: KVCache, ops: Ops, first_row: int, starts: Sequence[int], tokens: int) -> None:
        pool, device, span = cache.pool, cache.shape.device, max(starts) + tokens
        table = pool.table(first_row, len(starts), pool.pages_of(span), device)
        self._rows = _PagedRows(cache, ops, table, pool.places(first_row, starts, tokens, device), span)
        self._attend_causal, self._tokens, self._whole = ops.attend_causal, tokens, max(starts) == 0
        self._starts = torch.tensor(starts, device=device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        pages = self._rows.write(layer, k, v)
        scaling, window, softcap, sinks = scoring
        if self._whole and softcap is None and sinks is None and (window is None or window >= self._tokens):
            return reference.attend_causal(q, k, v, scaling=scaling)  # k and v contain every key: skip the cache
        return self._attend_causal(q, pages, self._starts, scoring)


class PagedTreeMetadata:
    """N new nodes per row after prefixes of lengths [B] tokens; node_mask and depths as in `TreeMetadata`.

    table [B, P] int64: page tables, at least up to position `span`. The host uses shapes and `span` only, so a recorded
    forward can run on other lengths and pages.
    """

    def __init__(
        self,
        cache: KVCache,
        ops: Ops,
        table: Tensor,
        lengths: Tensor,
        span: int,
        node_mask: Tensor,
        depths: Tensor | None,
    ) -> None:
        _, new, self._nodes = node_mask.shape
        at = lengths[:, None] + torch.arange(self._nodes - new, self._nodes, device=lengths.device)
        self._rows = _PagedRows(cache, ops, table, cache.pool.places_in(table, at), span)
        self._attend_tree, self._bits = ops.attend_tree, pack_bits(node_mask)
        self._depths = None if depths is None else depths.contiguous()
        self._lengths = lengths

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        pages = self._rows.write(layer, k, v)
        return self._attend_tree(q, pages, self._lengths, self._bits, self._nodes, self._depths, scoring)
