"""The state of a round's rows, in tensors with fixed addresses: the input of a round, which the round updates.

Shapes: R rows at most, B rows of a round (the first of R), P pages of a table, N nodes of a tree.

An eager round has one row per running request. A recorded round has as many rows as its bucket; a row without a
request is padding: one committed position, which is also unread, on page 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from toolkit.infer.cache.page_pool import PagePool
from toolkit.infer.request.draft_tree import upload
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request

# One row on the host: the last committed token; number of positions whose target keys are cached; how many of the last
# of them the drafter has not read; 1 for a request, 0 for padding.
RowState = tuple[int, int, int, int]
PADDING: RowState = (0, 1, 1, 0)
GREEDY_PLACEHOLDER = SamplingParams(temperature=1.0, seed=0)  # settings of greedy rows, which do not sample


@dataclass(frozen=True)
class RoundRows:
    """The rows of one round, as views of the state's buffers.

    roots [B]: the last committed token. lengths [B]: number of positions whose target keys are cached. unread [B]: how
    many of the last of these the drafter has not read. real [B]: 1 for a request, 0 for padding. table [B, P]: page
    numbers. longest: upper bound of the lengths; None: only the device knows the lengths (a recorded round).
    """

    roots: Tensor
    lengths: Tensor
    unread: Tensor
    real: Tensor
    table: Tensor
    longest: int | None
    page_size: int

    def span(self, nodes: int) -> int:
        """Positions that attention reads for `nodes` nodes after the rows' lengths: at most the whole table."""
        whole = self.table.shape[1] * self.page_size
        return whole if self.longest is None else min(self.longest + nodes, whole)


@dataclass(frozen=True)
class TargetStates:
    """What the target's forward over trees leaves. hidden [B, N, H]. features [B, N, W]: what the draft head reads;
    None without one. packed: the states of the T valid nodes alone, [1, T, H], and their numbers there, [B, N]; None:
    the forward computed padding too."""

    hidden: Tensor
    features: Tensor | None
    packed: tuple[Tensor, Tensor] | None = None

    @property
    def nodes(self) -> int:
        return self.hidden.shape[1]

    def cut(self, rows: int, nodes: int) -> TargetStates:
        """The first nodes of the first rows."""
        features = None if self.features is None else self.features[:rows, :nodes]
        return TargetStates(self.hidden[:rows, :nodes], features)


class RoundState:
    """The buffers of `rows` rows on one page pool.

    Written by the host between rounds: row_states [4, R] and table [R, P] int64, if the host's rows differ from the
    device's rows after the last round; and, if the rows of a recorded round change, its sampling settings: sampled [R]
    bool (temperature > 0), temperature, min_p [R] fp32, top_p [R] fp64, top_k, seeds [R] int64.
    Written by the round: row_states, updated by the committed tokens (the unread count by the draft head, if any).
    """

    def __init__(self, rows: int, pool: PagePool, device: torch.device) -> None:
        self._pool, self._pinned = pool, device.type == "cuda"
        self.row_states = torch.tensor([PADDING] * rows, device=device).T.contiguous()
        self.table = pool.table(0, rows, pool.pages_per_row, device)
        self.sampled = torch.zeros(rows, dtype=torch.bool, device=device)
        self.temperature = torch.ones(rows, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(rows, dtype=torch.float32, device=device)
        self.top_p = torch.ones(rows, dtype=torch.float64, device=device)
        self.top_k = torch.zeros(rows, dtype=torch.long, device=device)
        self.seeds = torch.zeros(rows, dtype=torch.long, device=device)
        # The device's content as the host knows it:
        self.known: list[RowState | None] = [PADDING] * rows  # state of each row; None: unknown until a result is read
        self._tables: list[tuple[list[int], int]] = [([], 0)] * rows  # page table of each row and its length
        self._drawing: list[Request] = []  # requests whose sampling settings are uploaded

    def rows(self, count: int, longest: int | None = None) -> RoundRows:
        """Return the first `count` rows."""
        roots, lengths, unread, real = self.row_states[:, :count].unbind()
        return RoundRows(roots, lengths, unread, real, self.table[:count], longest, self._pool.page_size)

    def set_rows(self, row_states: Sequence[RowState], count: int) -> None:
        """Set the first rows to `row_states` and the rest of the `count` rows to padding."""
        wanted = [*row_states, *[PADDING] * (count - len(row_states))]
        if wanted != self.known[:count]:
            self._upload(self.row_states[:, :count], list(zip(*wanted, strict=True)))
            self.known[:count] = wanted

    def set_tables(self, requests: int, count: int, first: int = 0) -> None:
        """Upload the page tables of the pool's rows from `first` on for `requests` of `count` rows; the others are
        padding."""
        own = self._pool.tables[first : first + requests]
        tables: list[list[int]] = [*own, *([] for _ in range(count - requests))]
        places: list[int] = []  # in the flattened table
        pages: list[int] = []
        for row, (table, (before, held)) in enumerate(zip(tables, self._tables, strict=False)):
            # A table only grows, or another list replaces it. Page 0 follows its end.
            kept = held if table is before else 0
            missing = max(0, held - len(table))
            begin = row * self._pool.pages_per_row + kept
            places += range(begin, begin + len(table) - kept + missing)
            pages += table[kept:] + [0] * missing
            self._tables[row] = (table, len(table))
        if places:
            at, new = upload([places, pages], self.table.device)
            self.table.view(-1).index_copy_(0, at, new)

    def forget_rows(self, requests: int) -> None:
        """Mark these rows as unknown to the host until the result of the round is read."""
        self.known[:requests] = [None] * requests

    def set_sampling(self, requests: Sequence[Request]) -> None:
        """Upload the sampling settings of these requests, if they changed."""
        if self._drawing == requests:
            return
        self._drawing = list(requests)
        sampled = [request.params.temperature > 0 for request in requests]
        params = [one.params if draws else GREEDY_PLACEHOLDER for one, draws in zip(requests, sampled, strict=True)]
        for store, values in (
            (self.sampled, sampled),
            (self.temperature, [one.temperature for one in params]),
            (self.min_p, [one.min_p for one in params]),
            (self.top_p, [one.top_p for one in params]),
            (self.top_k, [one.top_k for one in params]),
            (self.seeds, [one.seed for one in params]),
        ):
            self._upload(store[: len(requests)], values)

    def _upload(self, store: Tensor, values: Sequence[Any]) -> None:
        """Copy in stream order, after the launched rounds; from pinned memory, so that the host need not wait."""
        store.copy_(torch.tensor(values, dtype=store.dtype, pin_memory=self._pinned), non_blocking=True)


def row_states(requests: Sequence[Request], unread: Sequence[int] | None) -> list[RowState]:
    """Return the states of running requests; unread: positions that the draft head has not read, None without one."""
    counts = [1] * len(requests) if unread is None else unread
    return [(one.output_ids[-1], one.length - 1, count, 1) for one, count in zip(requests, counts, strict=True)]


def advanced(
    states: Sequence[RowState], tokens: Sequence[Sequence[int]], unread: Sequence[int] | None
) -> list[RowState]:
    """Return the states of rows `states` after a round that committed `tokens`; unread as in `row_states`."""
    counts = [1] * len(states) if unread is None else unread
    return [
        (new[-1], length + len(new), count, 1)
        for (_, length, _, _), new, count in zip(states, tokens, counts, strict=True)
    ]
