"""The one thread that steps the engine, and the asyncio side of it: submit, stream, abort.

    asyncio tasks --- commands (submit, abort) ---> engine thread --- engine.step()
          ^                                               |
          +----- updates (tokens, end, failure) ----------+

Only this thread uses the engine. If a step or an abort fails, the active requests get an EngineFailure and later ones
still run. If the engine cannot even drop all rows, the thread stops and all requests fail.

A request can be cut: at its deadline, or when the server ends. The asyncio side then ends it at once, even if the
engine hangs in a step, with the tokens that it has so far.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from toolkit.infer.request.params import Cause, RequestCutError, SamplingParams
from toolkit.infer.request.request import Request, Update
from toolkit.log import get_logger
from toolkit.threads import end_openmp_workers

logger = get_logger(__name__)


class EngineFailure(RuntimeError):
    """The engine raised an error during a request, or has stopped."""


class GrammarFailure(EngineFailure):
    """The grammar of a request needs more work than it may. Only this request ends by it."""


class Ticket:
    """The asyncio side of one submitted request. Iterate `updates()` to its end; `EngineThread.abort` gives it back.

    asked: further arguments of the engine's `add_request`. cut_by: why it was cut; None: it was not.
    """

    def __init__(self, prompt_ids: Sequence[int], params: SamplingParams, asked: dict[str, Any]) -> None:
        self.prompt_ids, self.params, self.asked = list(prompt_ids), params, asked
        self.cut_by: Cause | None = None
        self._timer: asyncio.TimerHandle | None = None  # of its deadline
        self._loop = asyncio.get_running_loop()
        self._said: asyncio.Queue[Request | Update | Exception] = asyncio.Queue()  # the request first, when it is taken
        self._request: Request | None = None
        self._sent = 0  # tokens delivered so far; used by the engine thread only

    @property
    def request(self) -> Request:
        """The engine's record of this request (its events are the acceptance log)."""
        assert self._request is not None, "the request has not been accepted by the engine yet"
        return self._request

    async def accepted(self) -> None:
        """Wait until the engine has taken the request; call it once. Raises the errors of `add_request`, EngineFailure,
        RequestCutError."""
        item = await self._said.get()
        if isinstance(item, Exception):
            raise item

    async def updates(self) -> AsyncIterator[Update]:
        """Yield updates up to the one with a finish reason. Raises EngineFailure."""
        while True:
            item = await self._said.get()
            if isinstance(item, RequestCutError):
                item = Update((), (), "abort")
            if isinstance(item, Exception):
                raise item
            assert isinstance(item, Update), "`accepted` has not been awaited"
            yield item
            if item.finish_reason is not None:
                return

    def _say(self, item: Request | Update | Exception) -> None:
        try:
            self._loop.call_soon_threadsafe(self._said.put_nowait, item)
        except RuntimeError:  # the loop is closed: no task waits for this answer
            logger.debug("an update came after the event loop was closed")

    def _accept(self, request: Request) -> None:
        self._request = request
        self._say(request)

    def _deliver(self, request: Request) -> None:
        update = Update.since(request, self._sent)
        self._sent += len(update.token_ids)
        self._say(update)


class EngineThread:
    """Owns an engine (add_request, abort, has_work, step) and steps it in a separate thread."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[tuple[str, Ticket | None]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # makes "check _closed, then put" atomic, so that no command is lost
        self._closed = False
        self._active: dict[int, Ticket] = {}  # id(request) -> ticket; used by the engine thread only
        self._open: set[Ticket] = set()  # submitted and not given back; used by the event loop's thread only
        self._reserved = 0  # places of requests that come; used by the event loop's thread only
        self._call_began: float | None = None  # of the engine; written by the engine thread only
        self.failed_steps = 0  # written by the engine thread only
        self._thread = threading.Thread(target=self._run, name="toolkit-engine", daemon=True)

    @property
    def alive(self) -> bool:
        """True while requests can be answered."""
        return self._thread.is_alive() and not self._closed

    @property
    def in_flight(self) -> int:
        """Requests in the engine, running or waiting."""
        return len(self._active)

    @property
    def open(self) -> int:
        """Requests that were submitted and not given back yet, and places reserved."""
        return len(self._open) + self._reserved

    @contextlib.contextmanager
    def reserving(self, n: int) -> Iterator[None]:
        """Keep the places of n requests that will be put: they count as open."""
        self._reserved += n
        try:
            yield
        finally:
            self._reserved -= n

    @property
    def call_seconds(self) -> float:
        """Seconds since the engine was called (a step, a new request, an abort); 0 while it is not."""
        began = self._call_began
        return 0.0 if began is None else time.monotonic() - began

    def where(self) -> str:
        """The stack of the engine's thread: where it is now."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)).rstrip() if frame is not None else "the thread has ended"

    def start(self) -> None:
        """Start the thread; the caller must not compute after this."""
        end_openmp_workers()
        self._thread.start()

    def close(self, timeout_s: float = 30.0) -> bool:
        """End the thread after its current step; active requests fail. Returns whether it ended in `timeout_s`."""
        if self._thread.is_alive():
            self._commands.put(("close", None))
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    async def submit(self, prompt_ids: Sequence[int], params: SamplingParams) -> Ticket:
        """`put` a request and wait until it is `accepted`."""
        ticket = self.put(prompt_ids, params)
        await self.accepted([ticket])
        return ticket

    def put(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, timeout_s: float | None = None, **asked: Any
    ) -> Ticket:
        """Submit a request. asked: further arguments of `add_request`.

        timeout_s: the request is cut after so many seconds. Raises EngineFailure if the engine has stopped.
        """
        ticket = Ticket(prompt_ids, params, asked)
        with self._lock:
            if not self.alive:
                raise EngineFailure("the engine does not run any more; see the server's log")
            self._commands.put(("submit", ticket))
        self._open.add(ticket)
        if timeout_s is not None:
            ticket._timer = ticket._loop.call_later(timeout_s, self.cut, ticket, "deadline")
        return ticket

    async def accepted(self, tickets: Sequence[Ticket]) -> None:
        """Wait until the engine has taken all requests, which were put together. On an error abort all of them.

        Raises the errors of `add_request` (ValueError for a bad or too long prompt), EngineFailure, RequestCutError.
        """
        try:
            for ticket in tickets:
                await ticket.accepted()
        except BaseException:
            for ticket in tickets:
                self.abort(ticket)
            raise

    def abort(self, ticket: Ticket) -> None:
        """Give the request back; the engine ends it if it still has it."""
        self._open.discard(ticket)
        if ticket._timer is not None:
            ticket._timer.cancel()
        if self.alive:
            self._commands.put(("abort", ticket))

    def cut(self, ticket: Ticket, cause: Cause) -> None:
        """End the request now: `updates()` ends with finish_reason "abort". `cut_by` then says why."""
        self.abort(ticket)
        ticket.cut_by = cause
        ticket._said.put_nowait(RequestCutError(cause))

    def cut_all(self, cause: Cause) -> None:
        """Cut all open requests."""
        for ticket in tuple(self._open):
            self.cut(ticket, cause)

    def _run(self) -> None:
        try:
            while self._run_commands():
                self._step()
        except Exception:
            logger.exception("the engine thread ended by an error")
        finally:
            with self._lock:
                self._closed = True
            self._fail_all(EngineFailure("the engine has stopped"))

    def _run_commands(self) -> bool:
        """Run all queued commands; wait for one if the engine is idle. Returns False after "close"."""
        while not self._commands.empty() or not self._active:
            command, ticket = self._commands.get()
            if command == "close":
                return False
            assert ticket is not None
            with self._calling():
                if command == "submit":
                    self._add(ticket)
                elif ticket._request is not None and id(ticket.request) in self._active:
                    self._end(ticket)
        return True

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        """For `call_seconds`: when the call of the engine began."""
        self._call_began = time.monotonic()
        try:
            yield
        finally:
            self._call_began = None

    def _add(self, ticket: Ticket) -> None:
        try:
            request = self._engine.add_request(ticket.prompt_ids, ticket.params, **ticket.asked)
        except ValueError as error:  # invalid input: a prompt that is too long, ids outside the vocabulary
            ticket._say(error)
            return
        except Exception as error:  # process edge: report every error to the client
            logger.exception("the engine failed to take a request")
            ticket._say(EngineFailure(f"the engine failed: {type(error).__name__}: {error}"))
            return
        self._active[id(request)] = ticket
        ticket._accept(request)

    def _end(self, ticket: Ticket) -> None:
        try:
            self._engine.abort(ticket.request)
        except Exception as error:
            self._drop_all(error)
        else:
            del self._active[id(ticket.request)]
            ticket._deliver(ticket.request)

    def _step(self) -> None:
        try:
            with self._calling():
                touched = self._engine.step()
        except Exception as error:  # process edge: report every error to the waiting clients
            self._drop_all(error)
            return
        for request in touched:
            ticket = self._active.get(id(request))
            if ticket is None:
                continue
            if request.finish_reason == "abort":  # by the engine itself
                of_grammar = request.grammar is not None and request.grammar.failure is not None
                ticket._say((GrammarFailure if of_grammar else EngineFailure)(str(request.stop_reason)))
            else:
                ticket._deliver(request)
            if request.finish_reason is not None:
                del self._active[id(request)]
        if self._active and not self._engine.has_work():
            raise RuntimeError(f"the engine is idle but {len(self._active)} requests have not ended")

    def _drop_all(self, error: Exception) -> None:
        """Fail and end all active requests after an error of the engine. Raises an error if the engine keeps any."""
        logger.error("the engine failed with %d requests in flight", len(self._active), exc_info=error)
        self.failed_steps += 1
        requests = [ticket.request for ticket in self._active.values()]
        self._fail_all(EngineFailure(f"the engine failed: {type(error).__name__}: {error}"))
        try:
            for request in reversed(requests):  # last row first, so that no half-written row moves
                self._engine.abort(request)
        except Exception:
            logger.exception("the engine failed to end a request; all its rows are dropped")
        if self._engine.has_work():
            self._engine.drop_all()
        if self._engine.has_work():
            raise RuntimeError("the engine still has work after all its requests were dropped")

    def _fail_all(self, error: EngineFailure) -> None:
        for ticket in self._active.values():
            ticket._say(error)
        self._active.clear()
        if self._closed:
            while not self._commands.empty():
                _, late = self._commands.get()
                if late is not None:
                    late._say(error)
