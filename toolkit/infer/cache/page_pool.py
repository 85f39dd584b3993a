"""Page allocation: maps the positions of rows to pages of cache memory.

The pool stores no keys; caches attach to it and copy pages on its request. A page holds `page_size` positions of the
target's cache and of every drafter cache: one table serves all. At most `capacity` pages are held at a time, by rows
(running requests) and by the prefix cache; a shared page counts once. There are two layouts:

    scattered    any page can follow any other, so several tables can contain the same shared page. Attention reads
                 through the table (a kernel on a GPU; gathered copies in plain torch).
    contiguous   every row has its own contiguous address range for a whole context. The operating system allocates
                 the memory at first touch (vAttention, arXiv 2405.04437). Attention reads views, so a step copies
                 nothing. Shared pages are copied into the row once, at admission.

    contiguous   | row 0: pages 0 .. n-1 | row 1: pages n .. 2n-1 | ... | spare pages (prefix cache) |
    scattered    | page 0: never read, receives the writes of padding | pages 1 .. capacity          |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from toolkit.infer.kernels.paged_reference import places_in
from toolkit.infer.request.draft_tree import upload

PAGE_SIZE = 16
KEPT_PAGES = 64  # pages of a released contiguous row that keep their memory; it suffices for short requests


class PagedStore(Protocol):
    """A cache whose entries are addressed by the pool's pages."""

    def copy_pages(self, destination: Sequence[int], source: Sequence[int]) -> None: ...

    def zero_pages(self, pages: Sequence[int]) -> None: ...

    def forget_pages(self, first: int, count: int) -> None:
        """Drop the content of pages first .. first+count-1; their memory may return to the system."""
        ...


class PagePool:
    """Page tables of `rows` rows of at most `row_positions` positions.

    capacity: maximum number of held pages; None: enough for every row at full length.
    """

    def __init__(
        self,
        rows: int,
        row_positions: int,
        capacity: int | None = None,
        *,
        contiguous: bool = True,
        page_size: int = PAGE_SIZE,
    ) -> None:
        self.page_size, self.contiguous, self.rows = page_size, contiguous, rows
        self.pages_per_row = self.pages_of(row_positions)
        self.capacity = rows * self.pages_per_row if capacity is None else capacity
        first_spare = rows * self.pages_per_row if contiguous else 1
        self.page_count = first_spare + self.capacity
        self.tables: list[list[int]] = [[] for _ in range(rows)]
        self._spare = list(range(self.page_count - 1, first_spare - 1, -1))  # popped from the end: low pages first
        self._holders: dict[int, int] = {}  # page -> number of tables and cached prefixes that hold it
        self._stores: list[PagedStore] = []
        self._row_moves: list[Callable[[int, int], None]] = []

    def attach(self, store: PagedStore) -> None:
        self._stores.append(store)

    def attach_rows(self, move_row: Callable[[int, int], None]) -> None:
        """Call move_row(destination, source) for every move of a row."""
        self._row_moves.append(move_row)

    def pages_of(self, positions: int) -> int:
        return -(-positions // self.page_size)

    @property
    def held(self) -> int:
        """Number of held pages."""
        return len(self._holders)

    @property
    def free(self) -> int:
        """Number of pages that can still be taken."""
        return self.capacity - self.held

    # -- rows ----------------------------------------------------------------------------------------------------------

    def missing(self, row: int, positions: int) -> int:
        """Number of pages that the row lacks for `positions` positions."""
        return max(0, self.pages_of(positions) - len(self.tables[row]))

    def grow(self, row: int, positions: int) -> bool:
        """Give the row pages for `positions` positions. False, without a change, if they are not free."""
        missing = self.missing(row, positions)
        if missing > self.free:
            return False
        table = self.tables[row]
        assert len(table) + missing <= self.pages_per_row, "a row outgrew the context"
        for _ in range(missing):
            page = row * self.pages_per_row + len(table) if self.contiguous else self._spare.pop()
            self._holders[page] = 1
            table.append(page)
        return True

    def clear(self, row: int) -> None:
        """Write zeros to the pages that only this row holds: what is masked is multiplied by 0, and 0 * nan is nan."""
        mine = [page for page in self.tables[row] if self._holders[page] == 1]
        for store in self._stores:
            store.zero_pages(mine)

    def release(self, row: int) -> None:
        """Drop all pages of the row."""
        self._forget(self._vacate(row))

    def move(self, destination: int, source: int) -> None:
        """Move the pages of row `source` to the empty row `destination`; contiguous pages are copied."""
        assert not self.tables[destination], f"row {destination} is not empty"
        for move_row in self._row_moves:
            move_row(destination, source)
        if not self.contiguous:
            self.tables[destination], self.tables[source] = self.tables[source], []
            return
        pages = self._vacate(source)  # first: there may be no room to hold the pages of both rows
        self.grow(destination, len(pages) * self.page_size)
        self._copy(self.tables[destination], pages)
        self._forget(pages)

    def _vacate(self, row: int) -> list[int]:
        """Drop the pages of the row, whose content remains, and return their numbers."""
        table, self.tables[row] = self.tables[row], []
        for page in table:
            self.drop(page)
        return table

    def _forget(self, pages: Sequence[int]) -> None:
        """Let the memory of a vacated contiguous row return to the system, all but its first pages."""
        if self.contiguous and len(pages) > KEPT_PAGES:
            for store in self._stores:
                store.forget_pages(pages[KEPT_PAGES], len(pages) - KEPT_PAGES)

    # -- shared prefixes -----------------------------------------------------------------------------------------------

    def adopt(self, row: int, pages: Sequence[int]) -> bool:
        """Start the empty row with these pages of the prefix cache. False, without a change, if there is no room."""
        assert not self.tables[row], f"row {row} is not empty"
        if self.contiguous:
            if not self.grow(row, len(pages) * self.page_size):
                return False
            self._copy(self.tables[row], pages)
            return True
        self.hold(pages)
        self.tables[row] = list(pages)
        return True

    def share(self, row: int, numbers: range) -> list[int]:
        """Return pages for the prefix cache with the content of the row's pages `numbers`, as far as there is room.

        Scattered pages are shared, contiguous ones are copied. The caller holds the pages and releases each with
        `drop`.
        """
        mine = [self.tables[row][number] for number in numbers]
        if not self.contiguous:
            self.hold(mine)
            return mine
        mine = mine[: self.free]
        spare = [self._spare.pop() for _ in mine]
        self._holders.update(dict.fromkeys(spare, 1))
        self._copy(spare, mine)
        return spare

    def hold(self, pages: Sequence[int]) -> None:
        """Add one holder to pages that are already held; undo it with `drop`."""
        for page in pages:
            self._holders[page] += 1

    def drop(self, page: int) -> None:
        """Remove one holder of the page; free the page after the last one."""
        self._holders[page] -= 1
        if self._holders[page] == 0:
            del self._holders[page]
            if not self.contiguous or page >= self.rows * self.pages_per_row:
                self._spare.append(page)

    def _copy(self, destination: Sequence[int], source: Sequence[int]) -> None:
        if source:
            for store in self._stores:
                store.copy_pages(destination, source)

    # -- addresses -----------------------------------------------------------------------------------------------------

    def places(self, first_row: int, starts: Sequence[int], count: int, device: torch.device) -> Tensor:
        """Return [B, count] int64: the cache entries of positions starts[b] .. starts[b]+count-1 of row first_row+b."""
        positions = upload(starts, device)[:, None] + torch.arange(count, device=device)
        table = self.table(first_row, len(starts), self.pages_of(max(starts) + count), device)
        return places_in(table, positions, self.page_size)

    def holders(self, page: int) -> int:
        """Number of holders of the page."""
        return self._holders.get(page, 0)

    def table(self, first_row: int, rows: int, pages: int, device: torch.device) -> Tensor:
        """Return page tables [rows, pages] int64; scattered tables are cut or padded with page 0."""
        if self.contiguous:
            numbers = torch.arange(first_row, first_row + rows, device=device)[:, None]
            return numbers * self.pages_per_row + torch.arange(pages, device=device)
        tables = (self.tables[row][:pages] for row in range(first_row, first_row + rows))
        return upload([table + [0] * (pages - len(table)) for table in tables], device)

    def check_integrity(self, cached: Sequence[int]) -> None:
        """Assert that the holder counts match tables and prefix cache, and that no page is lost.

        cached: the pages of the prefix cache.
        """
        counted: dict[int, int] = {}
        for page in [page for table in self.tables for page in table] + list(cached):
            counted[page] = counted.get(page, 0) + 1
        assert counted == self._holders, "the holder counts are wrong"
        assert self.held <= self.capacity, "more pages are held than there are"
        spare_total = self.page_count - (self.rows * self.pages_per_row if self.contiguous else 1)
        spare_held = sum(page >= self.page_count - spare_total for page in self._holders)
        assert len(self._spare) + spare_held == spare_total, "a spare page was lost"
        assert len(set(self._spare)) == len(self._spare) and not set(self._spare) & self._holders.keys()
        if self.contiguous:
            for row, table in enumerate(self.tables):
                start = row * self.pages_per_row
                assert table == list(range(start, start + len(table))), f"row {row} is not contiguous"
