"""Paged attention in plain torch: the reference that the Triton kernels must match.

Shapes: B rows, N queries per row, M uncommitted nodes per row, Hq query heads, Hkv key heads, D head dim of queries and
keys, Dv of values, E entries of a cache, P pages of a table, W words of 64 bits.

Position p of a row is stored at entry table[row, p // page_size] * page_size + p % page_size. Entries after a row's
written positions do not influence the result. The reference multiplies them by 0, so here they must be finite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from toolkit.infer.kernels.reference import additive_mask, attend

WORD = 64  # nodes per word of an ancestor mask


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


def write_kv(key_store: Tensor, value_store: Tensor, keys: Tensor, values: Tensor, places: Tensor) -> None:
    """Write keys [B, N, Hkv, D] to key_store [E, Hkv, D] at entries places [B, N] int64; values [.., Dv] likewise.

    If several are written to one entry (padding, on the page that is never read), any one of them remains.
    """
    for store, entries in ((key_store, keys), (value_store, values)):
        store.index_copy_(0, places.flatten(), entries.reshape(-1, *store.shape[1:]))


def attend_causal(q: Tensor, pages: Pages, starts: Tensor, scoring: Scoring) -> Tensor:
    """q [B, Hq, N, D] -> [B, N, Hq, Dv]. Query n of row b has position starts[b] + n; it attends to keys up to it.

    Decoding has N = 1, a prompt starts = 0, a chunk of a prompt any start.
    """
    at = torch.arange(pages.span, device=q.device)
    stands = starts[:, None] + torch.arange(q.shape[2], device=q.device)
    distance = stands[:, :, None] - at
    allowed = distance >= 0
    if scoring.window is not None:
        allowed &= distance < scoring.window
    return _attend(q, pages, allowed, scoring)


def attend_tree(
    q: Tensor, pages: Pages, lengths: Tensor, bits: Tensor, nodes: int, depths: Tensor | None, scoring: Scoring
) -> Tensor:
    """q [B, Hq, N, D] of the newest N of `nodes` nodes -> [B, N, Hq, Dv].

    Row b has lengths[b] committed positions, to which all its nodes attend. The key of node m is stored after them, at
    lengths[b] + m; a query attends to it if bit m of its bits [B, N, W] int64 is set. depths [B, nodes]: a node's
    position is lengths[b] + its depth; needed if there is a window.
    """
    at = torch.arange(pages.span, device=q.device)
    committed = at < lengths[:, None]
    behind = at - lengths[:, None]  # number of the node stored at each position
    node = behind.clamp(0, nodes - 1)
    word = bits.gather(2, (node // WORD)[:, None].expand(-1, bits.shape[1], -1))
    kin = ((word >> (node % WORD)[:, None]) & 1).bool() & ((behind >= 0) & (behind < nodes))[:, None]
    allowed = committed[:, None] | kin
    if scoring.window is not None:
        assert depths is not None, "a window needs the nodes' depths"
        stands = torch.where(committed, at, lengths[:, None] + depths.gather(1, node))
        own = lengths[:, None] + depths[:, nodes - q.shape[2] :]
        allowed = allowed & (own[:, :, None] - stands[:, None] < scoring.window)
    return _attend(q, pages, allowed, scoring)


def pack_bits(mask: Tensor) -> Tensor:
    """Pack mask [B, N, M] bool into words [B, N, W] int64: bit m % 64 of word m // 64 is mask[.., m]."""
    rows, queries, nodes = mask.shape
    words = -(-nodes // WORD)
    whole = torch.nn.functional.pad(mask, (0, words * WORD - nodes)).view(rows, queries, words, WORD)
    # Bit 63 is the sign. All bits of a word differ, so the sum is their union and cannot overflow.
    return (whole.long() << torch.arange(WORD, device=mask.device)).sum(dim=-1)


def _attend(q: Tensor, pages: Pages, allowed: Tensor, scoring: Scoring) -> Tensor:
    """allowed [B, N, span] bool."""
    where = (pages.table, pages.page_size, pages.span)
    keys, values = (gather_pages(store, *where).transpose(1, 2) for store in (pages.keys, pages.values))
    mask = additive_mask(allowed, q.shape[1] // keys.shape[1], q.dtype)
    return attend(q, keys, values, mask, scaling=scoring.scaling, softcap=scoring.softcap, sinks=scoring.sinks)


def gather_pages(store: Tensor, table: Tensor, page_size: int, span: int) -> Tensor:
    """store [E, Hkv, D], table [B, P] -> [B, span, Hkv, D]: positions 0 .. span-1 of every row."""
    return store.view(-1, page_size, *store.shape[1:])[table].flatten(1, 2)[:, :span]
