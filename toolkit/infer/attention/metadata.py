"""Attention metadata of one forward: where its keys are written, and the attention mask. Built once for all layers.

Shapes: B rows, N new tokens per row, S keys, M new and earlier uncommitted entries of a row (tree nodes), P pages of a
table, Hq and Hkv heads, D head dim of queries and keys, Dv of values.

A row of the cache during a tree forward (the prefix is committed, the nodes are not):

    position      0 .. len-1   len .. len+M-1
    entry         prefix       node 0 .. M-1            the N new nodes are the last of the M
    attended by   all nodes    itself and descendants

Kernels for paged attention read keys and values in place: those of a GPU, and one for few new tokens on a CPU. Plain
torch gathers them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, groupby

import torch
from torch import Tensor

from toolkit.infer.cache.kv_cache import KVCache
from toolkit.infer.kernels.dispatch import REFERENCE, Ops, RowAttention, ops_for
from toolkit.infer.kernels.paged_reference import Pages, Scoring, attend_masked, keys_of_nodes, write_entries
from toolkit.infer.kernels.reference import additive_mask, attend_causal
from toolkit.infer.request.draft_tree import upload

# Up to this many new nodes per row, a row attention kernel (a pass over the keys per few nodes) beats matrix products.
FEW = 16
CHAIN_PART = 64  # nodes of a chain that a row attention kernel gets at once: it reads the masked keys too


class AttentionMetadata:
    """N new nodes per row after prefixes of lengths [B] tokens: writes a layer's new keys and values to the cache and
    computes its attention.

    table [B, P] int64: page tables, at least up to position `span`. span: number of positions read; at least the
    longest row with its nodes. new: N. node_mask [B, N, M] bool: the nodes of the row that each new node attends to,
    itself included; None: those up to itself, where kernels need no mask for it. depths [B, M]: position of each node
    relative to its row's length, for layers with a sliding window; None: there is none. prompt: the new nodes are the
    next tokens of prompts. The host reads no tensor, so a recorded forward can run on other lengths and pages.
    """

    def __init__(
        self,
        cache: KVCache,
        table: Tensor,
        lengths: Tensor,
        span: int,
        new: int,
        node_mask: Tensor | None,
        depths: Tensor | None,
        *,
        prompt: bool = False,
    ) -> None:
        self._cache, self._table, self._lengths, self._span, self._new = cache, table, lengths, span, new
        self._node_mask, self._depths, self._prompt = node_mask, depths, prompt
        self._first = 0 if node_mask is None else node_mask.shape[2] - new  # number of the first new node
        self._kernels = paged_kernels(cache)
        self._masks: dict[int | None, Tensor] = {}

    @property
    def in_place(self) -> bool:
        """Whether another kernel may write the new keys and values, before `attend_written`."""
        return self._kernels is not None and not self._prompt

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """q [B, Hq, N, D], k [B, Hkv, N, D], v [B, Hkv, N, Dv] -> [B, N, Hq, Dv]."""
        if self._prompt and self._span == self._new and self._is_plain(scoring):  # k and v have every key
            self.write(layer, k, v)
            return attend_causal(q, k, v, scaling=scoring.scaling)
        of_rows = self.row_attention(layer, scoring, q.dtype) if q.dtype == k.dtype == v.dtype else None
        if of_rows is not None:
            attention, keys, values = of_rows
            return attention(q, k, v, keys, values, scoring.scaling)
        return self.attend_written(q, self.write(layer, k, v), scoring)

    def row_attention(
        self, layer: int, scoring: Scoring, dtype: torch.dtype
    ) -> tuple[RowAttention, Tensor, Tensor] | None:
        """The kernel that computes the layer's attention in one call, and the layer's keys and values; None: there is
        none for this forward."""
        cache, whole_prompt = self._cache, self._prompt and self._span == self._new
        if whole_prompt or dtype != cache.shape.dtype or self._row_attention is None or not self._is_plain(scoring):
            return None
        return self._row_attention, cache.keys[layer], cache.values[layer]

    def _is_plain(self, scoring: Scoring) -> bool:
        return scoring._replace(window=self._window(scoring)).plain

    def attend_written(self, q: Tensor, pages: Pages, scoring: Scoring) -> Tensor:
        """As `attend`; the new keys and values are in the layer's `pages` already."""
        if self._kernels is not None and self._node_mask is None:
            return self._kernels.attend_causal(q, pages, self._lengths, scoring)
        assert self._node_mask is not None, "without kernels a mask is needed"
        if self._kernels is not None:
            return self._kernels.attend_tree(q, pages, self._lengths, self._node_mask, self._depths, scoring)
        window = self._window(scoring)
        if window not in self._masks:
            seen = keys_of_nodes(self._lengths, self._span, self._node_mask, self._depths, window)
            self._masks[window] = additive_mask(seen, q.shape[1] // pages.keys.shape[1], q.dtype)
        return attend_masked(q, pages, self._masks[window], scoring)

    def _window(self, scoring: Scoring) -> int | None:
        """The window; None if it holds all positions that are read."""
        return None if scoring.window is None or scoring.window >= self._span else scoring.window

    def write(self, layer: int, k: Tensor, v: Tensor) -> Pages:
        """Write k [B, Hkv, N, D] and v [B, Hkv, N, Dv] to the layer's pages; return the pages."""
        pages, starts, first = self.places(layer)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if self._kernels is not None:
            self._kernels.write_kv(pages, k, v, starts, first)
        else:
            write_entries(pages.keys, k, self._new_entries)
            write_entries(pages.values, v, self._new_entries)
        return pages

    def places(self, layer: int) -> tuple[Pages, Tensor, int]:
        """Where a layer's new nodes are written: pages, and `starts` and `first` of the op `write_kv`."""
        return self._cache.pages(layer, self._table, self._span), self._lengths, self._first

    @cached_property
    def _new_entries(self) -> Tensor:
        new = torch.arange(self._first, self._first + self._new, device=self._lengths.device)
        return self._cache.entries(self._table, self._lengths[:, None] + new)

    @cached_property
    def _row_attention(self) -> RowAttention | None:
        return self._kernel_of_rows(self._lengths, self._node_mask) if self._new <= FEW else None

    def _kernel_of_rows(self, lengths: Tensor, node_mask: Tensor | None, in_order: bool = False) -> RowAttention | None:
        """The kernel that computes any layer's attention in one call; None if there is none."""
        choose = ops_for(self._cache.shape.device.type).row_attention
        if choose is None or node_mask is None:
            return None
        return choose(self._cache.pages(0, self._table, self._span), lengths, node_mask, in_order)


class InOrderMetadata(AttentionMetadata):
    """Like `AttentionMetadata`; each query has the bits of plain decoding, whatever is computed beside it.

    Each layer has one path for any number of new nodes; long prompts are attended in parts.
    """

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        cache = self._cache
        if self._parts and scoring.plain and q.dtype == k.dtype == v.dtype == cache.shape.dtype:
            where = cache.keys[layer], cache.values[layer], scoring.scaling
            outs = [own(q[:, :, at], k[:, :, at], v[:, :, at], *where) for at, own in self._parts]
            return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
        attend = (self._kernels or REFERENCE).attend_paths
        return attend(q, self.write(layer, k, v), self._lengths, *self._paths, scoring)

    @cached_property
    def _parts(self) -> list[tuple[slice, RowAttention]]:
        """The kernels of parts of the new nodes; empty: none for this cache."""
        if self._node_mask is None:
            return []
        size = CHAIN_PART if self._prompt else self._new
        parts: list[tuple[slice, RowAttention]] = []
        for first in range(0, self._new, size):
            part = slice(first, min(first + size, self._new))
            mask = self._node_mask[:, part, part] if self._prompt else self._node_mask
            attention = self._kernel_of_rows(self._lengths + first, mask, in_order=True)
            parts += [] if attention is None else [(part, attention)]
        return parts

    @cached_property
    def _paths(self) -> tuple[Tensor, Tensor]:
        """`path` and `counts` of the op `attend_paths`."""
        if self._prompt or self._node_mask is None:
            path = torch.arange(self._new, device=self._lengths.device).expand(len(self._lengths), 1, self._new)
            return path, path[:, 0] + 1
        return paths_of(self._node_mask)


class PackedMetadata(AttentionMetadata):
    """Lets layers compute the T valid nodes of trees, [1, T], without padding. Attention sees rows of one length: all
    rows, or if most nodes are padding, those of the root alone apart from the others.

    Arguments: see `tree_metadata`; valid [B, N] bool, True for roots. numbers [B, N]: of each node among the
    T; of padding that of its root.
    """

    def __init__(
        self,
        cache: KVCache,
        table: Tensor,
        lengths: Tensor,
        span: int,
        node_mask: Tensor,
        depths: Tensor,
        valid: Tensor,
    ) -> None:
        super().__init__(cache, table, lengths, span, valid.shape[1], node_mask, depths)
        self._nodes = valid.flatten().nonzero().flatten()
        numbers = (valid.flatten().cumsum(0) - 1).view_as(valid)
        self.numbers = torch.where(valid, numbers, numbers[:, :1])
        alone = valid.sum(dim=1) == 1
        apart = 2 * len(self._nodes) < valid.numel() and bool(alone.any()) and not alone.all()
        groups = [(alone, 1), (~alone, valid.shape[1])] if apart else [(alone | ~alone, valid.shape[1])]
        self._groups = []  # of each: places, which of them are valid, their numbers among the T, metadata
        for rows, count in groups:
            parts = table[rows], lengths[rows], span, node_mask[rows, :count, :count], depths[rows, :count]
            places, which = self.numbers[rows, :count], valid[rows, :count].flatten().nonzero().flatten()
            self._groups.append((places, which, places.flatten()[which], tree_metadata(cache, *parts)))

    def pack(self, x: Tensor) -> Tensor:
        """[B, N, ..] -> [1, T, ..]."""
        return x.flatten(0, 1).index_select(0, self._nodes)[None]

    def spread(self, x: Tensor, places: Tensor | None = None) -> Tensor:
        """[1, T, ..] -> [B, N, ..], or as many rows and nodes as `places` has."""
        places = self.numbers if places is None else places
        return x[0].index_select(0, places.flatten()).view(*places.shape, *x.shape[2:])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """q [1, Hq, T, D], k [1, Hkv, T, D], v [1, Hkv, T, Dv] -> [1, T, Hq, Dv]."""
        found = q.new_empty(1, q.shape[2], q.shape[1], v.shape[3])
        for places, which, numbers, metadata in self._groups:
            q_own, k_own, v_own = (self.spread(one.transpose(1, 2), places).transpose(1, 2) for one in (q, k, v))
            out = metadata.attend(layer, q_own, k_own, v_own, scoring).flatten(0, 1)
            found[0].index_copy_(0, numbers, out.index_select(0, which))
        return found

    @property
    def in_place(self) -> bool:
        return False

    def row_attention(self, layer: int, scoring: Scoring, dtype: torch.dtype) -> None:
        """There is no kernel for rows of different lengths."""


class RaggedMetadata(AttentionMetadata):
    """The next counts[b] prompt tokens of several rows, one row after another in [1, T]: no layer computes padding.

    Kernels attend in all rows at once; else neighbours of one length do."""

    def __init__(self, cache: KVCache, first_row: int, starts: Sequence[int], counts: Sequence[int]) -> None:
        device, span = cache.shape.device, max(map(sum, zip(starts, counts, strict=True)))
        table = cache.pool.table(first_row, len(starts), cache.pool.pages_of(span), device)
        super().__init__(cache, table, upload(starts, device), span, sum(counts), None, None, prompt=True)
        begins = list(accumulate(counts, initial=0))
        self._begins, self._longest = upload(begins, device), max(counts)
        row = torch.arange(len(counts), device=device).repeat_interleave(upload(counts, device), output_size=begins[-1])
        at = torch.arange(begins[-1], device=device) + (self._lengths - self._begins[:-1])[row]
        size = cache.pool.page_size
        self._new_entries = (table[row, at // size] * size + at % size)[None]
        self._groups = []  # of neighbours with as many earlier and new tokens: their part of T, number, metadata
        for (start, count), same in groupby(range(len(starts)), lambda row: (starts[row], counts[row])):
            rows = list(same)
            metadata = prompt_metadata(cache, first_row + rows[0], [start] * len(rows), count)
            self._groups.append((slice(begins[rows[0]], begins[rows[-1] + 1]), len(rows), metadata))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """q [1, Hq, T, D], k [1, Hkv, T, D], v [1, Hkv, T, Dv] -> [1, T, Hq, Dv]."""
        if self._kernels is not None and not self._cache.in_order:
            pages = self.write(layer, k, v)
            return self._kernels.attend_causal(q, pages, self._lengths, scoring, self._begins, self._longest)
        found = []
        for part, rows, metadata in self._groups:
            own_q, own_k, own_v = (one[0, :, part].unflatten(1, (rows, -1)).transpose(0, 1) for one in (q, k, v))
            found.append(metadata.attend(layer, own_q, own_k, own_v, scoring).flatten(0, 1))
        return torch.cat(found)[None]

    def write(self, layer: int, k: Tensor, v: Tensor) -> Pages:
        """k [1, Hkv, T, D], v [1, Hkv, T, Dv]."""
        pages = self._cache.pages(layer, self._table, self._span)
        write_entries(pages.keys, k.transpose(1, 2), self._new_entries)
        write_entries(pages.values, v.transpose(1, 2), self._new_entries)
        return pages


class PagedAttend:
    """The `Attend` of one pass over the layers of a draft head, in order. shape: (B, N)."""

    def __init__(self, metadata: AttentionMetadata, scoring: Scoring, shape: tuple[int, int]) -> None:
        self.metadata, self.scoring, self.shape = metadata, scoring, shape
        self._next = 0

    def next_place(self) -> int:
        """The number in the cache of the layer that attends now."""
        self._next += 1
        return self._next - 1

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.view(*self.shape, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        return self.metadata.attend(self.next_place(), q, k, v, self.scoring).flatten(0, 1)


def prompt_metadata(cache: KVCache, first_row: int, starts: Sequence[int], tokens: int) -> AttentionMetadata:
    """Return the metadata for the next `tokens` prompt tokens of rows first_row .. first_row+B-1.

    starts[b]: prompt tokens that are in the cache already. Entries that are written after a prompt are overwritten by
    the row's next tokens before any query reads them.
    """
    device, rows, span = cache.shape.device, len(starts), max(starts) + tokens
    table = cache.pool.table(first_row, rows, cache.pool.pages_of(span), device)
    causal, depths = None, None
    if paged_kernels(cache) is None:
        causal = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril().expand(rows, -1, -1)
        depths = torch.arange(tokens, device=device).expand(rows, -1)
    kind = InOrderMetadata if cache.in_order else AttentionMetadata
    return kind(cache, table, upload(starts, device), span, tokens, causal, depths, prompt=True)


def prompts_metadata(cache: KVCache, first_row: int, starts: Sequence[int], counts: Sequence[int]) -> AttentionMetadata:
    """As `prompt_metadata` for counts[b] tokens of each row, which stand one after another in [1, T]."""
    if len(starts) == 1:
        return prompt_metadata(cache, first_row, starts, counts[0])
    return RaggedMetadata(cache, first_row, starts, counts)


def tree_metadata(
    cache: KVCache, table: Tensor, lengths: Tensor, span: int, node_mask: Tensor, depths: Tensor | None
) -> AttentionMetadata:
    """Return the metadata for N new nodes per row after prefixes of lengths [B] tokens, in rows 0 .. B-1.

    Arguments as in `AttentionMetadata`.
    """
    kind = InOrderMetadata if cache.in_order else AttentionMetadata
    return kind(cache, table, lengths, span, node_mask.shape[1], node_mask, depths)


def paths_of(node_mask: Tensor) -> tuple[Tensor, Tensor]:
    """node_mask [B, N, M] bool -> the nodes that each new node sees, ascending, [B, N, M + 1], and their number [B, N].

    The host reads no tensor."""
    rows, new, nodes = node_mask.shape
    counted = node_mask.cumsum(dim=2)
    at = torch.where(node_mask, counted - 1, nodes)  # the last one takes the nodes that are not seen
    numbers = torch.arange(nodes, device=node_mask.device).expand(rows, new, nodes)
    return counted.new_zeros(rows, new, nodes + 1).scatter_(2, at, numbers), counted[:, :, -1].contiguous()


def paged_kernels(cache: KVCache) -> Ops | None:
    """Return the ops that read this cache through its page tables; None: pages must be gathered."""
    shape = cache.shape
    ops = ops_for(shape.device.type)
    return ops if max(shape.head_dim, shape.value_dim or 0) <= ops.paged_width else None
