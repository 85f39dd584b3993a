"""An OpenAI-compatible HTTP server of one engine.

POST /v1/chat/completions, /v1/completions, /v1/responses, /tokenize, /detokenize; GET /v1/models, /version, /health,
/ready, /metrics, /status, and a page at /.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.middleware.trustedhost import TrustedHostMiddleware

from toolkit import __version__
from toolkit.infer.server import api_errors
from toolkit.infer.server.admission import Gate, LifeCycle
from toolkit.infer.server.completions import Completions, Served
from toolkit.infer.server.server_settings import ServerSettings

SHUTDOWN_S = 5  # time to send the ends of answers that were cut
PAGE = Path(__file__).with_name("status.html")
# The page loads nothing from elsewhere, and no other page may show it.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}


class AddressError(ValueError):
    """The server cannot listen on the given address."""


class WarmUpError(ValueError):
    """The engine failed in its first steps."""


def build_app(served: Served, settings: ServerSettings | None = None) -> FastAPI:
    """The FastAPI app. Its lifespan starts and stops the engine thread."""
    settings = settings or ServerSettings()
    server = Completions(served, settings)
    life = LifeCycle(server.engine, settings)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        server.engine.start()
        work = (life.warm_up(), life.watch(), server.metrics.watch(settings.log_interval_s))
        tasks = [asyncio.create_task(one) for one in work]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.to_thread(life.close)

    app = FastAPI(title="toolkit serve", version=__version__, lifespan=lifespan, responses=api_errors.DOCUMENTED)
    app.state.life = life
    api_errors.install(app)
    app.add_middleware(Gate, settings=settings, life=life, count_reply=server.metrics.count_reply)
    if settings.allowed_hosts:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=settings.allowed_hosts, www_redirect=False)
    if settings.allowed_origins:  # outside of the gate: a browser asks for permission without a key
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.allowed_origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    app.post("/v1/chat/completions", response_model=None)(server.chat)
    app.post("/v1/completions", response_model=None)(server.completion)
    app.post("/v1/responses", response_model=None)(server.response)
    app.post("/tokenize")(server.tokenize)
    app.post("/detokenize")(server.detokenize)
    app.get("/v1/models")(server.models)
    app.get("/v1/models/{name:path}")(server.model)
    _add_monitoring(app, server, life)
    return app


def _add_monitoring(app: FastAPI, server: Completions, life: LifeCycle) -> None:
    """Routes for operators. None shows a prompt, an answer or a key."""

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/health")
    async def health() -> Response:
        alive = server.engine.alive
        return JSONResponse({"status": "ok" if alive else "the engine has stopped"}, 200 if alive else 503)

    @app.get("/ready")
    async def ready() -> Response:
        return JSONResponse({"status": life.state}, 200 if life.state == "ready" else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(http: Request) -> Response:
        text, content_type = server.metrics.text(http.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": content_type})

    @app.get("/status")
    async def status() -> dict[str, Any]:
        return {
            "model": server.served.model_name,
            "version": __version__,
            "context_length": server.served.context_length,
            "shape": server.served.shape_name,
            "uptime_s": round(time.time() - server.created, 1),
            **server.metrics.status(time.perf_counter()),
        }

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=PAGE_HEADERS)


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. Raises AddressError if the address cannot be bound."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).partition(" (while")[0]
        raise AddressError(
            f"cannot listen on {host}:{port}: {reason}; try another host or port (0: any free one)"
        ) from error


class _Uvicorn(uvicorn.Server):
    """uvicorn that drains at SIGTERM and SIGINT, with a callback when the server is ready for requests."""

    def __init__(self, config: uvicorn.Config, life: LifeCycle, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._life, self._on_ready = life, on_ready
        self._announced = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._life.drain()  # uvicorn's own would end the process by the signal after all
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second. Returns whether to shut down."""
        if self._life.state == "ready" and not self._announced:
            self._announced = True
            self._on_ready()
        over = await super().on_tick(counter) and self._life.drained()
        return over or self._life.failure is not None


def uvicorn_config(app: FastAPI, shutdown_s: int) -> uvicorn.Config:
    """How uvicorn runs the app: without a log of accesses, which would hold the paths and times of all requests."""
    return uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=shutdown_s)


def serve_forever(app: FastAPI, listener: socket.socket, on_ready: Callable[[], None]) -> None:
    """Run until SIGINT or SIGTERM, and then until the running answers have ended (`drain_timeout_s`), or a second one.

    on_ready: called when the server is warm. Raises WarmUpError.
    """
    life: LifeCycle = app.state.life
    _Uvicorn(uvicorn_config(app, SHUTDOWN_S), life, on_ready).run(sockets=[listener])
    if life.failure is not None:
        raise WarmUpError(f"the server cannot answer: {life.failure}") from life.failure
