"""Overlap scheduling: launch round n+1 before the host has read the result of round n.

    host     launch n+1 | read n, its tokens, stops and events | launch n+2 | read n+1 ..
    device   .. n       | n+1                                  | n+1        | n+2 ..

Round n+1 starts from the device buffers that round n leaves: last tokens, lengths, features. The host does not know the
result of round n yet, so every row gets pages for the most that round n can commit. A row that ended in round n runs
once more on its own pages, and the host drops its output. So tokens and acceptance are the same as without overlap; the
host sees them one step later.

The host waits for round n before it launches the next one if it needs the result:

    the rows change    a request ended, was aborted, or reaches its token limit in round n; a prompt or a further
                       chunk of one is due; the pages do not suffice for both rounds, so a request may be preempted
    the round changes  another draft shape was set
    it runs eagerly    penalties, biases, min_tokens, log-probabilities, grammars, drafts drawn from the head's
                       distribution, shapes of single requests, more rows than a graph has; the log states the reason
"""

from __future__ import annotations

from typing import Protocol

from toolkit.infer.cache.cache_manager import ROOM, KVMemory
from toolkit.infer.graphs.graph_rounds import GraphRounds, InFlight
from toolkit.infer.request.request import Request
from toolkit.infer.verify.verifiers import VerifyResult


class RunningRows(Protocol):
    """The part of the scheduler that `Launches` uses. running: the request of each row."""

    running: list[Request]
    memory: KVMemory

    def prompts_due(self) -> bool:
        """Whether a prompt may be ready for prefill."""
        ...

    def make_room_ahead(self, tokens: int) -> bool:
        """Allocate pages for the step after one that commits at most `tokens` tokens per row; False if they run out."""
        ...


class Launches:
    """Launches and lands graph rounds of the running requests. graphs None: never launches."""

    def __init__(self, graphs: GraphRounds | None, scheduler: RunningRows) -> None:
        self.graphs, self._scheduler = graphs, scheduler
        self._in_flight: InFlight | None = None
        self.eager_rounds = 0  # that no graph could run
        self.overlap = graphs is not None and graphs.settings.overlap

    @property
    def in_flight(self) -> bool:
        """Whether a launched round has not landed yet."""
        return self._in_flight is not None

    def shape_changed(self) -> None:
        """Capture the rounds of a new draft shape now, so that no request waits for it. Not with a round in flight."""
        if self.graphs is not None and not self.in_flight:
            self.graphs.record_all()

    def launch(self) -> bool:
        """Launch a round of all rows, with none in flight. Returns False if it has to run eagerly."""
        assert self._in_flight is None, "the round in flight has not landed yet"
        self._in_flight = None if self.graphs is None else self.graphs.launch(self._scheduler.running)
        self.eager_rounds += self.graphs is not None and not self.in_flight
        return self.in_flight

    def land(self) -> tuple[VerifyResult, float] | None:
        """Land the round in flight. Returns its result and begin (perf_counter), or None without a round in flight.

        With overlap, launch the next round first if possible; it is in flight afterwards."""
        landing, self._in_flight = self._in_flight, None  # after an error no round is in flight
        if landing is None or self.graphs is None:
            return None
        following = self._next(self.graphs, landing) if self.overlap else None
        result = self.graphs.land(landing, following)
        self._in_flight = following
        return result, landing.began

    def may_take_rows(self) -> bool:
        """Whether the rows of ended requests may be freed. A round in flight holds them until it lands.

        If all requests have ended, drop the round in flight: later users of its pages are launched after it.
        """
        if any(not request.finished for request in self._scheduler.running):
            return self._in_flight is None
        self._in_flight = None
        return True

    def _next(self, graphs: GraphRounds, in_flight: InFlight) -> InFlight | None:
        """Launch the round after `in_flight`. Returns None if `in_flight` has to land first."""
        running = self._scheduler.running
        if any(request.finished or request.ends_with_next for request in running) or self._scheduler.prompts_due():
            return None
        if graphs.kind_of(running) != in_flight.kind:
            return None
        # A row may be past its token limit and past the context. Its page table ends ROOM positions after the context.
        written = in_flight.most_tokens + self._scheduler.memory.slack
        if written > ROOM or not self._scheduler.make_room_ahead(in_flight.most_tokens):
            return None
        return graphs.launch_after(in_flight)
