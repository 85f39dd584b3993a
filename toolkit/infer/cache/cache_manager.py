"""The engine's cache memory: its size, pages of rows, cached prefixes and their eviction when pages run out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.infer.cache.cache_size import ROOM, Need, free_memory
from toolkit.infer.cache.kv_cache import KVShape
from toolkit.infer.cache.linear_states import LinearStates, Snapshot
from toolkit.infer.cache.page_pool import PAGE_SIZE, PagePool
from toolkit.infer.cache.prefix_cache import PrefixCache
from toolkit.infer.request.params import EngineError
from toolkit.memory import usable_memory

CPU_SHARE, GPU_SHARE = 0.125, 0.8  # share of usable memory (CPU) or free memory (GPU) for the target's cache


@dataclass(frozen=True)
class MemorySettings:
    """Cache size, prefix cache and prefill settings of an engine.

    max_total_tokens: maximum number of tokens in the cache, for running requests and cached prefixes together. When
    they run out, the cache evicts prefixes first; then the engine preempts the youngest requests and prefills them
    again later. None: whole contexts for all rows, limited to an eighth of the machine's or the container's memory (0.8
    of a GPU's free memory) for the target's cache.
    prefix_cache: do not prefill again the part that a prompt shares with an earlier text.
    chunked_prefill_size: prompt tokens per prefill chunk, between two rounds of running requests.
    scattered_pages: the scattered layout of page_pool.py; None: scattered unless on a CPU.
    mem_fraction_static: share of the same memory, in place of the default; not together with max_total_tokens.
    """

    max_total_tokens: int | None = None
    prefix_cache: bool = True
    chunked_prefill_size: int = 1024
    scattered_pages: bool | None = None
    mem_fraction_static: float | None = None

    def context(self, shape: KVShape, max_running_requests: int, asked: int | None, longest: int, *beside: int) -> int:
        """Return the context length of an engine: `asked`, or without it `longest`, at most `longest` tokens.

        If nothing is asked and a GPU has no room for `longest` tokens, it is what has room, and the log says so.
        beside: row_bytes and token_bytes of `pool`.
        """
        if asked is not None or shape.device.type != "cuda" or self.max_total_tokens is not None:
            return min(asked or longest, longest)
        return self._needed(shape, max_running_requests, longest, *beside).longest_context(
            free_memory(shape.device), self.mem_fraction_static or GPU_SHARE
        )

    def pool(
        self, shape: KVShape, max_running_requests: int, context_length: int, row_bytes: int = 0, token_bytes: int = 0
    ) -> PagePool:
        """Return a page pool for cache entries of `shape`.

        row_bytes, token_bytes: what a running request takes of the same memory beside its pages; what a token takes in
        other caches on the pages, such as a head's. Raises EngineError if a GPU has no room for one request.
        """
        scattered = shape.device.type != "cpu" if self.scattered_pages is None else self.scattered_pages
        longest = context_length + max(ROOM, self.chunked_prefill_size)
        pages = self._pages(shape, self._needed(shape, max_running_requests, context_length, row_bytes, token_bytes))
        return PagePool(max_running_requests, longest, pages, contiguous=not scattered)

    def _needed(self, shape: KVShape, rows: int, context: int, row_bytes: int, token_bytes: int) -> Need:
        return Need(shape.bytes_per_token + token_bytes, row_bytes, rows, context)

    def _pages(self, shape: KVShape, needed: Need) -> int:
        free = free_memory(shape.device) if shape.device.type == "cuda" else None
        if self.max_total_tokens is not None:
            if free is not None:
                needed.check_tokens(self.max_total_tokens, free)
            return self.max_total_tokens // PAGE_SIZE
        if free is not None:
            return needed.tokens(free, self.mem_fraction_static or GPU_SHARE) // PAGE_SIZE
        share = int(usable_memory() * (self.mem_fraction_static or CPU_SHARE))
        one = needed.context + ROOM
        room = max(0, share - needed.rows * needed.row_bytes) // shape.bytes_per_token
        return max(min(needed.rows * one, room), one) // PAGE_SIZE


DEFAULT_MEMORY = MemorySettings()


class KVMemory:
    """Manages the pages of rows and cached prefixes.

    lookahead: number of tokens after a position that the drafter's entry at this position depends on.
    slack: positions that a step may write after a row's tokens (drafted nodes). reuse: cache prefixes. states: of a
    hybrid target's rows; a cached prefix then ends where its states are kept.
    Raises EngineError if one request could need more than the pool holds: it could never end.
    """

    def __init__(
        self,
        pool: PagePool,
        context_length: int,
        lookahead: int,
        slack: int,
        *,
        reuse: bool,
        states: LinearStates | None = None,
    ) -> None:
        self.pool, self.slack, self._states = pool, slack, states
        self.releases = 0  # number of row releases so far
        self._context_length, self._lookahead = context_length, lookahead
        self._prefixes = PrefixCache(pool, lookahead) if reuse else None
        self.check_slack(slack)

    def check_slack(self, slack: int) -> None:
        """Raise EngineError if a request with a full context leaves no room for `slack` drafted nodes."""
        held = self.pool.capacity * self.pool.page_size
        if slack > ROOM or held < self._context_length + slack:
            raise EngineError(
                f"one request may need {self._context_length} tokens of context and {slack} for drafted nodes ({ROOM} "
                f"at most); the cache holds {held}: draft less, raise `max_total_tokens`, or lower `context_length`"
            )

    def admit(
        self, row: int, tokens: Sequence[int], reserve: int, drafted: bool = True, reuse: bool = True
    ) -> int | None:
        """Give the empty row pages for `tokens` and one step after them; `reuse` the longest cached prefix.

        drafted: the prefix must hold the drafter's entries too; otherwise the target's entries suffice.
        reserve: pages that must stay free for running requests.
        Returns the number of tokens that need no prefill, or None if there is no room. At least max(1, lookahead)
        tokens are left for prefill.
        """
        size = self.pool.page_size
        found: list[int] = []
        states: Snapshot | None = None
        if self._prefixes is not None and reuse:
            wanted = (tokens, (len(tokens) - max(1, self._lookahead)) // size, self._whole(drafted))
            if self._states is None:
                found = self._prefixes.find(*wanted)
            else:
                found, states = self._prefixes.find_states(*wanted)
        if self._start(row, found, len(tokens), reserve):
            if self._states is not None and states is not None:
                self._states.restore(row, states)
            return len(found) * size
        # In the contiguous layout the cached prefix takes room beside its copy: try again without the prefix.
        return 0 if found and self._start(row, [], len(tokens), reserve) else None

    def _start(self, row: int, found: Sequence[int], length: int, reserve: int) -> bool:
        """Start the row with the pages `found` and grow it to `length` tokens and one step. False without room."""
        shared = 0 if self.pool.contiguous else len(found)  # shared pages need no new pages
        self.pool.hold(found)  # protects them from eviction
        room = self._free(self.pool.pages_of(length + self.slack) - shared + reserve)
        if room:
            taken = self.pool.adopt(row, found) and self.pool.grow(row, length + self.slack)
            assert taken, "pages that were free are gone"
        for page in found:
            self.pool.drop(page)
        return room

    def grow(self, row: int, length: int) -> bool:
        """Grow the row to `length` tokens and one step; evict unused prefixes if necessary. False without room."""
        missing = self.pool.missing(row, length + self.slack)
        return self._free(missing) and self.pool.grow(row, length + self.slack)

    def grow_all(self, lengths: Sequence[int]) -> bool:
        """Grow rows 0 .. len(lengths)-1 together. False, without a change to any row, if there is no room for all."""
        positions = [length + self.slack for length in lengths]
        room = self._free(sum(self.pool.missing(row, count) for row, count in enumerate(positions)))
        return room and all(self.pool.grow(row, count) for row, count in enumerate(positions))

    def keep(self, row: int, tokens: Sequence[int], positions: int, drafted: bool = True) -> None:
        """Cache the row's first `positions` positions as a prefix. drafted: the drafter's cache holds them too."""
        if self._prefixes is not None:
            states = None if self._states is None else self._states.snapshot(row)
            self._prefixes.keep(tokens, row, positions, self._whole(drafted), states)

    def forget_prefixes(self) -> None:
        """Drop all cached prefixes."""
        if self._prefixes is not None:
            self._prefixes.clear()

    def _whole(self, drafted: bool) -> bool:
        """Whether pages hold all entries of their tokens; without lookahead the target's entries are all of them."""
        return drafted or not self._lookahead

    def release(self, row: int) -> None:
        self.releases += 1
        self.pool.release(row)

    def move(self, destination: int, source: int) -> None:
        self.pool.move(destination, source)

    def check_integrity(self) -> None:
        """Assert that the page pool's holder counts are right and that no page is lost."""
        self.pool.check_integrity([] if self._prefixes is None else self._prefixes.pages)

    def _free(self, pages: int) -> bool:
        """Make that many pages free; evict prefixes if necessary. False if that is impossible."""
        return pages <= self.pool.free or (self._prefixes is not None and self._prefixes.evict(pages))
