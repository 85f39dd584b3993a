"""Page allocation: maps the positions of rows to pages of cache memory.

The pool stores no keys; caches attach to it. A page holds `page_size` positions of the target's cache and of every
drafter cache: one table serves all. Any page can follow any other (PagedAttention, arXiv 2309.06180), so several tables
can contain the same shared page. At most `capacity` pages are held at a time, by rows (running requests) and by the
prefix cache; a shared page counts once.

Page 0 follows the end of a table. On a GPU padding writes to it. Plain torch and C++ multiply what they mask by 0, and
0 * nan is nan, so there it stays zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from toolkit.infer.request.draft_tree import upload

PAGE_SIZE = 16


class PagedStore(Protocol):
    """A cache whose entries are addressed by the pool's pages."""

    def zero_pages(self, pages: Sequence[int]) -> None: ...


class PagePool:
    """Page tables of `rows` rows of at most `row_positions` positions.

    capacity: maximum number of held pages; None: enough for every row at full length.
    """

    def __init__(
        self, rows: int, row_positions: int, capacity: int | None = None, *, page_size: int = PAGE_SIZE
    ) -> None:
        self.page_size, self.rows = page_size, rows
        self.pages_per_row = self.pages_of(row_positions)
        self.capacity = rows * self.pages_per_row if capacity is None else capacity
        self.page_count = 1 + self.capacity
        self.tables: list[list[int]] = [[] for _ in range(rows)]
        self._spare = list(range(self.capacity, 0, -1))  # popped from the end: low pages first
        self._holders: dict[int, int] = {}  # page -> number of tables and cached prefixes that hold it
        self.shared = 0  # pages of more than one holder
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
            table.append(self._spare.pop())
            self._holders[table[-1]] = 1
        return True

    def clear(self, row: int) -> None:
        """Write zeros to the pages that only this row holds: what is masked is multiplied by 0, and 0 * nan is nan."""
        mine = [page for page in self.tables[row] if self._holders[page] == 1]
        for store in self._stores:
            store.zero_pages(mine)

    def release(self, row: int) -> None:
        """Drop all pages of the row."""
        table, self.tables[row] = self.tables[row], []
        for page in table:
            self.drop(page)

    def move(self, destination: int, source: int) -> None:
        """Give the pages of row `source` to the empty row `destination`."""
        assert not self.tables[destination], f"row {destination} is not empty"
        for move_row in self._row_moves:
            move_row(destination, source)
        self.tables[destination], self.tables[source] = self.tables[source], []

    # -- shared prefixes -----------------------------------------------------------------------------------------------

    def adopt(self, row: int, pages: Sequence[int]) -> None:
        """Start the empty row with these pages of the prefix cache."""
        assert not self.tables[row], f"row {row} is not empty"
        self.hold(pages)
        self.tables[row] = list(pages)

    def share(self, row: int, numbers: range) -> list[int]:
        """Return the row's pages `numbers` for the prefix cache, which holds them and releases each with `drop`."""
        mine = [self.tables[row][number] for number in numbers]
        self.hold(mine)
        return mine

    def hold(self, pages: Sequence[int]) -> None:
        """Add one holder to pages that are already held; undo it with `drop`."""
        for page in pages:
            self._holders[page] += 1
            self.shared += self._holders[page] == 2

    def drop(self, page: int) -> None:
        """Remove one holder of the page; free the page after the last one."""
        self._holders[page] -= 1
        self.shared -= self._holders[page] == 1
        if self._holders[page] == 0:
            del self._holders[page]
            self._spare.append(page)

    # -- addresses -----------------------------------------------------------------------------------------------------

    def holders(self, page: int) -> int:
        """Number of holders of the page."""
        return self._holders.get(page, 0)

    def table(self, first_row: int, rows: int, pages: int, device: torch.device) -> Tensor:
        """Return page tables [rows, pages] int64, cut or padded with page 0."""
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
        assert self.shared == sum(holders > 1 for holders in counted.values()), "the shared pages are counted wrong"
        assert self.held <= self.capacity, "more pages are held than there are"
        assert sorted([*self._spare, *self._holders]) == list(range(1, self.page_count)), "a page was lost"
