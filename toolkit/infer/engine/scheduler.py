"""The scheduler: assigns rows and pages to requests, admits waiting requests, and preempts when pages run out.

It handles no tensors. Running requests hold rows 0..B-1. New requests are appended; the last row moves into the row of
an ended request. A prompt too long for one forward is prefilled in chunks. Until it is complete, its request is
`reading` and holds row B.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter

from toolkit.infer.cache.cache_manager import KVMemory
from toolkit.infer.request.request import Request
from toolkit.log import get_logger

logger = get_logger(__name__)

LEAST_CHUNK = 64  # tokens that are read at once where memory is short
WORTH_A_WAIT = 64  # shared tokens, for which a prompt waits for another forward; a whole number of pages
READS_TO_GROW = 32  # chunks, after which memory may suffice for larger ones again
Move = tuple[int, int]  # (destination row, source row)
_order = attrgetter("order")


def _begins_as(request: Request, beginnings: Sequence[Sequence[int]]) -> bool:
    """Whether it has one of these beginnings and may reuse pages."""
    tokens = request.context_ids if beginnings and request.params.prompt_logprobs is None else []
    return any(tokens[: len(one)] == one for one in beginnings)


class Scheduler:
    """The queue and the rows of one engine.

    chunk: limit of prompt tokens in one forward. together: as many prompts as fit are read in one; else one at a time,
    as linear-attention layers need it."""

    def __init__(self, max_running_requests: int, chunk: int, memory: KVMemory, *, together: bool = True) -> None:
        self.max_running_requests, self.chunk, self.memory = max_running_requests, chunk, memory
        self._together = together
        self._whole_chunk, self._reads = chunk, 0  # chunks read since `chunk` changed last
        self.waiting: deque[Request] = deque()  # by priority, then by arrival
        self.running: list[Request] = []  # the request of row i at index i
        self.reading: Request | None = None
        self._refused: tuple[Request, int] | None = None  # the request without room, and memory.releases then
        self.refused_rows = 0  # times that the next request of the queue found no room

    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.reading)

    def enqueue(self, request: Request) -> None:
        """Let a request wait at its place."""
        insort(self.waiting, request, key=_order)

    def next_group(self, budget: int) -> list[Request]:
        """Assign rows to the waiting requests to prefill together now, in the order of the queue. Returns them.

        Together they have at most `budget` unread tokens. A single longer prompt becomes `reading` instead. A prompt
        that begins as another of the group waits until it can reuse the other's pages.
        With a long queue, prefill waits until an eighth of the rows is free, so that one forward reads many prompts.
        """
        free = self.max_running_requests - len(self.running)
        if self.reading is not None or free < self._gathered():
            return []
        group: list[Request] = []
        beginnings: list[list[int]] = []
        tokens = 0
        while self.waiting and len(group) < free and not _begins_as(self.waiting[0], beginnings):
            if not self._admit(self.waiting[0]):
                break
            tokens += self.waiting[0].unread
            if tokens > budget:
                if group:
                    self.memory.release(len(self.running))
                else:
                    self.reading = self.waiting.popleft()
                break
            group.append(self.waiting.popleft())
            self.running.append(group[-1])
            if not self._together:
                break
            if beginning := self._to_be_kept(group[-1]):
                beginnings.append(beginning)
        return group

    def _to_be_kept(self, request: Request) -> list[int]:
        """Return the tokens with which others can reuse the next WORTH_A_WAIT positions of an admitted request; nothing
        if they will not be cached."""
        # Beside a head, what a request without drafts has read is not cached.
        cached = self.memory.reuse and (request.speculative or not self.memory.lookahead)
        end = request.n_read + WORTH_A_WAIT + self.memory.lookahead
        tokens = request.context_ids if cached else []
        return tokens[:end] if len(tokens) >= end else []

    def _gathered(self) -> int:
        """Number of rows that must be free before prompts are read."""
        return min(len(self.waiting), max(1, self.max_running_requests // 8))

    def prompts_due(self) -> bool:
        """Whether a prompt may be ready for prefill."""
        if self.reading is not None:
            return True
        if not self.waiting or self.max_running_requests - len(self.running) < self._gathered():
            return False
        return (self.waiting[0], self.memory.releases) != self._refused

    def _admit(self, request: Request) -> bool:
        """Allocate the pages of the next row for a request. One further page per running request stays free."""
        row = len(self.running)
        whole = request.params.prompt_logprobs is not None
        known = self.memory.admit(row, request.context_ids, row, reuse=not whole)
        if known is None:
            self.refused_rows += (request, self.memory.releases) != self._refused
            self._refused = (request, self.memory.releases)
            return False
        request.n_read, request.ready = known, False
        request.admitted_at = time.perf_counter() if request.admitted_at is None else request.admitted_at
        request.cached_tokens = max(request.cached_tokens, min(known, len(request.prompt_ids)))
        return True

    def reading_is_complete(self) -> Request:
        """Make the request `reading` a running one, in the row it holds. Returns it."""
        assert self.reading is not None
        request, self.reading = self.reading, None
        self.running.append(request)
        return request

    def put_back(self) -> list[Request]:
        """Return the requests of a failed prefill, which hold the last rows, to the queue. Returns them in order."""
        back: list[Request] = []
        while self.running and not self.running[-1].ready:
            self.memory.release(len(self.running) - 1)
            back.append(self.running.pop())
            self.enqueue(back[-1])
        return back[::-1]

    def read_less(self, being_read: Sequence[Request], error: str) -> list[Request]:
        """After a prefill of these requests ran out of memory: read smaller chunks, or end the first of them if chunks
        are the smallest. Returns the requests that ended."""
        self._reads = 0
        if self.chunk > LEAST_CHUNK:
            self.chunk = max(LEAST_CHUNK, self.chunk // 2)
            logger.warning("a prefill ran out of memory; prompts are read in chunks of %d tokens", self.chunk)
            return []
        victim = self.reading or next(iter(being_read), None)
        if victim is None:
            return []
        victim.fail(f"the prompt needs more memory than is left ({error})")
        self.drop_unstarted(victim)
        return [victim]

    def has_read(self) -> None:
        """Count a read chunk. After READS_TO_GROW of them without an error, chunks that got smaller double."""
        self._reads += 1
        if self.chunk < self._whole_chunk and self._reads >= READS_TO_GROW:
            self.chunk, self._reads = min(self._whole_chunk, 2 * self.chunk), 0

    def drop_unstarted(self, request: Request) -> bool:
        """Remove a request that waits or is `reading`. Returns False if it is neither."""
        if request is self.reading:
            self.memory.release(len(self.running))
            self.reading = None
        elif request in self.waiting:
            self.waiting.remove(request)
        else:
            return False
        return True

    def drop_all(self) -> list[Request]:
        """Forget all requests, and wipe and free all rows. Returns the requests."""
        dropped = [*self.running, *self.waiting, *([] if self.reading is None else [self.reading])]
        self.running.clear()
        self.waiting.clear()
        self.reading = None
        for row in range(self.memory.pool.rows):
            self.memory.pool.clear(row)
            self.memory.release(row)
        return dropped

    def retire(self, keep: Callable[[int, Request], None]) -> list[Move]:
        """Call `keep(row, request)` for each ended request and free its row. Returns the moves of rows, in order."""
        before = len(self.running)
        for row, request in enumerate(self.running):
            if request.finished:
                keep(row, request)
                self.memory.release(row)
        moves = [move for row in reversed(range(before)) if self.running[row].finished for move in self._close(row)]
        self._follow(before)
        return moves

    def make_room(self) -> list[Move]:
        """Allocate pages for the next step of every row. If pages run out, preempt the last requests of the order.

        Preempted requests return to the queue and recompute later. Returns the moves of rows, in order.
        """
        moves: list[Move] = []
        row = 0
        while row < len(self.running) + (self.reading is not None):
            request = self.running[row] if row < len(self.running) else self.reading
            assert request is not None
            if self.memory.grow(row, max(request.length, len(request.prompt_ids) + 1)):
                row += 1
            else:
                moves += self._preempt()
                row = 0  # row 0 may hold another request now
        return moves

    def make_room_ahead(self, tokens: int) -> bool:
        """Allocate pages for the step after the one in flight, which commits at most `tokens` tokens of a row.

        A row past its token limit has ended and needs no further pages. Returns False, without any change, if the
        pages do not suffice.
        """
        most = [min(one.length + tokens, len(one.prompt_ids) + one.token_limit) for one in self.running]
        return self.memory.grow_all(most)

    def _preempt(self) -> list[Move]:
        before, reading = len(self.running), self.reading
        last = max(self.running, key=_order, default=None)
        if reading is not None and (last is None or last.priority <= reading.priority):  # it has written nothing yet
            victim, row, self.reading = reading, before, None
        else:
            assert last is not None and (before > 1 or reading is not None), "a request does not fit into the cache"
            victim, row = last, self.running.index(last)
        victim.n_read, victim.ready = 0, False
        victim.preemptions += 1
        self.memory.release(row)
        self.enqueue(victim)
        moves = self._close(row) if row < before else []
        self._follow(before)
        return moves

    def _close(self, row: int) -> list[Move]:
        """Move the last row into the free row."""
        last = self.running.pop()
        if row == len(self.running):
            return []
        self.running[row] = last
        self.memory.move(row, len(self.running))
        return [(row, len(self.running))]

    def _follow(self, before: int) -> None:
        """Move `reading` to the row after the running requests. There were `before` of them."""
        if self.reading is not None and len(self.running) < before:
            self.memory.move(len(self.running), before)

    def check_integrity(self, in_flight: bool = False) -> None:
        """Assert that every request is in one place, has pages for its tokens, and that its events count its tokens.

        in_flight: a round is running, so ended requests may still hold their rows."""
        running, waiting = self.running, list(self.waiting)
        held = running if self.reading is None else [*running, self.reading]
        assert len(running) <= self.max_running_requests, f"{len(running)} requests are running"
        assert len(set(held) | set(waiting)) == len(held) + len(waiting), "a request is in two places"
        settled = waiting if in_flight else held + waiting
        assert not any(request.finished for request in settled), "an ended request still holds a place"
        assert all(request.output_ids and request.ready for request in running), "a running request has no token"
        assert waiting == sorted(waiting, key=_order), "the queue is out of order"
        for request in running:
            assert len(request.output_ids) == len(request.token_from_draft), "tokens and their origins differ in number"
            assert 1 + sum(event.committed for event in request.events) == len(request.output_ids), "events miss tokens"
        pool = self.memory.pool
        for row in range(pool.rows):
            length = held[row].length - 1 if row < len(running) else held[row].n_read if row < len(held) else 0
            enough = len(pool.tables[row]) >= pool.pages_of(length)
            assert enough and (row < len(held) or not pool.tables[row]), f"row {row} has not the pages it needs"
        self.memory.check_integrity()
