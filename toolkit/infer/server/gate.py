"""What a request passes before the endpoints see it: its key, its body's size, the server's state.

client --> CORS --> host (400) --> Gate: key (401), body (413, 408), draining or stuck (503) --> endpoints --> engine
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import time
from collections.abc import Callable, Sequence

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toolkit.infer.server.api_errors import ApiError
from toolkit.infer.server.life_cycle import LifeCycle
from toolkit.infer.server.server_settings import ServerSettings

OPEN_PATHS = ("/health", "/ready")  # probes of a load balancer carry no key


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


class ApiKeys:
    """The keys of a server. Keeps their hashes only; the time of a comparison does not depend on the key."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._hashes = [_hash(key.encode()) for key in keys]

    def check(self, scope: Scope) -> None:
        """Raise the 401 for a request without a key of this server, as `Authorization: Bearer KEY`.

        A browser gets to its pages with the key as a password (the scheme Basic, with any user name).
        """
        if not self._hashes or scope["path"] in OPEN_PATHS:
            return
        given = _key_of(_header(scope, b"authorization"))
        known = [hmac.compare_digest(_hash(given), one) for one in self._hashes]
        if any(known):
            return
        what = "is none of this server's" if given else "is missing"
        message = f"the API key {what}; send one as the header 'Authorization: Bearer KEY'"
        asks_browser = b"text/html" in _header(scope, b"accept")
        how = {"WWW-Authenticate": 'Basic realm="toolkit: the API key as password"' if asks_browser else "Bearer"}
        raise ApiError(401, message, code="invalid_api_key", headers=how)


class Gate:
    """ASGI middleware that refuses a request, or passes it on with its whole body. count_reply: for POSTs."""

    def __init__(
        self, app: ASGIApp, *, settings: ServerSettings, life: LifeCycle, count_reply: Callable[[int], None]
    ) -> None:
        self._app, self._settings, self._life, self._count_reply = app, settings, life, count_reply
        self._keys = ApiKeys(settings.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] != "POST":
            await self._pass(scope, receive, send)
            return
        begun = False

        async def counted(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                self._count_reply(message["status"])
            await send(message)

        try:
            await self._pass(scope, receive, counted)
        except Exception:  # becomes a 500 outside of this middleware
            if not begun:
                self._count_reply(500)
            raise

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._keys.check(scope)
            if scope["method"] != "POST":
                await self._app(scope, receive, send)
                return
            body = await self._body(scope, receive)
            self._life.check_accepts()
            scope.setdefault("state", {})["arrived"] = time.monotonic()  # deadlines count from here
        except ApiError as error:
            headers = {**error.headers, "Connection": "close"}  # the rest of its body is not read
            await JSONResponse(error.body, error.status, headers)(scope, receive, send)
            return
        except ClientGone:
            return
        with self._life.answering():
            await self._app(scope, _replay(body, receive), send)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """Read the body. A larger one is read to its end but not kept: many clients read no reply before that."""
        most = self._settings.max_body_bytes
        parts: list[bytes] = []
        size, more = 0, True
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    part, more = message.get("body", b""), message.get("more_body", False)
                    size += len(part)
                    if size <= most:
                        parts.append(part)
                    else:
                        parts.clear()
        except TimeoutError:
            if size <= most:
                raise ApiError(
                    408,
                    f"the request was not complete after {self._settings.body_timeout_s:g} s ({size} bytes came)",
                    code="request_incomplete",
                ) from None
        if size > most:
            problem = f"the body has {size} bytes or more; this server takes {most} (--max-body-bytes): send less"
            raise ApiError(413, problem, code="request_too_large")
        return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body first."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return left.pop() if left else await receive()

    return replayed


def _key_of(authorization: bytes) -> bytes:
    """The key in a header; empty for another scheme."""
    scheme, _, given = authorization.strip().partition(b" ")
    if scheme.lower() == b"bearer":
        return given.strip()
    if scheme.lower() != b"basic":
        return b""
    try:
        return base64.b64decode(given, validate=True).partition(b":")[2]
    except ValueError:
        return b""


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
