"""The engine's cache memory: pages for rows, prefixes that are found again, and which of them go when room runs out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from toolkit.infer.cache.kv_cache import KVShape
from toolkit.infer.cache.page_pool import PAGE_SIZE, PagePool
from toolkit.infer.cache.prefix_cache import PrefixCache
from toolkit.infer.request.errors import EngineError
from toolkit.memory import usable_memory

ROOM = 1024  # addresses of a row beyond the context, for drafted nodes and padding
CPU_SHARE, GPU_SHARE = 0.125, 0.8  # of usable memory, or the GPU's free one, for the target's cache


@dataclass(frozen=True)
class MemorySettings:
    """How much an engine's cache holds, and how prompts come into it.

    max_total_tokens: tokens that running requests and kept prefixes hold together; where they do not suffice, prefixes
    go first, then the youngest requests wait and are read again. None: whole contexts for all rows, at most an eighth
    of the machine's or the container's memory (0.8 of what a GPU has free) for the target's cache. prefix_cache: what a
    prompt shares with an earlier text is not read again. chunked_prefill_size: prompt tokens read between two rounds of
    running answers.
    scattered_pages: the layout of page_pool.py; None: on a GPU. fraction: another share than those, of the same memory.
    Raises EngineError for a fraction beside max_total_tokens, or not between 0 and 1, and for less than a page.
    """

    max_total_tokens: int | None = None
    prefix_cache: bool = True
    chunked_prefill_size: int = 1024
    scattered_pages: bool | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        if self.fraction is not None and not 0 < self.fraction < 1:
            raise EngineError(f"`mem_fraction_static` is {self.fraction:g}; a share between 0 and 1 is needed, as 0.8")
        if self.max_total_tokens is not None and self.max_total_tokens < PAGE_SIZE:
            raise EngineError(
                f"`max_total_tokens` is {self.max_total_tokens}; at least a page of {PAGE_SIZE} tokens is needed"
            )
        if self.fraction is not None and self.max_total_tokens is not None:
            raise EngineError(
                "`mem_fraction_static` and `max_total_tokens` are both given, and both size the cache; leave one out"
            )

    def pool(self, shape: KVShape, max_batch: int, max_context: int) -> PagePool:
        """The pages for entries of `shape`."""
        scattered = shape.device.type != "cpu" if self.scattered_pages is None else self.scattered_pages
        longest = max_context + max(ROOM, self.chunked_prefill_size)
        return PagePool(max_batch, longest, self._pages(shape, max_batch, max_context), contiguous=not scattered)

    def _pages(self, shape: KVShape, max_batch: int, max_context: int) -> int:
        if self.max_total_tokens is not None:
            return self.max_total_tokens // PAGE_SIZE
        if shape.device.type == "cuda":
            share = torch.cuda.mem_get_info(shape.device)[0] * (self.fraction or GPU_SHARE)
        else:
            share = usable_memory() * (self.fraction or CPU_SHARE)
        one = max_context + ROOM
        return max(min(max_batch * one, int(share) // shape.bytes_per_token), one) // PAGE_SIZE


DEFAULT_MEMORY = MemorySettings()


class KVMemory:
    """pool: the pages. lookahead: tokens behind a position that the drafter's entry there depends on.

    slack: positions that a step may write behind a row's tokens (drafted nodes). reuse: keep prefixes.
    Raises EngineError when one request could need more than there is: it could then never end.
    """

    def __init__(self, pool: PagePool, max_context: int, lookahead: int, slack: int, *, reuse: bool) -> None:
        self.pool, self.slack = pool, slack
        self.releases = 0  # rows that have let go of their pages so far
        self._max_context, self._lookahead = max_context, lookahead
        self._prefixes = PrefixCache(pool, lookahead) if reuse else None
        self.check_slack(slack)

    def check_slack(self, slack: int) -> None:
        """Raises EngineError when a request of a whole context has no place for that many drafted nodes."""
        held = self.pool.capacity * self.pool.page_size
        if slack > ROOM or held < self._max_context + slack:
            raise EngineError(
                f"one request may need {self._max_context} tokens of context and {slack} for drafted nodes ({ROOM} at "
                f"most); the cache holds {held}: draft less, give it more tokens (max_total_tokens), or lower "
                "max_context"
            )

    def admit(self, row: int, tokens: Sequence[int], reserve: int, drafted: bool = True) -> int | None:
        """Give the empty row pages for `tokens` and a step behind them, starting with what is known of them.

        drafted: by target and drafter; else the target's part will do.
        Returns how many tokens need not be read again, None when there is no room: `reserve` pages must stay free for
        requests that run. At least one token is left to read, and those that the drafter has to see with it.
        """
        size = self.pool.page_size
        found: list[int] = []
        if self._prefixes is not None:
            found = self._prefixes.find(tokens, (len(tokens) - max(1, self._lookahead)) // size, self._whole(drafted))
        if self._start(row, found, len(tokens), reserve):
            return len(found) * size
        # Where pages are copied, what was found stands in its own way.
        return 0 if found and self._start(row, [], len(tokens), reserve) else None

    def _start(self, row: int, found: Sequence[int], length: int, reserve: int) -> bool:
        """Let the row begin with the pages `found` and have room for `length` tokens and a step."""
        shared = 0 if self.pool.contiguous else len(found)  # these take no further page
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

    def grow_all(self, lengths: Sequence[int]) -> bool:
        """Likewise for rows 0.. together; False, and no row has grown, where room does not suffice for all."""
        positions = [length + self.slack for length in lengths]
        room = self._free(sum(self.pool.missing(row, count) for row, count in enumerate(positions)))
        return room and all(self.pool.grow(row, count) for row, count in enumerate(positions))

    def keep(self, row: int, tokens: Sequence[int], positions: int, drafted: bool = True) -> None:
        """Keep the row's first `positions` positions to be found again; all its caches hold them, or the target's."""
        if self._prefixes is not None:
            self._prefixes.keep(tokens, row, positions, self._whole(drafted))

    def _whole(self, drafted: bool) -> bool:
        """Whether pages hold all there is of their tokens: where no drafter keeps a cache the target's part is all."""
        return drafted or not self._lookahead

    def release(self, row: int) -> None:
        self.releases += 1
        self.pool.release(row)

    def move(self, destination: int, source: int) -> None:
        self.pool.move(destination, source)

    def check_integrity(self) -> None:
        """Assert that every page is held by those who hold it."""
        self.pool.check_integrity([] if self._prefixes is None else self._prefixes.pages)

    def _free(self, pages: int) -> bool:
        """That many pages free, if need be at the cost of prefixes."""
        return pages <= self.pool.free or (self._prefixes is not None and self._prefixes.evict(pages))
