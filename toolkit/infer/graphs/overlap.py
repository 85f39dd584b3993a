"""Round n+1 is launched before the host has read the result of round n.

    host     launch n+1 | read n, its tokens, stops and events | launch n+2 | read n+1 ..
    device   .. n       | n+1                                  | n+1        | n+2 ..

Round n+1 begins where round n has left the device's own buffers: last tokens, lengths, features. What the host does not
know yet is covered: rows have pages for as much as round n can have committed; a row that ended in round n runs once
more, on its own pages, and what it writes there is dropped. So the tokens, and what each step accepted, are those of
rounds that wait for one another; the host sees them one step later.

The host waits for round n first ("drains") where it has to know its result:

    the rows change    a request has ended or was aborted, or will end in round n by its limit of tokens; a prompt is
                       to be read, or goes on being read in chunks; pages do not suffice for both rounds, so that a
                       request may have to step back
    the round changes  another draft shape was set
    it runs eagerly    penalties, biases, min_tokens, log-probabilities, drafts drawn from the head's distribution,
                       shapes of single requests, more rows than a graph has: the log says which
"""

from __future__ import annotations

from typing import Protocol

from toolkit.infer.cache.cache_manager import ROOM, KVMemory
from toolkit.infer.graphs.graph_rounds import GraphRounds
from toolkit.infer.graphs.in_flight import InFlight
from toolkit.infer.request.request import Request
from toolkit.infer.verify.walk import VerifyResult


class RunningRows(Protocol):
    """What is asked of the scheduler. running: the request of each row."""

    running: list[Request]
    memory: KVMemory

    def prompts_due(self) -> bool:
        """Whether there may be something of a prompt to read now."""
        ...

    def make_room_ahead(self, tokens: int) -> bool:
        """Pages for the step after one that commits `tokens` tokens of a row at most; False if they do not suffice."""
        ...


class Launches:
    """Rounds of what runs, one after the other, as graphs; None: an engine without graphs launches nothing."""

    def __init__(self, graphs: GraphRounds | None, scheduler: RunningRows) -> None:
        self.graphs, self._scheduler = graphs, scheduler
        self._in_flight: InFlight | None = None
        self.overlap = graphs is not None and graphs.settings.overlap

    @property
    def in_flight(self) -> bool:
        """A round was launched that has not landed."""
        return self._in_flight is not None

    def launch(self) -> bool:
        """The round of all rows, none being in flight; False where it has to run eagerly."""
        assert self._in_flight is None, "a round whose results nobody has read would be lost"
        self._in_flight = None if self.graphs is None else self.graphs.launch(self._scheduler.running)
        return self.in_flight

    def land(self) -> tuple[VerifyResult, float] | None:
        """The result of the round in flight, and when it began (perf_counter). Where it may be, the next one has been
        launched before and is in flight then. None: no round was in flight."""
        landing, self._in_flight = self._in_flight, None  # where anything fails, nothing is in flight
        if landing is None or self.graphs is None:
            return None
        following = self._next(self.graphs, landing) if self.overlap else None
        result = self.graphs.land(landing, following)
        self._in_flight = following
        return result, landing.began

    def may_take_rows(self) -> bool:
        """Whether ended requests may lose their rows: a round in flight has them until it lands.

        Unless nobody waits for it, so that it is forgotten: what will use their pages is launched after it.
        """
        if any(not request.finished for request in self._scheduler.running):
            return self._in_flight is None
        self._in_flight = None
        return True

    def _next(self, graphs: GraphRounds, in_flight: InFlight) -> InFlight | None:
        """The round after `in_flight`; None: `in_flight` has to land first."""
        running = self._scheduler.running
        if any(request.finished or request.ends_with_next for request in running) or self._scheduler.prompts_due():
            return None
        if graphs.kind_of(running) != in_flight.kind:
            return None
        # A row may have gone past its limit, and past the context with it: its table ends ROOM positions after that.
        written = in_flight.most + self._scheduler.memory.slack
        if written > ROOM or not self._scheduler.make_room_ahead(in_flight.most):
            return None
        return graphs.launch_after(in_flight)
