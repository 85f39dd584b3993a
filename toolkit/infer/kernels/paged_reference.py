"""Attention over keys and values that lie in pages, in plain torch: the definition that Triton's kernels must equal.

Shapes: B rows, N queries a row, M nodes a row that are not committed, Hq query heads, Hkv key heads, D head dim of
queries and keys, Dv of values, E entries of a cache, P pages of a table, W words of 64 bits.

A row's position p lies at entry table[row, p // page_size] * page_size + p % page_size. What lies behind the positions
a row has written is never used, whatever it holds; this definition multiplies it by 0, so here it must be finite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from toolkit.infer.kernels.reference import additive_mask, attend

WORD = 64  # nodes of one word of an ancestor mask


@dataclass(frozen=True)
class Pages:
    """One layer's cache through the tables of a forward's rows.

    keys [E, Hkv, D], values [E, Hkv, Dv]; table [B, P] int64; span: no row reads a position beyond it (P * page_size
    reaches it).
    """

    keys: Tensor
    values: Tensor
    table: Tensor
    page_size: int
    span: int


class Scoring(NamedTuple):
    """How a query scores keys: as in `reference.attend`. Keys `window` or more positions back are not seen."""

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


def write_kv(key_store: Tensor, value_store: Tensor, keys: Tensor, values: Tensor, places: Tensor) -> None:
    """keys [B, N, Hkv, D] into key_store [E, Hkv, D] at entries places [B, N] int64; values [.., Dv] alike.

    Of several written to one entry (padding, to the page that nobody reads) any one stays.
    """
    for store, entries in ((key_store, keys), (value_store, values)):
        store.index_copy_(0, places.flatten(), entries.reshape(-1, *store.shape[1:]))


def attend_causal(q: Tensor, pages: Pages, starts: Tensor, scoring: Scoring) -> Tensor:
    """q [B, Hq, N, D] -> [B, N, Hq, Dv]. Query n of row b stands at starts[b] + n; it sees what is not behind it.

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

    Row b has lengths[b] committed positions, which all its nodes see; node m lies behind them at lengths[b] + m and is
    seen where bit m of bits [B, N, W] int64 is set. depths [B, nodes]: a node stands at lengths[b] + its depth; needed
    where there is a window.
    """
    at = torch.arange(pages.span, device=q.device)
    committed = at < lengths[:, None]
    behind = at - lengths[:, None]  # the number of the node that lies there
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
    """mask [B, N, M] bool -> words [B, N, W] int64: bit m % 64 of word m // 64 is mask[.., m]."""
    rows, queries, nodes = mask.shape
    words = -(-nodes // WORD)
    whole = torch.nn.functional.pad(mask, (0, words * WORD - nodes)).view(rows, queries, words, WORD)
    # Bit 63 is the sign; no two bits are equal, so the sum is their union and cannot overflow.
    return (whole.long() << torch.arange(WORD, device=mask.device)).sum(dim=-1)


def _attend(q: Tensor, pages: Pages, allowed: Tensor, scoring: Scoring) -> Tensor:
    """allowed [B, N, span] bool."""
    where = (pages.table, pages.page_size, pages.span)
    keys, values = (gather_pages(store, *where).transpose(1, 2) for store in (pages.keys, pages.values))
    mask = additive_mask(allowed, q.shape[1] // keys.shape[1], q.dtype)
    return attend(q, keys, values, mask, scaling=scoring.scaling, softcap=scoring.softcap, sinks=scoring.sinks)


def gather_pages(store: Tensor, table: Tensor, page_size: int, span: int) -> Tensor:
    """store [E, Hkv, D], table [B, P] -> [B, span, Hkv, D]: the positions of every row, in order."""
    return store.view(-1, page_size, *store.shape[1:])[table].flatten(1, 2)[:, :span]
