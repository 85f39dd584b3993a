"""The one thread that steps the engine, and the asyncio side of it: submit, stream, abort.

    asyncio tasks --- commands (submit, abort) ---> engine thread --- engine.step()
          ^                                               |
          +----- updates (tokens, end, failure) ----------+

Only this thread uses the engine. If a step fails, the active requests get an EngineFailure and later requests still
run. If the engine cannot drop its requests either, the thread stops and all requests fail.
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
    """The engine raised an error during a request, or has stopped."""


@dataclass(frozen=True)
class Update:
    """Tokens of one request since the last update; `finish_reason` is set on the last update.

    stop_reason: the stop id or stop string that ended the request. logprobs: one per token if the request asked.
    """

    token_ids: tuple[int, ...]
    from_draft: tuple[bool, ...]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()

    @classmethod
    def since(cls, request: Request, sent: int) -> Update:
        """The tokens after the first `sent` tokens of the answer."""
        return cls(
            tuple(request.output_ids[sent:]),
            tuple(request.token_from_draft[sent:]),
            request.finish_reason,
            request.stop_reason,
            tuple(request.logprobs[sent:]),
        )


class Ticket:
    """The asyncio side of one submitted request. Iterate `updates()` to its end, or call `EngineThread.abort`."""

    def __init__(
        self, prompt_ids: Sequence[int], params: SamplingParams, speculative: bool, shape: DraftShape | None
    ) -> None:
        self.prompt_ids, self.params = list(prompt_ids), params
        self.speculative, self.shape = speculative, shape
        self._loop = asyncio.get_running_loop()
        self._updates: asyncio.Queue[Update | Exception] = asyncio.Queue()
        self._accepted: asyncio.Future[Request] = self._loop.create_future()
        self._request: Request | None = None
        self._sent = 0  # tokens delivered so far; used by the engine thread only

    @property
    def request(self) -> Request:
        """The engine's record of this request (its events are the acceptance log)."""
        assert self._request is not None, "the request has not been accepted by the engine yet"
        return self._request

    async def updates(self) -> AsyncIterator[Update]:
        """Yield updates up to the one with a finish reason. Raises EngineFailure."""
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
        except RuntimeError:  # the loop is closed: no task waits for this answer
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
    """Owns an engine (add_request, abort, has_work, step) and steps it in a separate thread."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[tuple[str, Ticket | None]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # makes "check _closed, then put" atomic, so that no command is lost
        self._closed = False
        self._active: dict[int, Ticket] = {}  # id(request) -> ticket; used by the engine thread only
        self._thread = threading.Thread(target=self._run, name="toolkit-engine", daemon=True)

    @property
    def alive(self) -> bool:
        """True while requests can be answered."""
        return self._thread.is_alive() and not self._closed

    @property
    def in_flight(self) -> int:
        """Number of requests in the engine, running or waiting."""
        return len(self._active)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self, timeout_s: float = 30.0) -> None:
        """End the thread after its current step; active requests fail. Wait at most `timeout_s` seconds."""
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
        """Submit a request and wait until the engine accepts it.

        Raises the errors of `add_request` (ValueError for a bad or too long prompt), EngineFailure if the engine has
        stopped."""
        ticket = Ticket(prompt_ids, params, speculative, shape)
        self._put("submit", ticket)
        try:
            await ticket._accepted
        except asyncio.CancelledError:
            self.abort(ticket)
            raise
        return ticket

    def abort(self, ticket: Ticket) -> None:
        """Abort the request if the engine still has it."""
        if self.alive:
            self._commands.put(("abort", ticket))

    def _put(self, command: str, ticket: Ticket) -> None:
        with self._lock:
            if not self.alive:
                raise EngineFailure("the engine does not run any more; see the server's log")
            self._commands.put((command, ticket))

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
        except ValueError as error:  # invalid input: a prompt that is too long, ids outside the vocabulary
            ticket._fail(error)
            return
        except Exception as error:  # process edge: report every error to the client
            logger.exception("the engine failed to take a request")
            ticket._fail(EngineFailure(f"the engine failed: {type(error).__name__}: {error}"))
            return
        self._active[id(request)] = ticket
        ticket._accept(request)

    def _step(self) -> None:
        try:
            touched = self._engine.step()
        except Exception as error:  # process edge: report every error to the waiting clients
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
        """Fail and abort all active requests after a failed step. Raises RuntimeError if the engine keeps any."""
        requests = [ticket.request for ticket in self._active.values()]
        self._fail_all(EngineFailure(f"the engine failed: {type(error).__name__}: {error}"))
        for request in reversed(requests):  # last row first, so that no half-written row moves
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
