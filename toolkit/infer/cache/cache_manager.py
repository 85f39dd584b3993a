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
CPU_SHARE, GPU_SHARE = 0.125, 0.8  # share of usable memory (CPU) or free memory (GPU) for the cache


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a GPU, after memory that this process no longer uses has been returned to it."""
    gc.collect()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


@dataclass(frozen=True)
class CacheNeed:
    """What a cache is for, and the memory that it may take.

    shape: of the target's entries. rows: the most running requests. tokens: those of all running requests and cached
    prefixes together (`max_total_tokens`); None: whole contexts for all rows, as far as they fit into `share` of the
    machine's or the container's memory, or of a GPU's free memory (None: CPU_SHARE, GPU_SHARE). row_bytes: of each
    running request beside its pages. token_bytes: of a token in other caches on the pages, such as a head's.
    """

    shape: KVShape
    rows: int
    tokens: int | None = None
    share: float | None = None
    row_bytes: int = 0
    token_bytes: int = 0

    def context(self, longest: int) -> int:
        """Return `longest` tokens, or the shorter context that fits on a GPU; then the log says so. If next to nothing
        fits it is `longest`, which `pages` refuses."""
        if not self._on_gpu or self.tokens is not None:
            return longest
        free = free_memory(self.shape.device)
        fits = _in_pages(self._room(free * self._share) - ROOM)
        if fits >= longest or fits < LEAST_CONTEXT:
            return longest
        logger.warning("%s: `context_length` is %d here", self._shortage(longest, free), fits)
        return fits

    def pages(self, context: int) -> int:
        """Return the number of pages of a cache for requests of at most `context` tokens.

        Raises EngineError if a GPU has no room for one request, with the context that would fit, or for `tokens`.
        """
        one = context + ROOM
        free = free_memory(self.shape.device) if self._on_gpu else usable_memory()
        if self._on_gpu:
            self._check(one, free)
        if self.tokens is not None:
            return self.tokens // PAGE_SIZE
        room = self._room(free * self._share)
        return max(one, min(self.rows * one, room)) // PAGE_SIZE

    @property
    def _on_gpu(self) -> bool:
        return self.shape.device.type == "cuda"

    @property
    def _share(self) -> float:
        return self.share or (GPU_SHARE if self._on_gpu else CPU_SHARE)

    @property
    def _bytes(self) -> int:
        """Of a token in all caches on the pages."""
        return self.shape.bytes_per_token + self.token_bytes

    def _room(self, budget: float) -> int:
        """The tokens that fit into so many bytes."""
        return max(0, int(budget) - self.rows * self.row_bytes) // self._bytes

    def _check(self, one: int, free: int) -> None:
        """Raise EngineError if a GPU with so many free bytes has no room for `tokens`, or for one request."""
        if self.tokens is not None and self.tokens > (room := self._room(free)):
            raise EngineError(
                f"`max_total_tokens` is {self.tokens}, which need {_gb(self.tokens * self._bytes)} of cache, and "
                f"{_gb(free)} are free: lower it to at most {_in_pages(room)}"
            )
        if self.tokens is None and one > (room := self._room(free * self._share)):
            fits = _in_pages(room - ROOM)
            lower = f"lower `context_length` to at most {fits}" if fits > 0 else "lower `max_running_requests`"
            raise EngineError(
                f"{self._shortage(one - ROOM, free)}: {lower}, raise `mem_fraction_static`, or take a smaller or "
                "quantised target"
            )

    def _shortage(self, context: int, free: int) -> str:
        wanted = (context + ROOM) * self._bytes + self.rows * self.row_bytes
        return (
            f"one request of {context} tokens (`context_length`) and room for drafts needs {_gb(wanted)} of cache, and "
            f"{_gb(free * self._share)} are there ({self._share:g} of {_gb(free)} free)"
        )


def _in_pages(tokens: int) -> int:
    """Return the tokens of whole pages."""
    return tokens // PAGE_SIZE * PAGE_SIZE


def _gb(number: float) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e8 else f"{number / 1e6:.1f} MB"


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
        self._context_length, self.lookahead, self.reuse = context_length, lookahead, reuse
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

    def admit(self, row: int, tokens: Sequence[int], reserve: int, reuse: bool = True) -> int | None:
        """Give the empty row pages for `tokens` and one step after them; `reuse` the longest cached prefix.

        reserve: pages that must stay free for running requests.
        Returns the number of tokens that need no prefill, or None if there is no room. At least max(1, lookahead)
        tokens are left for prefill.
        """
        size = self.pool.page_size
        found: list[int] = []
        states: Snapshot | None = None
        if self._prefixes is not None and reuse:
            wanted = (tokens, (len(tokens) - max(1, self.lookahead)) // size)
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

    def keep(self, row: int, tokens: Sequence[int], positions: int) -> None:
        """Cache the row's first `positions` positions as a prefix: those that the drafter has read too."""
        if self._prefixes is not None:
            states = None if self._states is None else self._states.snapshot(row)
            self._prefixes.keep(tokens, row, positions, states)

    def forget_prefixes(self) -> None:
        """Drop all cached prefixes."""
        if self._prefixes is not None:
            self._prefixes.clear()

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
