"""Paged attention in plain torch: the reference that the Triton kernels must match.

Shapes: B rows, N queries per row, M uncommitted nodes per row, A longest path, Hq query heads, Hkv key heads, D head
dim of queries and keys, Dv of values, E entries of a cache, P pages of a table.

Position p of a row is stored at entry table[row, p // page_size] * page_size + p % page_size. Entries after a row's
written positions do not influence the result. The reference multiplies them by 0, so here they must be finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from toolkit.heads.decoder_layer import rotate
from toolkit.infer.kernels.reference import additive_mask, attend, rms_norm


@dataclass(frozen=True)
class Pages:
    """One layer's cache and the page tables of a forward's rows.

    keys [E, Hkv, D], values [E, Hkv, Dv]; table [B, P] int64; span: every row reads positions < span only, with
    span <= P * page_size.
    """

    keys: Tensor
    values: Tensor
    table: Tensor
    page_size: int
    span: int


class Scoring(NamedTuple):
    """How a query scores keys, as in `reference.attend`. Keys `window` or more positions back are masked."""

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether a query sees all earlier keys, by their products alone."""
        return self.window is None and self.softcap is None and self.sinks is None


def places_in(table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Return [B, N] int64: the cache entries of `positions` [B, N] of rows with page table [B, P]."""
    return table.gather(1, positions // page_size) * page_size + positions % page_size


def write_entries(store: Tensor, entries: Tensor, places: Tensor) -> None:
    """Write entries [B, N, Hkv, D] to store [E, Hkv, D] at places [B, N] int64."""
    store.index_copy_(0, places.flatten(), entries.reshape(-1, *store.shape[1:]))


def write_kv(pages: Pages, keys: Tensor, values: Tensor, starts: Tensor, first: int) -> None:
    """Write keys [B, N, Hkv, D] and values [B, N, Hkv, Dv] at positions starts[b] + first .. starts[b] + first + N - 1.

    If several are written to one entry (padding, on the page that is never read), any one of them remains.
    """
    new = torch.arange(first, first + keys.shape[1], device=keys.device)
    places = places_in(pages.table, starts[:, None] + new, pages.page_size)
    write_entries(pages.keys, keys, places)
    write_entries(pages.values, values, places)


def rotate_joined(
    joined: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: tuple[int, int],
    norms: tuple[Tensor, Tensor, float] | None,
    pages: Pages | None,
    starts: Tensor | None,
    first: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """joined [B, N, (Hq + 2 Hkv) * D]: queries, keys and values of one product; cos and sin [B, N, D] -> queries
    [B, N, Hq, D], rotated, with the keys and values.

    heads: Hq, Hkv. norms: weights [D] of RMSNorms of each query and key before the rotation, and their epsilon (Qwen3).
    Without pages the keys and values are new tensors [B, N, Hkv, D]; else they are written as `write_kv` does, and
    those of `pages` are returned.
    """
    rows, new, _ = joined.shape
    q_heads, kv_heads = heads
    q, k, v = joined.view(rows, new, q_heads + 2 * kv_heads, -1).split((q_heads, kv_heads, kv_heads), dim=2)
    if norms is not None:
        q_norm, k_norm, eps = norms
        q, k = rms_norm(q, q_norm, eps, 0.0, True), rms_norm(k, k_norm, eps, 0.0, True)
    q, k = rotate(q, k, cos[:, :, None], sin[:, :, None])
    if pages is None:
        return q, k, v
    assert starts is not None
    write_kv(pages, k, v, starts, first)
    return q, pages.keys, pages.values


def compact(
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    table: Tensor,
    page_size: int,
    lengths: Tensor,
    path: Tensor,
    accepted: Tensor,
) -> None:
    """Move the entries of accepted nodes to the positions of plain decoding, in every layer.

    keys, values: of every layer. Node n of a row is at position lengths[b] + n. Node path[b, t] of the accepted path
    [B, A] belongs at lengths[b] + t, for t <= accepted[b]. A path ascends from node 0, which never moves.
    """
    at = torch.arange(1, path.shape[1], device=path.device)
    moved = torch.where(at <= accepted[:, None], path[:, 1:], at)
    begin = lengths[:, None]
    destination, source = (places_in(table, begin + one, page_size).flatten() for one in (at, moved))
    for store in (*keys, *values):
        store.index_copy_(0, destination, store.index_select(0, source))


def attend_causal(
    q: Tensor, pages: Pages, starts: Tensor, scoring: Scoring, begins: Tensor | None = None, longest: int = 0
) -> Tensor:
    """q [B, Hq, N, D] -> [B, N, Hq, Dv]. Query n of row b has position starts[b] + n; it attends to keys up to it.

    Decoding has N = 1, a prompt starts = 0, a chunk of a prompt any start.
    begins [B + 1]: rows of at most `longest` queries, q [1, Hq, T, D]; those of row b are begins[b] .. begins[b+1] - 1.
    """
    if begins is not None:
        edges = begins.tolist()
        alone = (replace(pages, table=pages.table[row : row + 1]) for row in range(len(starts)))
        each = zip(alone, starts.split(1), edges[:-1], edges[1:], strict=True)
        return torch.cat([attend_causal(q[:, :, a:b], own, start, scoring) for own, start, a, b in each], dim=1)
    rows, _, queries, _ = q.shape
    chain = torch.ones(queries, queries, dtype=torch.bool, device=q.device).tril().expand(rows, -1, -1)
    depths = torch.arange(queries, device=q.device).expand(rows, -1)
    return attend_tree(q, pages, starts, chain, depths, scoring)


def attend_tree(
    q: Tensor, pages: Pages, lengths: Tensor, mask: Tensor, depths: Tensor | None, scoring: Scoring
) -> Tensor:
    """q [B, Hq, N, D] of the newest N of M nodes -> [B, N, Hq, Dv].

    Row b has lengths[b] committed positions, to which all its nodes attend. The key of node m is stored after them, at
    lengths[b] + m; query n attends to it if mask[b, n, m] of mask [B, N, M] bool. depths [B, M]: a node's position is
    lengths[b] + its depth; needed if there is a window.
    """
    seen = keys_of_nodes(lengths, pages.span, mask, depths, scoring.window)
    return attend_masked(q, pages, additive_mask(seen, q.shape[1] // pages.keys.shape[1], q.dtype), scoring)


def keys_of_nodes(lengths: Tensor, span: int, mask: Tensor, depths: Tensor | None, window: int | None) -> Tensor:
    """Return [B, N, span] bool: the positions that each new node attends to; arguments as in `attend_tree`."""
    new, nodes = mask.shape[1:]
    at = torch.arange(span, device=lengths.device)
    committed = at < lengths[:, None]
    number = at - lengths[:, None]  # of the node stored at each position
    node = number.clamp(0, nodes - 1)
    kin = mask.gather(2, node[:, None].expand(-1, new, -1)) & ((number >= 0) & (number < nodes))[:, None]
    seen = committed[:, None] | kin
    if window is None:
        return seen
    assert depths is not None, "a window needs the nodes' depths"
    stands = torch.where(committed, at, lengths[:, None] + depths.gather(1, node))
    own = lengths[:, None] + depths[:, nodes - new :]
    return seen & (own[:, :, None] - stands[:, None] < window)


def attend_masked(q: Tensor, pages: Pages, mask: Tensor, scoring: Scoring) -> Tensor:
    """q [B, Hq, N, D], mask [B, 1, G*N, span] additive, which contains the window of `scoring` -> [B, N, Hq, Dv]."""
    keys, values = (one.transpose(1, 2) for one in gather_pages(pages))
    return attend(q, keys, values, mask, scaling=scoring.scaling, softcap=scoring.softcap, sinks=scoring.sinks)


def gather_pages(pages: Pages) -> tuple[Tensor, Tensor]:
    """Return keys [B, span, Hkv, D] and values [B, span, Hkv, Dv]: positions 0 .. span-1 of every row."""
    table = pages.table[:, : -(-pages.span // pages.page_size)]

    def gathered(store: Tensor) -> Tensor:
        found = store.view(-1, pages.page_size, *store.shape[1:]).index_select(0, table.flatten())
        return found.view(len(table), -1, *store.shape[1:])[:, : pages.span]

    return gathered(pages.keys), gathered(pages.values)
