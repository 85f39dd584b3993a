"""The engine's cache memory: pages for rows, prefixes that are found again, and which of them go when room runs out."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.infer.attention.page_pool import PagePool
from toolkit.infer.prefix_cache import PrefixCache


class KVMemory:
    """pool: the pages. lookahead: tokens behind a position that the drafter's entry there depends on.

    reuse: keep prefixes. slack: positions that a step may write behind a row's tokens (drafted nodes).
    """

    def __init__(self, pool: PagePool, lookahead: int, slack: int, reuse: bool) -> None:
        self.pool, self.slack = pool, slack
        self._lookahead = lookahead
        self._prefixes = PrefixCache(pool, lookahead) if reuse else None

    def admit(self, row: int, tokens: Sequence[int], reserve: int) -> int | None:
        """Give the empty row pages for `tokens` and a step behind them, starting with what is known of them.

        Returns how many tokens need not be read again, None when there is no room: `reserve` pages must stay free for
        requests that run. At least one token is left to read, and those that the drafter has to see with it.
        """
        size = self.pool.page_size
        found: list[int] = []
        if self._prefixes is not None:
            found = self._prefixes.find(tokens, (len(tokens) - max(1, self._lookahead)) // size)
        if self._start(row, found, len(tokens), reserve):
            return len(found) * size
        # Where pages are copied, what was found stands in its own way.
        return 0 if found and self._start(row, [], len(tokens), reserve) else None

    def _start(self, row: int, found: Sequence[int], length: int, reserve: int) -> bool:
        """Let the row begin with the pages `found` and have room for `length` tokens and a step."""
        shared = 0 if self.pool.homes else len(found)  # these take no further page
        self.pool.hold(found)  # making room must not take them away
        room = self._free(self.pool.pages_of(length + self.slack) - shared + reserve)
        if room:
            taken = self.pool.adopt(row, found) and self.pool.grow(row, length + self.slack)
            assert taken, "pages that were free are gone"
        for page in found:
            self.pool.drop(page)
        return room

    def grow(self, row: int, length: int) -> bool:
        """Room for the row's `length` tokens and a step behind them, at the cost of prefixes nobody uses."""
        missing = self.pool.missing(row, length + self.slack)
        return self._free(missing) and self.pool.grow(row, length + self.slack)

    def keep(self, row: int, tokens: Sequence[int], positions: int) -> None:
        """Keep the row's first `positions` positions to be found again; all its caches hold them."""
        if self._prefixes is not None:
            self._prefixes.keep(tokens, row, positions)

    def release(self, row: int) -> None:
        self.pool.release(row)

    def move(self, destination: int, source: int) -> None:
        self.pool.move(destination, source)

    def check_integrity(self) -> None:
        """Assert that every page is held by those who hold it."""
        self.pool.check_integrity([] if self._prefixes is None else self._prefixes.pages)

    def _free(self, pages: int) -> bool:
        """That many pages free, if need be at the cost of prefixes."""
        return pages <= self.pool.free or (self._prefixes is not None and self._prefixes.evict(pages))
