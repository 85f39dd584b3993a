"""The engine's cache memory: its size, pages of rows, cached prefixes and their eviction when pages run out.

The size is what fits into a share of the memory; an error says what would fit. On a GPU the cache is allocated at once,
so it is checked against the free memory. On a CPU the system gives memory at the first touch.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from toolkit.infer.cache.kv_cache import KVShape
from toolkit.infer.cache.linear_states import LinearStates, Snapshot
from toolkit.infer.cache.page_pool import PAGE_SIZE, PagePool
from toolkit.infer.cache.prefix_cache import PrefixCache
from toolkit.infer.request.params import EngineError
from toolkit.log import get_logger
from toolkit.memory import usable_memory

logger = get_logger(__name__)

ROOM = 1024  # positions of a row after the context, for drafted nodes and padding
LEAST_CONTEXT = 512  # what fits is taken for a context that nobody asked for, if it is at least this long


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a GPU, after memory that this process no longer uses has been returned to it."""
    gc.collect()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


@dataclass(frozen=True)
class Need:
    """What a cache on a GPU is for.

    token_bytes: of one token in all caches on the pool's pages. row_bytes: of each running request beside them. rows:
    the most running requests. context: tokens of the longest request.
    """

    token_bytes: int
    row_bytes: int
    rows: int
    context: int

    def tokens(self, free: int, share: float) -> int:
        """Return the tokens that fit into `share` of `free` bytes, at most whole contexts of all rows.

        Raises EngineError if not even one context fits, with the context or the number of rows that would.
        """
        room, one = self._room(free * share), self.context + ROOM
        if room >= one:
            return min(self.rows * one, room)
        raise EngineError(
            f"{self._shortage(free, share)}: {self._what_fits(room, free * share)}, or raise `mem_fraction_static`"
        )

    def longest_context(self, free: int, share: float) -> int:
        """Return the context, or a shorter one that fits. If next to nothing fits it is the context."""
        fits = _in_pages(self._room(free * share) - ROOM)
        if fits >= self.context or fits < LEAST_CONTEXT:
            return self.context
        logger.warning("%s: `context_length` is %d here", self._shortage(free, share), fits)
        return fits

    def check_tokens(self, tokens: int, free: int) -> None:
        """Raise EngineError if a cache of `tokens` tokens (`max_total_tokens`) exceeds `free` bytes."""
        room = self._room(free)
        if tokens > room:
            raise EngineError(
                f"`max_total_tokens` is {tokens}, which need {_gb(tokens * self.token_bytes)} of cache, and "
                f"{_gb(free)} are free: lower it to at most {_in_pages(room)}"
            )

    def _room(self, budget: float) -> int:
        return max(0, int(budget) - self.rows * self.row_bytes) // self.token_bytes

    def _shortage(self, free: int, share: float) -> str:
        wanted = (self.context + ROOM) * self.token_bytes + self.rows * self.row_bytes
        return (
            f"one request of {self.context} tokens (`context_length`) and room for drafts needs {_gb(wanted)} of "
            f"cache, and {_gb(free * share)} are there ({share:g} of {_gb(free)} free)"
        )

    def _what_fits(self, room: int, budget: float) -> str:
        context = _in_pages(room - ROOM)
        if context > 0:
            each = _in_pages(room // self.rows - ROOM)
            all_rows = f", or {each} for {self.rows} whole requests at once" if 0 < each < context else ""
            return f"lower `context_length` to at most {context}{all_rows}"
        rows = max(0, int(budget) - (self.context + ROOM) * self.token_bytes) // max(1, self.row_bytes)
        if self.row_bytes and rows:
            return f"lower `max_running_requests` from {self.rows} to at most {rows}"
        return "no context fits; free memory of the GPU, or take a smaller or quantised target"


def _in_pages(tokens: int) -> int:
    """Return the tokens of whole pages."""
    return tokens // PAGE_SIZE * PAGE_SIZE


def _gb(number: float) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e8 else f"{number / 1e6:.1f} MB"


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
    mem_fraction_static: share of the same memory, in place of the default; not together with max_total_tokens.
    """

    max_total_tokens: int | None = None
    prefix_cache: bool = True
    chunked_prefill_size: int = 1024
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
        longest = context_length + max(ROOM, self.chunked_prefill_size)
        pages = self._pages(shape, self._needed(shape, max_running_requests, context_length, row_bytes, token_bytes))
        return PagePool(max_running_requests, longest, pages)

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
        self.pool.adopt(row, found)  # protects them from eviction
        positions = len(tokens) + self.slack
        if not self._free(self.pool.missing(row, positions) + reserve):
            self.pool.release(row)
            return None
        self.pool.grow(row, positions)
        if self._states is not None and states is not None:
            self._states.restore(row, states)
        return len(found) * size

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
