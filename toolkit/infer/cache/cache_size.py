"""How many tokens the KV cache holds: what fits into its share of the memory, or an error that says what would fit.

On a GPU the cache is allocated at once, so it is checked against the free memory. On a CPU the system gives memory at
the first touch.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

from toolkit.infer.cache.page_pool import PAGE_SIZE
from toolkit.infer.request.params import EngineError
from toolkit.log import get_logger

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
