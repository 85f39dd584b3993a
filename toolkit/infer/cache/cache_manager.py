"""The engine's cache memory: pages of rows, kept prefixes, and which prefixes are evicted when pages run out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from toolkit.infer.cache.kv_cache import KVShape
from toolkit.infer.cache.page_pool import PAGE_SIZE, PagePool
from toolkit.infer.cache.prefix_cache import PrefixCache
from toolkit.infer.request.errors import EngineError
from toolkit.memory import usable_memory

ROOM = 1024  # addresses of a row after the context, for drafted nodes and padding
CPU_SHARE, GPU_SHARE = 0.125, 0.8  # of usable memory, or the GPU's free one, for the target's cache


@dataclass(frozen=True)
class MemorySettings:
    """The size of an engine's cache, and how prompts are read into it.

    max_total_tokens: tokens that running requests and kept prefixes hold together; if they do not suffice, prefixes are
    evicted first, then the youngest requests wait and are read again. None: whole contexts for all rows, at most an
    eighth of the machine's or the container's memory (0.8 of what a GPU has free) for the target's cache. prefix_cache:
    the part that a prompt shares with an earlier text is not read again. chunked_prefill_size: prompt tokens read
    between two rounds of running answers.
    scattered_pages: the layout of page_pool.py; None: on a GPU. mem_fraction_static: another share of the same memory.
    Raises EngineError for a share that is not between 0 and 1 or given beside max_total_tokens, and for fewer tokens
    than a page has.
    """

    max_total_tokens: int | None = None
    prefix_cache: bool = True
    chunked_prefill_size: int = 1024
    scattered_pages: bool | None = None
    mem_fraction_static: float | None = None

    def __post_init__(self) -> None:
        if self.mem_fraction_static is not None and not 0 < self.mem_fraction_static < 1:
            raise EngineError(
                f"`mem_fraction_static` is {self.mem_fraction_static:g}; a share between 0 and 1 is needed, such as 0.8"
            )
        if self.max_total_tokens is not None and self.max_total_tokens < PAGE_SIZE:
            raise EngineError(
                f"`max_total_tokens` is {self.max_total_tokens}; at least a page of {PAGE_SIZE} tokens is needed"
            )
        if self.mem_fraction_static is not None and self.max_total_tokens is not None:
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
            share = torch.cuda.mem_get_info(shape.device)[0] * (self.mem_fraction_static or GPU_SHARE)
        else:
            share = usable_memory() * (self.mem_fraction_static or CPU_SHARE)
        one = max_context + ROOM
        return max(min(max_batch * one, int(share) // shape.bytes_per_token), one) // PAGE_SIZE


DEFAULT_MEMORY = MemorySettings()


class KVMemory:
    """Pages of rows and kept prefixes. lookahead: tokens after a position that the drafter's entry there depends on.

    slack: positions that a step may write after a row's tokens (drafted nodes). reuse: keep prefixes.
    Raises EngineError if one request could need more than the pool holds: it could never end.
    """

    def __init__(self, pool: PagePool, max_context: int, lookahead: int, slack: int, *, reuse: bool) -> None:
        self.pool, self.slack = pool, slack
        self.releases = 0  # rows that have released their pages so far
        self._max_context, self._lookahead = max_context, lookahead
        self._prefixes = PrefixCache(pool, lookahead) if reuse else None
        self.check_slack(slack)

    def check_slack(self, slack: int) -> None:
        """Raise EngineError if a request of a whole context leaves no room for that many drafted nodes."""
        held = self.pool.capacity * self.pool.page_size
        if slack > ROOM or held < self._max_context + slack:
            raise EngineError(
                f"one request may need {self._max_context} tokens of context and {slack} for drafted nodes ({ROOM} at "
                f"most); the cache holds {held}: draft less, raise `max_total_tokens`, or lower "
                "`context_length`"
            )

    def admit(self, row: int, tokens: Sequence[int], reserve: int, drafted: bool = True) -> int | None:
        """Give the empty row pages for `tokens` and one step after them, starting with the kept prefix that they share.

        drafted: the prefix must hold the drafter's entries too; otherwise those of the target suffice.
        Returns the number of tokens that need not be read again; None if there is no room: `reserve` pages must stay
        free for running requests. At least one token is left to read, and those that the drafter must see with it.
        """
        size = self.pool.page_size
        found: list[int] = []
        if self._prefixes is not None:
            found = self._prefixes.find(tokens, (len(tokens) - max(1, self._lookahead)) // size, self._whole(drafted))
        if self._start(row, found, len(tokens), reserve):
            return len(found) * size
        # Where pages are copied, the prefix that was found takes room itself: try without it.
        return 0 if found and self._start(row, [], len(tokens), reserve) else None

    def _start(self, row: int, found: Sequence[int], length: int, reserve: int) -> bool:
        """Let the row begin with the pages `found`, with room for `length` tokens and one step."""
        shared = 0 if self.pool.contiguous else len(found)  # shared pages take no further room
        self.pool.hold(found)  # eviction must not free them
        room = self._free(self.pool.pages_of(length + self.slack) - shared + reserve)
        if room:
            taken = self.pool.adopt(row, found) and self.pool.grow(row, length + self.slack)
            assert taken, "pages that were free are gone"
        for page in found:
            self.pool.drop(page)
        return room

    def grow(self, row: int, length: int) -> bool:
        """Make room for the row's `length` tokens and one step after them, if need be by evicting unused prefixes."""
        missing = self.pool.missing(row, length + self.slack)
        return self._free(missing) and self.pool.grow(row, length + self.slack)

    def grow_all(self, lengths: Sequence[int]) -> bool:
        """The same for rows 0.. together; False, and no row has grown, if there is not room for all."""
        positions = [length + self.slack for length in lengths]
        room = self._free(sum(self.pool.missing(row, count) for row, count in enumerate(positions)))
        return room and all(self.pool.grow(row, count) for row, count in enumerate(positions))

    def keep(self, row: int, tokens: Sequence[int], positions: int, drafted: bool = True) -> None:
        """Keep the row's first `positions` positions as a prefix. drafted: the drafter's cache holds them too."""
        if self._prefixes is not None:
            self._prefixes.keep(tokens, row, positions, self._whole(drafted))

    def _whole(self, drafted: bool) -> bool:
        """Whether pages hold all entries of their tokens; without a drafter's cache, those of the target are all."""
        return drafted or not self._lookahead

    def release(self, row: int) -> None:
        self.releases += 1
        self.pool.release(row)

    def move(self, destination: int, source: int) -> None:
        self.pool.move(destination, source)

    def check_integrity(self) -> None:
        """Assert that each page's count of holders is right."""
        self.pool.check_integrity([] if self._prefixes is None else self._prefixes.pages)

    def _free(self, pages: int) -> bool:
        """Whether that many pages are free, if need be after evicting prefixes."""
        return pages <= self.pool.free or (self._prefixes is not None and self._prefixes.evict(pages))
