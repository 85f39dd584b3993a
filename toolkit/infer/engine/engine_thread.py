"""The one thread that steps the engine, and the asyncio side of it: submit, stream, abort.

    asyncio tasks --- commands (submit, abort) ---> engine thread --- engine.step()
          ^                                               |
          +----- updates (tokens, end, failure) ----------+

The engine is touched by this thread only. A failing step fails the requests that were in flight, never the
others and never in silence; an engine that cannot even drop its requests is declared dead.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.request.request import Request, TokenLogprob
from toolkit.log import get_logger

logger = get_logger(__name__)


class EngineFailure(RuntimeError):
    """The engine raised while it worked on a request, or does not run any more."""


@dataclass(frozen=True)
class Update:
    """Tokens of one request since the last update; `finish_reason` is set on the last one.

    stop_reason: the stop id or stop string that ended it. logprobs: one for each token where the request asked.
    """

    token_ids: tuple[int, ...]
    from_draft: tuple[bool, ...]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()

    @classmethod
    def since(cls, request: Request, sent: int) -> Update:
        """What came behind the first `sent` tokens of the answer."""
        return cls(
            tuple(request.output_ids[sent:]),
            tuple(request.token_from_draft[sent:]),
            request.finish_reason,
            request.stop_reason,
            tuple(request.logprobs[sent:]),
        )


class Ticket:
    """One submitted request, seen from asyncio. Iterate `updates()` to its end, or call `abort()`."""

    def __init__(
        self, prompt_ids: Sequence[int], params: SamplingParams, speculative: bool, shape: DraftShape | None
    ) -> None:
        self.prompt_ids = list(prompt_ids)
        self.params = params
        self.speculative, self.shape = speculative, shape
        self._loop = asyncio.get_running_loop()
        self._updates: asyncio.Queue[Update | Exception] = asyncio.Queue()
        self._accepted: asyncio.Future[Request] = self._loop.create_future()
        self._request: Request | None = None
        self._sent = 0  # tokens handed over so far; the engine thread's

    @property
    def request(self) -> Request:
        """The engine's record of this request (its events are the acceptance log)."""
        assert self._request is not None, "the request has not been accepted by the engine yet"
        return self._request

    async def updates(self) -> AsyncIterator[Update]:
        """Yields until the update that carries a finish reason. Raises EngineFailure."""
        while True:
            item = await self._updates.get()
            if isinstance(item, Exception):
                raise item
            yield item
            if item.finish_reason is not None:
                return

    def _call(self, function: Any, *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed: nobody waits for this answer any more
            logger.debug("an update came after the event loop was closed")

    def _accept(self, request: Request) -> None:
        self._request = request
        self._call(_resolve, self._accepted, request)

    def _deliver(self, request: Request) -> None:
        update = Update.since(request, self._sent)
        self._sent += len(update.token_ids)
        self._call(self._updates.put_nowait, update)

    def _fail(self, error: Exception) -> None:
        self._call(_resolve, self._accepted, error)
        self._call(self._updates.put_nowait, error)


def _resolve(future: asyncio.Future[Request], result: Request | Exception) -> None:
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


class EngineThread:
    """Owns an engine (add_request, abort, has_work, step) and steps it in a thread of its own."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[tuple[str, Ticket | None]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards _closed together with a put, so that no command is lost
        self._closed = False
        self._active: dict[int, Ticket] = {}  # id(request) -> ticket; the engine thread's
        self._thread = threading.Thread(target=self._run, name="toolkit-engine", daemon=True)

    @property
    def alive(self) -> bool:
        """True while requests can be answered."""
        return self._thread.is_alive() and not self._closed

    @property
    def in_flight(self) -> int:
        """Requests that the engine holds, running or waiting."""
        return len(self._active)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self, timeout_s: float = 30.0) -> None:
        """Ends the thread after its current step; requests in flight fail. Waits at most `timeout_s` seconds."""
        if self._thread.is_alive():
            self._commands.put(("close", None))
            self._thread.join(timeout_s)

    async def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        speculative: bool = True,
        shape: DraftShape | None = None,
    ) -> Ticket:
        """Hands a request to the engine and waits until it is accepted. Raises what `add_request` raises (a
        ValueError for a bad or too long prompt), EngineFailure when the engine does not run."""
        ticket = Ticket(prompt_ids, params, speculative, shape)
        self._put("submit", ticket)
        try:
            await ticket._accepted
        except asyncio.CancelledError:
            self.abort(ticket)
            raise
        return ticket

    def abort(self, ticket: Ticket) -> None:
        """Drops the request from the engine, if it is still there."""
        if self.alive:
            self._commands.put(("abort", ticket))

    def _put(self, command: str, ticket: Ticket) -> None:
        with self._lock:
            if not self.alive:
                raise EngineFailure("the engine does not run any more; see the server's log")
            self._commands.put((command, ticket))

    def _run(self) -> None:
        try:
            while self._obey_commands():
                self._step()
        except Exception:
            logger.exception("the engine thread ended by an error")
        finally:
            with self._lock:
                self._closed = True
            self._fail_all(EngineFailure("the engine has stopped"))

    def _obey_commands(self) -> bool:
        """Takes all waiting commands; waits for one when the engine is idle. False when told to close."""
        while not self._commands.empty() or not self._active:
            command, ticket = self._commands.get()
            if command == "close":
                return False
            assert ticket is not None
            if command == "submit":
                self._add(ticket)
            elif ticket._request is not None and id(ticket.request) in self._active:
                del self._active[id(ticket.request)]
                self._engine.abort(ticket.request)
                ticket._deliver(ticket.request)
        return True

    def _add(self, ticket: Ticket) -> None:
        try:
            request = self._engine.add_request(
                ticket.prompt_ids, ticket.params, speculative=ticket.speculative, shape=ticket.shape
            )
        except ValueError as error:  # the user's: a prompt that is too long, ids outside the vocabulary
            ticket._fail(error)
            return
        except Exception as error:  # process edge: the client must hear of it, whatever it was
            logger.exception("the engine failed to take a request")
            ticket._fail(EngineFailure(f"the engine failed: {type(error).__name__}: {error}"))
            return
        self._active[id(request)] = ticket
        ticket._accept(request)

    def _step(self) -> None:
        try:
            touched = self._engine.step()
        except Exception as error:  # process edge: whatever the model raises must reach the waiting clients
            logger.exception("the engine failed with %d requests in flight", len(self._active))
            self._drop_all(error)
            return
        for request in touched:
            ticket = self._active.get(id(request))
            if ticket is None:
                continue
            ticket._deliver(request)
            if request.finish_reason is not None:
                del self._active[id(request)]
        if self._active and not self._engine.has_work():
            raise RuntimeError(f"the engine is idle but {len(self._active)} requests have not ended")

    def _drop_all(self, error: Exception) -> None:
        """After a failed step: every request in flight fails, and the engine must be able to forget them."""
        requests = [ticket.request for ticket in self._active.values()]
        self._fail_all(EngineFailure(f"the engine failed: {type(error).__name__}: {error}"))
        for request in reversed(requests):  # the last row first: then no half-written row is moved into a hole
            self._engine.abort(request)
        if self._engine.has_work():
            raise RuntimeError("the engine still has work after all its requests were aborted")

    def _fail_all(self, error: EngineFailure) -> None:
        for ticket in self._active.values():
            ticket._fail(error)
        self._active.clear()
        if self._closed:
            while not self._commands.empty():
                _, late = self._commands.get()
                if late is not None:
                    late._fail(error)
