"""Where the rows of a round stand, in tensors whose addresses never change: what a recorded round reads and moves on.

Shapes: R rows at most, B rows of a bucket (the first of R), P pages of a table.

A row that holds no request is padding: one committed position, one pending one, on page 0, which nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from toolkit.infer.cache.page_pool import PagePool
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request

# What the host writes of a row, in this order: the last committed token; positions whose target keys are cached;
# positions that the drafter has not read yet; 1 for a request, 0 for padding.
RowState = tuple[int, int, int, int]
PADDING: RowState = (0, 1, 1, 0)
COLD = SamplingParams(temperature=1.0, seed=0)  # stands in the distributions of rows that do not draw


class RoundState:
    """written by the host between rounds: row_states [4, R] and table [R, P] int64, where the host's rows are not those
    that the last round left; and, when the rows change, the settings: hot [R] bool, temperature, min_p [R] fp32,
    top_p [R] fp64, top_k, seeds [R] int64. A round itself moves `row_states` on by what it commits.
    """

    def __init__(self, rows: int, pool: PagePool, device: torch.device) -> None:
        self._pool, self._pinned = pool, device.type == "cuda"
        self.row_states = torch.tensor([PADDING] * rows, device=device).T.contiguous()
        self.table = torch.zeros(rows, pool.pages_per_row, dtype=torch.long, device=device)
        self.hot = torch.zeros(rows, dtype=torch.bool, device=device)
        self.temperature = torch.ones(rows, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(rows, dtype=torch.float32, device=device)
        self.top_p = torch.ones(rows, dtype=torch.float64, device=device)
        self.top_k = torch.zeros(rows, dtype=torch.long, device=device)
        self.seeds = torch.zeros(rows, dtype=torch.long, device=device)
        self.left: list[RowState | None] = [PADDING] * rows  # what the device holds of every row; None: not known here
        self._tables: list[tuple[list[int] | None, int]] = [(None, 0)] * rows  # likewise: whose pages, and how many
        self._drawing: list[Request] = []  # likewise: the requests whose settings

    def stand(self, row_states: Sequence[RowState], bucket: int) -> None:
        """The bucket's first rows stand as given, the others are padding."""
        wanted = [*row_states, *[PADDING] * (bucket - len(row_states))]
        if wanted != self.left[:bucket]:
            self._upload(self.row_states[:, :bucket], list(zip(*wanted, strict=True)))
            self.left[:bucket] = wanted

    def take_pages(self, rows: int, bucket: int) -> None:
        """The bucket's first `rows` rows read and write the pages that the pool has for them."""
        held: list[tuple[list[int] | None, int]] = [(one, len(one)) for one in self._pool.tables[:rows]]
        held += [(None, 0)] * (bucket - rows)
        # A table only grows, or another takes its place.
        if any(new[0] is not old[0] or new[1] != old[1] for new, old in zip(held, self._tables, strict=False)):
            width = max(1, *(count for _, count in held), *(count for _, count in self._tables[:bucket]))
            self._upload(self.table[:bucket, :width], [(one or []) + [0] * (width - count) for one, count in held])
            self._tables[:bucket] = held

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
        """Behind the rounds that were launched. From pinned memory: else the host might wait for them."""
        store.copy_(torch.tensor(values, dtype=store.dtype, pin_memory=self._pinned), non_blocking=True)
