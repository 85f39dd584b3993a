"""Which request holds which row, and who comes next. Knows no tensors.

Running requests hold rows 0..B-1; new ones are appended, and the last row moves into the hole of an ended one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from toolkit.infer.errors import EngineError
from toolkit.infer.request import Request

PROMPT_TOKENS = 4096  # padded prompt tokens read in one forward, unless a single prompt is longer


class Scheduler:
    """The queue and the rows of one engine."""

    def __init__(self, max_batch: int) -> None:
        if max_batch < 1:
            raise EngineError(f"max_batch is {max_batch}; at least 1 request must be able to run")
        self.max_batch = max_batch
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # the request of row i at index i

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def groups(self) -> Iterator[list[Request]]:
        """Waiting requests whose prompts are read together, first come first served; each group is put into rows.

        While more wait than there are free rows, rows are let gather until an eighth is free: many prompts a forward.
        """
        free = self.max_batch - len(self.running)
        if free < min(len(self.waiting), max(1, self.max_batch // 8)):
            return
        while self.waiting and len(self.running) < self.max_batch:
            group = self._next_group(self.max_batch - len(self.running))
            self.running += group
            yield group

    def _next_group(self, free: int) -> list[Request]:
        group: list[Request] = []
        longest = 0
        while self.waiting and len(group) < free:
            longest = max(longest, len(self.waiting[0].prompt_ids))
            if group and longest * (len(group) + 1) > PROMPT_TOKENS:
                break
            group.append(self.waiting.popleft())
        return group

    def drop_waiting(self, request: Request) -> bool:
        """Take a request out of the queue; False if it is not there."""
        if request not in self.waiting:
            return False
        self.waiting.remove(request)
        return True

    def retire(self) -> Iterator[tuple[int, int]]:
        """Free the rows of ended requests, last row first. Yields (row, last row) for every row that has to move."""
        for row in reversed(range(len(self.running))):
            if not self.running[row].finished:
                continue
            last = self.running.pop()
            if row < len(self.running):
                self.running[row] = last
                yield row, len(self.running)

    def check_integrity(self) -> None:
        """Assert that every request is in one place and that its log accounts for its tokens."""
        running, waiting = self.running, list(self.waiting)
        assert len(running) <= self.max_batch, f"{len(running)} requests run in {self.max_batch} rows"
        assert len(set(running) | set(waiting)) == len(running) + len(waiting), "a request is in two places"
        assert not any(request.finished for request in running + waiting), "an ended request still holds a place"
        assert all(request.output_ids for request in running), "a running request has not read its prompt"
        assert not any(request.output_ids for request in waiting), "a waiting request has tokens"
        for request in running:
            assert len(request.output_ids) == len(request.token_from_draft), "tokens and their origins differ in number"
            assert 1 + sum(event.committed for event in request.events) == len(request.output_ids), "events miss tokens"
