"""Attention metadata for kernels that read keys and values in place, through the page tables. See metadata.py.

Shapes: B rows, N new tokens per row, M new and earlier uncommitted entries of a row (tree nodes), P pages of a table,
Hq and Hkv heads, D head dim of queries and keys, Dv of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from toolkit.infer.cache.kv_cache import KVCache
from toolkit.infer.kernels.dispatch import Ops
from toolkit.infer.kernels.paged_reference import Pages, Scoring
from toolkit.infer.kernels.reference import attend_causal
from toolkit.infer.request.draft_tree import upload


class _PagedRows:
    """Rows with page table [B, P], read up to position `span`, and written from positions starts[b] + first on."""

    def __init__(self, cache: KVCache, ops: Ops, table: Tensor, span: int, starts: Tensor, first: int = 0) -> None:
        self._cache, self._write_kv, self._table, self._span = cache, ops.write_kv, table, span
        self._at = (starts, first)

    def write(self, layer: int, k: Tensor, v: Tensor) -> Pages:
        """Write k [B, Hkv, N, D] and v [B, Hkv, N, Dv] to the layer's pages; return the pages."""
        pages, starts, first = self.places(layer)
        self._write_kv(pages, k.transpose(1, 2), v.transpose(1, 2), starts, first)
        return pages

    def places(self, layer: int) -> tuple[Pages, Tensor, int]:
        """The layer's pages, and `starts` and `first`."""
        cache, (starts, first) = self._cache, self._at
        pages = Pages(cache.keys[layer], cache.values[layer], self._table, cache.pool.page_size, self._span)
        return pages, starts, first


class _PagedMetadata:
    """Metadata whose `write` stores to pages; `attend` of its subclasses writes first."""

    _rows: _PagedRows

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._rows.write(layer, k, v)


class PagedPromptMetadata(_PagedMetadata):
    """The next `tokens` prompt tokens (padded on the right) of rows with starts[b] tokens in the cache already."""

    def __init__(self, cache: KVCache, ops: Ops, first_row: int, starts: Sequence[int], tokens: int) -> None:
        pool, device, span = cache.pool, cache.shape.device, max(starts) + tokens
        table = pool.table(first_row, len(starts), pool.pages_of(span), device)
        self._starts = upload(starts, device)
        self._rows = _PagedRows(cache, ops, table, span, self._starts)
        self._attend_causal, self._tokens, self._whole = ops.attend_causal, tokens, max(starts) == 0

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        pages = self._rows.write(layer, k, v)
        scaling, window, softcap, sinks = scoring
        if self._whole and softcap is None and sinks is None and (window is None or window >= self._tokens):
            return attend_causal(q, k, v, scaling=scaling)  # k and v contain every key: skip the cache
        return self._attend_causal(q, pages, self._starts, scoring)


class PagedTreeMetadata(_PagedMetadata):
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
        _, new, nodes = node_mask.shape
        self._rows = _PagedRows(cache, ops, table, span, lengths, nodes - new)
        self._attend_tree = ops.attend_tree
        self._lengths, self._node_mask, self._depths = lengths, node_mask, depths

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        return self.attend_written(q, self._rows.write(layer, k, v), scoring)

    def places(self, layer: int) -> tuple[Pages, Tensor, int]:
        """Where the new nodes of a layer are written: pages, and `starts` and `first` of the op `write_kv`."""
        return self._rows.places(layer)

    def attend_written(self, q: Tensor, pages: Pages, scoring: Scoring) -> Tensor:
        """q [B, Hq, N, D] -> [B, N, Hq, Dv]; the keys and values of the new nodes are in the pages already."""
        return self._attend_tree(q, pages, self._lengths, self._node_mask, self._depths, scoring)


class PagedInOrderMetadata(_PagedMetadata):
    """N new nodes per row after prefixes of lengths [B] tokens; each query has the bits of plain decoding.

    table, span: as in `PagedTreeMetadata`. path, counts: as in `batch_invariant.attend_paths`. first: number of the
    first new node.
    """

    def __init__(
        self,
        cache: KVCache,
        ops: Ops,
        table: Tensor,
        lengths: Tensor,
        span: int,
        path: Tensor,
        counts: Tensor,
        first: int = 0,
    ) -> None:
        self._rows = _PagedRows(cache, ops, table, span, lengths, first)
        self._attend, self._lengths, self._path, self._counts = ops.attend_paths, lengths, path, counts

    @classmethod
    def of_prompts(cls, cache: KVCache, ops: Ops, first_row: int, starts: Sequence[int], tokens: int) -> Self:
        """Arguments as in `PagedPromptMetadata`."""
        pool, device, span = cache.pool, cache.shape.device, max(starts) + tokens
        table = pool.table(first_row, len(starts), pool.pages_of(span), device)
        path = torch.arange(tokens, device=device).expand(len(starts), 1, tokens)
        return cls(cache, ops, table, upload(starts, device), span, path, path[:, 0] + 1)

    @classmethod
    def of_trees(cls, cache: KVCache, ops: Ops, table: Tensor, lengths: Tensor, span: int, node_mask: Tensor) -> Self:
        """Arguments as in `TreeMetadata`. The host reads no tensor."""
        first = node_mask.shape[2] - node_mask.shape[1]
        return cls(cache, ops, table, lengths, span, *paths_of(node_mask), first)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        pages = self._rows.write(layer, k, v)
        return self._attend(q, pages, self._lengths, self._path, self._counts, scoring)


def paths_of(node_mask: Tensor) -> tuple[Tensor, Tensor]:
    """node_mask [B, N, M] bool -> the nodes that each new node sees, ascending, [B, N, M + 1], and their number [B, N].

    The host reads no tensor."""
    rows, new, nodes = node_mask.shape
    counted = node_mask.cumsum(dim=2)
    at = torch.where(node_mask, counted - 1, nodes)  # the last one takes the nodes that are not seen
    numbers = torch.arange(nodes, device=node_mask.device).expand(rows, new, nodes)
    return counted.new_zeros(rows, new, nodes + 1).scatter_(2, at, numbers), counted[:, :, -1].contiguous()
