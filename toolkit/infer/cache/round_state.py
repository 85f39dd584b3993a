"""Where the rows of a round stand, in tensors whose addresses never change: what a round reads, and advances.

Shapes: R rows at most, B rows of a round (the first of R), P pages of a table.

An eager round has a row for each running request. A recorded round has as many rows as its bucket; a row without a
request is padding: one committed position and one unread one, on page 0, which nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from toolkit.infer.cache.page_pool import PagePool
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request

# One row on the host: the last committed token; positions whose target keys are cached; of these, positions that the
# drafter has not read; 1 for a request, 0 for padding.
RowState = tuple[int, int, int, int]
PADDING: RowState = (0, 1, 1, 0)
COLD = SamplingParams(temperature=1.0, seed=0)  # settings of rows that do not draw


@dataclass(frozen=True)
class RoundRows:
    """The rows of one round, as views of the state's buffers.

    roots [B]: the last committed token. lengths [B]: positions whose target keys are cached. unread [B]: the last of
    these, which the drafter has not read. real [B]: 1 for a request, 0 for padding. table [B, P]: page numbers.
    longest: no row is longer than this; None: only the device knows (a recorded round).
    """

    roots: Tensor
    lengths: Tensor
    unread: Tensor
    real: Tensor
    table: Tensor
    longest: int | None
    page_size: int

    def span(self, nodes: int) -> int:
        """Positions that attention has to read for `nodes` nodes after the rows' lengths: at most the whole table."""
        whole = self.table.shape[1] * self.page_size
        return whole if self.longest is None else min(self.longest + nodes, whole)


class RoundState:
    """The buffers of `rows` rows on one page pool.

    written by the host between rounds: row_states [4, R] and table [R, P] int64, where the host's rows differ from
    those that the last round left; and, when the rows of a recorded round change, its sampling settings: hot [R] bool,
    temperature, min_p [R] fp32, top_p [R] fp64, top_k, seeds [R] int64.
    written by the round: row_states, advanced by what it commits (what is unread: by the drafter's head, if any).
    """

    def __init__(self, rows: int, pool: PagePool, device: torch.device) -> None:
        self._pool, self._pinned = pool, device.type == "cuda"
        self.row_states = torch.tensor([PADDING] * rows, device=device).T.contiguous()
        self.table = pool.table(0, rows, pool.pages_per_row, device)
        self.hot = torch.zeros(rows, dtype=torch.bool, device=device)
        self.temperature = torch.ones(rows, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(rows, dtype=torch.float32, device=device)
        self.top_p = torch.ones(rows, dtype=torch.float64, device=device)
        self.top_k = torch.zeros(rows, dtype=torch.long, device=device)
        self.seeds = torch.zeros(rows, dtype=torch.long, device=device)
        self.left: list[RowState | None] = [PADDING] * rows  # what the device holds of each row; None: not known here
        self._tables: list[tuple[list[int] | None, int]] = [(None, 0)] * rows  # likewise: whose pages, and how many
        self._drawing: list[Request] = []  # likewise: the requests whose settings

    def rows(self, count: int, longest: int | None = None) -> RoundRows:
        """The first `count` rows."""
        roots, lengths, unread, real = self.row_states[:, :count].unbind()
        return RoundRows(roots, lengths, unread, real, self.table[:count], longest, self._pool.page_size)

    def stand(self, row_states: Sequence[RowState], count: int) -> None:
        """The first rows stand as given, the others of `count` are padding."""
        wanted = [*row_states, *[PADDING] * (count - len(row_states))]
        if wanted != self.left[:count]:
            self._upload(self.row_states[:, :count], list(zip(*wanted, strict=True)))
            self.left[:count] = wanted

    def take_pages(self, requests: int, count: int) -> None:
        """The first `requests` of `count` rows read and write the pages that the pool has for them."""
        if self._pool.contiguous:
            return  # every row always has the same pages
        held: list[tuple[list[int] | None, int]] = [(one, len(one)) for one in self._pool.tables[:requests]]
        held += [(None, 0)] * (count - requests)
        # A table only grows, or another takes its place.
        if any(new[0] is not old[0] or new[1] != old[1] for new, old in zip(held, self._tables, strict=False)):
            width = max(1, *(pages for _, pages in held), *(pages for _, pages in self._tables[:count]))
            self._upload(self.table[:count, :width], [(one or []) + [0] * (width - pages) for one, pages in held])
            self._tables[:count] = held

    def begin_round(self, requests: int) -> None:
        """Where a round leaves these rows is not known here before its result is read."""
        self.left[:requests] = [None] * requests

    def settle(self, requests: Sequence[Request]) -> None:
        """The rows draw under the settings of these requests."""
        if self._drawing == requests:
            return
        self._drawing = list(requests)
        hot = [request.params.temperature > 0 for request in requests]
        params = [request.params if draws else COLD for request, draws in zip(requests, hot, strict=True)]
        for store, values in (
            (self.hot, hot),
            (self.temperature, [one.temperature for one in params]),
            (self.min_p, [one.min_p for one in params]),
            (self.top_p, [one.top_p for one in params]),
            (self.top_k, [one.top_k for one in params]),
            (self.seeds, [one.seed for one in params]),
        ):
            self._upload(store[: len(requests)], values)

    def _upload(self, store: Tensor, values: Sequence[Any]) -> None:
        """After the rounds that were launched. From pinned memory: else the host might wait for them."""
        store.copy_(torch.tensor(values, dtype=store.dtype, pin_memory=self._pinned), non_blocking=True)


def row_states(requests: Sequence[Request], unread: Sequence[int] | None) -> list[RowState]:
    """Where running requests stand; unread: positions that a head has not read, None without a head."""
    counts = [1] * len(requests) if unread is None else unread
    return [(one.output_ids[-1], one.length - 1, count, 1) for one, count in zip(requests, counts, strict=True)]


def advanced(
    stood: Sequence[RowState], tokens: Sequence[Sequence[int]], unread: Sequence[int] | None
) -> list[RowState]:
    """Where a round that committed `tokens` leaves rows that it found at `stood`; unread as in `row_states`."""
    counts = [1] * len(stood) if unread is None else unread
    return [
        (new[-1], length + len(new), count, 1)
        for (_, length, _, _), new, count in zip(stood, tokens, counts, strict=True)
    ]
