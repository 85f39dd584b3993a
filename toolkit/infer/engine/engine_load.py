"""What an engine holds at a moment: requests that run and wait, and tokens in the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toolkit.infer.engine.scheduler import Scheduler


@dataclass(frozen=True)
class EngineLoad:
    """running: requests in the batch, and the one whose prompt is read. waiting: requests in the queue.

    In tokens, whole pages: request_tokens that the running requests hold, cached_tokens of these and of kept prefixes,
    capacity_tokens at most. Since the start: refused_rows, times that the next request found no room; eager_rounds, of
    an engine with CUDA graphs.
    """

    running: int
    waiting: int
    request_tokens: int
    cached_tokens: int
    capacity_tokens: int
    refused_rows: int = 0
    eager_rounds: int = 0


def load_of(engine: Any) -> EngineLoad:
    """Read the load. Any thread may call it: it changes nothing, and reads each number at about the same time."""
    scheduler: Scheduler = engine.scheduler
    pool = scheduler.memory.pool
    pages = {page for table in list(pool.tables) for page in list(table)}
    return EngineLoad(
        running=len(scheduler.running) + (scheduler.reading is not None),
        waiting=len(scheduler.waiting),
        request_tokens=len(pages) * pool.page_size,
        cached_tokens=pool.held * pool.page_size,
        capacity_tokens=pool.capacity * pool.page_size,
        refused_rows=scheduler.refused_rows,
        eager_rounds=engine.eager_rounds,
    )
