"""Attention metadata of one forward: where its keys are written, and the attention mask. Built once for all layers.

Shapes: B rows, N new tokens per row, S keys, M new and earlier uncommitted entries of a row (tree nodes), Hq and Hkv
heads, D head dim of queries and keys, Dv of values.

A row of the cache during a tree forward (the prefix is committed, the nodes are not):

    position      0 .. len-1   len .. len+M-1
    entry         prefix       node 0 .. M-1            the N new nodes are the last of the M
    attended by   all nodes    itself and descendants

Kernels for paged attention read keys and values in place (paged_metadata.py). Other caches are read as views
(contiguous rows) or as gathered copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from toolkit.infer.attention.paged_metadata import PagedInOrderMetadata, PagedPromptMetadata, PagedTreeMetadata
from toolkit.infer.cache.kv_cache import KVCache, Window
from toolkit.infer.kernels.batch_invariant import attend_in_order
from toolkit.infer.kernels.dispatch import Ops, RowAttention, ops_for
from toolkit.infer.kernels.paged_reference import Scoring
from toolkit.infer.kernels.reference import additive_mask, attend, attend_causal
from toolkit.infer.request.draft_tree import upload

# Up to this many new nodes per row, a row attention kernel (a pass over the keys per few nodes) beats matrix products.
FEW = 16
CHAIN_PART = 64  # nodes of a chain that a row attention kernel gets at once: it reads the masked keys too


class AttentionMetadata(Protocol):
    """Writes a layer's new keys and values to the cache and computes its attention."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """q [B, Hq, N, D], k [B, Hkv, N, D], v [B, Hkv, N, Dv] -> [B, N, Hq, Dv]."""
        ...

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Writes k [B, Hkv, N, D] and v [B, Hkv, N, Dv] of positions that have no query in this layer."""
        ...


class PromptMetadata:
    """Prompts that start at position 0 of rows first_row .. first_row+B-1, padded on the right to N tokens.

    Padding writes entries after the prompt; the row's next tokens overwrite them before any query reads them.
    """

    def __init__(self, cache: KVCache, first_row: int, rows: int, tokens: int) -> None:
        device = cache.shape.device
        table = cache.pool.table(first_row, rows, cache.pool.pages_of(tokens), device)
        self._window = cache.window(first_row, table, torch.arange(tokens, device=device).expand(rows, tokens), tokens)
        self._tokens = tokens
        self._masks: dict[int | None, Tensor] = {}

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._window.write(layer, k.transpose(1, 2), v.transpose(1, 2))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        scaling, window, softcap, sinks = scoring
        self.write(layer, k, v)
        if softcap is None and sinks is None and (window is None or window >= self._tokens):
            return attend_causal(q, k, v, scaling=scaling)
        if window not in self._masks:
            at = torch.arange(self._tokens, device=q.device)
            distance = at[:, None] - at
            allowed = (distance >= 0) & (distance < (window or self._tokens))
            self._masks[window] = additive_mask(allowed[None], q.shape[1] // k.shape[1], q.dtype)
        return attend(q, k, v, self._masks[window], scaling=scaling, softcap=softcap, sinks=sinks)


class TreeMetadata:
    """N new nodes per row after prefixes of lengths [B] tokens, in rows first_row .. first_row+B-1.

    table [B, P] int64: page tables. span: number of positions read; at least the longest row with its nodes.
    node_mask [B, N, M] bool: the nodes of the row that each new node attends to, itself included.
    depths [B, M]: position of each node relative to its row's length, for layers with a sliding window; None: there is
    none.
    """

    def __init__(
        self,
        cache: KVCache,
        table: Tensor,
        lengths: Tensor,
        span: int,
        node_mask: Tensor,
        depths: Tensor | None,
        first_row: int = 0,
    ) -> None:
        self._rows, self._new, self._nodes = node_mask.shape
        self._span = span
        self._node_mask, self._depths = node_mask, depths
        self._table, self._lengths = table, lengths
        self._masks: dict[int | None, Tensor] = {}
        self._allowed: Tensor | None = None
        self._row_attention = _row_attention(cache, lengths, node_mask) if self._new <= FEW else None
        self._rows_of_cache = (cache, first_row)

    @cached_property
    def _window(self) -> Window:
        cache, first_row = self._rows_of_cache
        new = torch.arange(self._nodes - self._new, self._nodes, device=self._lengths.device)
        return cache.window(first_row, self._table, self._lengths[:, None] + new, self._span)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._window.write(layer, k.transpose(1, 2), v.transpose(1, 2))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        scaling, window, softcap, sinks = scoring
        if window is not None and window >= self._span:
            window = None
        cache, first_row = self._rows_of_cache
        plain = window is None and softcap is None and sinks is None
        if self._row_attention is not None and plain and q.dtype == k.dtype == v.dtype == cache.shape.dtype:
            return self._row_attention(
                q, k, v, *cache.contiguous_addresses(layer, first_row), cache.row_numbers, scaling
            )
        self.write(layer, k, v)
        keys, values = (entries.transpose(1, 2) for entries in self._window.read(layer))
        if window not in self._masks:
            self._masks[window] = self._mask(window, q.shape[1] // k.shape[1], q.dtype)
        return attend(q, keys, values, self._masks[window], scaling=scaling, softcap=softcap, sinks=sinks)

    def _mask(self, window: int | None, groups: int, dtype: torch.dtype) -> Tensor:
        allowed = self._allowed_keys()
        if window is not None:
            allowed = allowed & (self._distances() < window)
        return additive_mask(allowed, groups, dtype)

    def _allowed_keys(self) -> Tensor:
        """Return [B, N, S] bool: True for the prefix and for the nodes set in `node_mask`."""
        if self._allowed is None:
            at = torch.arange(self._span, device=self._lengths.device)
            prefix = at < self._lengths[:, None]
            allowed = prefix[:, None].expand(self._rows, self._new, self._span).contiguous()
            self._allowed = allowed.scatter_(2, self._node_places().expand(self._node_mask.shape), self._node_mask)
        return self._allowed

    def _node_places(self) -> Tensor:
        """Return [B, 1, M]: the position of each node's entry in its row."""
        nodes = torch.arange(self._node_mask.shape[2], device=self._lengths.device)
        return (self._lengths[:, None] + nodes)[:, None]

    def _distances(self) -> Tensor:
        """Return [B, N, S]: distance from each query back to each key; a node's position is length + depth."""
        assert self._depths is not None, "a window needs the nodes' depths"
        stands = torch.arange(self._span, device=self._lengths.device).expand(self._rows, 1, self._span).clone()
        at = self._lengths[:, None] + self._depths
        stands.scatter_(2, self._node_places(), at[:, None])
        return at[:, -self._new :, None] - stands


class InOrderMetadata(TreeMetadata):
    """Like `TreeMetadata`; each query has the bits of plain decoding, whatever is computed beside it.

    Each layer has one path for any number of new nodes. chain: node_mask is causal; long chains are attended in parts.
    """

    def __init__(self, *rows: Any, chain: bool, **more: Any) -> None:
        super().__init__(*rows, **more)
        size = CHAIN_PART if chain else self._new
        self._parts: list[tuple[slice, RowAttention]] = []  # empty: no kernel for this cache
        for first in range(0, self._new, size):
            part = slice(first, min(first + size, self._new))
            mask = self._node_mask[:, part, part] if chain else self._node_mask
            attention = _row_attention(self._rows_of_cache[0], self._lengths + first, mask, in_order=True)
            self._parts += [] if attention is None else [(part, attention)]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        cache, first_row = self._rows_of_cache
        if self._parts and scoring.plain and q.dtype == k.dtype == v.dtype == cache.shape.dtype:
            where = *cache.contiguous_addresses(layer, first_row), cache.row_numbers, scoring.scaling
            outs = [own(q[:, :, at], k[:, :, at], v[:, :, at], *where) for at, own in self._parts]
            return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
        self._window.write(layer, k.transpose(1, 2), v.transpose(1, 2))
        allowed = self._allowed_keys()
        if scoring.window is not None:
            allowed = allowed & (self._distances() < scoring.window)
        return attend_in_order(q, *self._window.read(layer), allowed, scoring)


def prompt_metadata(cache: KVCache, first_row: int, starts: Sequence[int], tokens: int) -> AttentionMetadata:
    """Return the metadata for the next `tokens` prompt tokens (padded on the right) of rows first_row .. first_row+B-1.

    starts[b]: prompt tokens that are in the cache already.
    """
    kernels = _paged_kernels(cache)
    if kernels is not None:
        prompts = PagedInOrderMetadata.of_prompts if cache.in_order else PagedPromptMetadata
        return prompts(cache, kernels, first_row, starts, tokens)
    if max(starts) == 0 and not cache.in_order:
        return PromptMetadata(cache, first_row, len(starts), tokens)
    device = cache.shape.device
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril().expand(len(starts), -1, -1)
    depths = torch.arange(tokens, device=device).expand(len(starts), -1)
    span = max(starts) + tokens
    table = cache.pool.table(first_row, len(starts), cache.pool.pages_of(span), device)
    rows = cache, table, upload(starts, device), span, causal, depths, first_row
    return InOrderMetadata(*rows, chain=True) if cache.in_order else TreeMetadata(*rows)


def tree_metadata(
    cache: KVCache, table: Tensor, lengths: Tensor, span: int, node_mask: Tensor, depths: Tensor | None
) -> AttentionMetadata:
    """Return the metadata for N new nodes per row after prefixes of lengths [B] tokens, in rows 0 .. B-1.

    Arguments as in `TreeMetadata`. The host reads no tensor, so a recorded forward can run on other lengths and pages.
    """
    kernels = _paged_kernels(cache)
    if kernels is not None and cache.in_order:
        return PagedInOrderMetadata.of_trees(cache, kernels, table, lengths, span, node_mask)
    if kernels is not None:
        return PagedTreeMetadata(cache, kernels, table, lengths, span, node_mask, depths)
    rows = cache, table, lengths, span, node_mask, depths
    return InOrderMetadata(*rows, chain=False) if cache.in_order else TreeMetadata(*rows)


def _row_attention(cache: KVCache, lengths: Tensor, node_mask: Tensor, in_order: bool = False) -> RowAttention | None:
    """Return the kernel that computes a layer's attention in one call; None unless rows are contiguous."""
    shape = cache.shape
    choose = ops_for(shape.device.type).row_attention
    if choose is None or not cache.pool.contiguous:
        return None
    return choose(shape.dtype, shape.head_dim, shape.value_dim or shape.head_dim, lengths, node_mask, in_order)


def _paged_kernels(cache: KVCache) -> Ops | None:
    """Return the ops that read this cache through its page tables; None: rows are contiguous or must be gathered."""
    shape = cache.shape
    ops = ops_for(shape.device.type)
    fits = max(shape.head_dim, shape.value_dim or 0) <= ops.paged_width
    return ops if fits and not cache.pool.contiguous else None
