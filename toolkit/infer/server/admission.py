"""What a request passes before the engine has it: key, size, the server's state, the queue; and its time.

client --> CORS --> host (400) --> Gate: key (401), body (413, 408), draining or stuck (503) --> places: queue (429)

start -> warming up -> ready <-> stuck: the engine hangs in a step
                         |
                      SIGTERM -> draining: answers that run go on, requests that come are a 503 -> end
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import time
from collections.abc import Callable, Iterator, Sequence

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toolkit.infer.engine.engine_thread import EngineThread
from toolkit.infer.request.params import Cause, SamplingParams
from toolkit.infer.server.api_errors import FINAL, ApiError, to_api_error
from toolkit.infer.server.server_settings import ServerSettings
from toolkit.log import get_logger

logger = get_logger(__name__)

WARM_UP_TOKENS = 16
STUCK_RETRY_S = 30
CLOSE_S = 5.0  # time for the step that runs when all requests have ended or were cut


class LifeCycle:
    """The state of one server. Only the event loop's thread uses it.

    failure: the error of the warm-up; None: there was none. stuck: a call of the engine takes longer than
    `watchdog_timeout_s`.
    """

    def __init__(self, engine: EngineThread, settings: ServerSettings) -> None:
        self.failure: Exception | None = None
        self.stuck = False
        self._engine, self._settings = engine, settings
        self._warm = False
        self._drain_until: float | None = None

    def close(self) -> None:
        """End the engine's thread; active requests fail. A step that hangs is not waited for longer than CLOSE_S."""
        if not self._engine.close(CLOSE_S):
            logger.warning("the engine's step has not ended; the server ends without it")

    @property
    def state(self) -> str:
        """The word "ready", or why no request should be sent to this server."""
        if not self._engine.alive:
            return "the engine has stopped"
        if self._drain_until is not None:
            return "draining"
        if self.stuck:
            return "the engine hangs in a step"
        return "ready" if self._warm else "warming up"

    async def warm_up(self) -> None:
        """Answer a prompt greedily and by sampling, so that no request pays for what the first steps compile."""
        prompt = self._settings.warm_up_ids
        try:
            for temperature in (0.0, 1.0) if prompt else ():
                params = SamplingParams(temperature=temperature, max_tokens=WARM_UP_TOKENS, ignore_eos=True)
                ticket = await self._engine.submit(prompt, params)
                async for _ in ticket.updates():
                    pass
                self._engine.abort(ticket)
        except Exception as error:  # whatever it is: a server that stays "warming up" says nothing to anybody
            logger.exception("the first answers failed")
            self.failure = error
        else:
            self._warm = True

    async def watch(self) -> None:
        """Look at the engine's thread again and again. The log says where it hangs, and when it goes on."""
        limit = self._settings.watchdog_timeout_s
        while True:
            await asyncio.sleep(min(1.0, limit / 4))
            seconds = self._engine.call_seconds
            if seconds > limit and not self.stuck:
                logger.error(
                    "a call of the engine has not ended for %.1f s, with %d requests in flight; it hangs here:\n%s",
                    seconds, self._engine.in_flight, self._engine.where(),
                )  # fmt: skip
            elif self.stuck and seconds <= limit:
                logger.warning("the call that hung has ended; the engine goes on")
            self.stuck = seconds > limit

    def check_accepts(self) -> None:
        """Raise the 503 for a request that comes while the server drains or the engine hangs."""
        if self._drain_until is not None:
            after = {"Retry-After": str(1 + max(0, int(self._drain_until - time.monotonic())))}
            raise ApiError(503, "the server is shutting down; ask another one", code="shutting_down", headers=after)
        if self.stuck:
            message = "the engine hangs in a step; the server's log says where"
            raise ApiError(503, message, code="engine_stuck", headers={"Retry-After": str(STUCK_RETRY_S)})

    def drain(self) -> None:
        """Take no more requests. A second call ends those that run."""
        left = 0.0 if self._drain_until is not None else self._settings.drain_timeout_s
        self._drain_until = time.monotonic() + left

    def drained(self) -> bool:
        """Whether the server may end. At the end of the time to drain it cuts the answers that still run.

        Answers that are written do not hold it up: their clients get some seconds to read them (uvicorn's shutdown).
        """
        warming = bool(self._settings.warm_up_ids) and not self._warm
        answers = self._engine.open - warming  # the warm-up is no answer to wait for
        if self._drain_until is None or answers <= 0:
            return True
        if time.monotonic() < self._drain_until:
            return False
        logger.warning("%d answers did not end in time and are cut", answers)
        self._engine.cut_all("shutdown")
        return True


OPEN_PATHS = ("/health", "/ready")  # probes of a load balancer carry no key


def check_key(keys: Sequence[str], scope: Scope) -> None:
    """Raise the 401 for a request without one of the keys, as `Authorization: Bearer KEY`. No keys: none is needed.

    A browser gets to its pages with the key as a password (the scheme Basic, with any user name).
    """
    if not keys or scope["path"] in OPEN_PATHS:
        return
    headers = Headers(scope=scope)
    given = _key_of(headers.get("authorization", ""))
    if any([hmac.compare_digest(given, key.encode()) for key in keys]):  # its time does not depend on the key
        return
    what = "is none of this server's" if given else "is missing"
    message = f"the API key {what}; send one as the header 'Authorization: Bearer KEY'"
    asks_browser = "text/html" in headers.get("accept", "")
    how = {"WWW-Authenticate": 'Basic realm="toolkit: the API key as password"' if asks_browser else "Bearer"}
    raise ApiError(401, message, code="invalid_api_key", headers=how)


def _key_of(authorization: str) -> bytes:
    """The key in a header; empty for another scheme."""
    scheme, _, given = authorization.strip().partition(" ")
    if scheme.lower() == "bearer":
        return given.strip().encode()
    try:
        return base64.b64decode(given, validate=True).partition(b":")[2] if scheme.lower() == "basic" else b""
    except ValueError:
        return b""


class Gate:
    """ASGI middleware that refuses a request, or passes it on with its whole body. count_reply: for POSTs."""

    def __init__(
        self, app: ASGIApp, *, settings: ServerSettings, life: LifeCycle, count_reply: Callable[[int], None]
    ) -> None:
        self._app, self._settings, self._life, self._count_reply = app, settings, life, count_reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def counted(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                if scope["method"] == "POST":
                    self._count_reply(message["status"])
            await send(message)

        try:
            await self._pass(scope, receive, counted)
        except ApiError as error:
            headers = {**error.headers, "Connection": "close"}  # the rest of its body is not read
            await JSONResponse(error.body, error.status, headers)(scope, receive, counted)
        except Exception as error:  # process edge: an error of the server itself
            if begun:
                raise
            logger.exception("a request failed by an error of the server")
            await JSONResponse(to_api_error(error).body, 500)(scope, receive, counted)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_key(self._settings.api_keys, scope)
        if scope["method"] == "POST":
            body = await self._body(receive)
            if body is None:
                return
            self._life.check_accepts()
            scope.setdefault("state", {})["arrived"] = time.monotonic()  # deadlines count from here
            receive = _replay(body, receive)
        await self._app(scope, receive, send)

    async def _body(self, receive: Receive) -> bytes | None:
        """Read the body; None: the client is gone. A larger one is read to its end but not kept: many clients read no
        reply before that."""
        limit = self._settings.max_body_bytes
        parts: list[bytes] = []
        size, more = 0, True
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part, more = message.get("body", b""), message.get("more_body", False)
                    size += len(part)
                    if size <= limit:
                        parts.append(part)
                    else:
                        parts.clear()
        except TimeoutError:
            if size <= limit:
                problem = f"the request was not complete after {self._settings.body_timeout_s:g} s ({size} bytes came)"
                raise ApiError(408, problem, code="request_incomplete") from None
        if size > limit:
            problem = f"the body has {size} bytes or more; this server takes {limit} (--max-body-bytes): send less"
            raise ApiError(413, problem, code="request_too_large")
        return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body first."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return left.pop() if left else await receive()

    return replayed


@contextlib.contextmanager
def places(engine: EngineThread, running: int, settings: ServerSettings, n: int, prompts: int) -> Iterator[None]:
    """Keep the places of n answers to each prompt until they are put. Raises the 400 or the 429 for too many.

    running: requests that the engine decodes at once."""
    if n > settings.max_n:
        message = f"'n' is {n}; this server writes at most {settings.max_n} answers a request (--max-n)"
        raise ApiError(400, message, param="n", code="invalid_value")
    waiting = engine.open + n * prompts - running
    if waiting > settings.max_queued_requests:
        message = f"{waiting} answers would wait, but at most {settings.max_queued_requests} may"
        message += " (--max-queued-requests); ask again later"
        raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})
    with engine.reserving(n * prompts):
        yield


class Deadline:
    """The time of a request, from its arrival. asked, limit: seconds by the request and by the server; None: it is not
    cut. arrived: seconds of time.monotonic."""

    def __init__(self, asked: float | None, limit: float | None, arrived: float) -> None:
        self._seconds = min((given for given in (asked, limit) if given is not None), default=None)
        self._own, self._arrived = asked is not None and self._seconds == asked, arrived

    @property
    def left(self) -> float | None:
        """Seconds until the end, at least 0."""
        return None if self._seconds is None else max(0.0, self._arrived + self._seconds - time.monotonic())

    def error(self, cause: Cause) -> ApiError:
        """The error of a request that was cut before its answer began."""
        if cause == "shutdown":
            return ApiError(503, "the server shut down before an answer began", code="shutting_down")
        message = f"no answer began within the {self._seconds:g} s of this request; ask for less, or give it more time"
        return ApiError(408 if self._own else 504, message, code="deadline_exceeded", headers=FINAL)
