"""An OpenAI-compatible HTTP server of one engine.

POST /v1/chat/completions, /v1/completions; GET /v1/models, /version, /health, /metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from toolkit import __version__
from toolkit.infer.server import api_errors
from toolkit.infer.server.completions import Completions, Served
from toolkit.infer.server.openai_protocol import ChatRequest, CompletionRequest

SHUTDOWN_S = 5  # time for running answers to finish at shutdown


class AddressError(ValueError):
    """The server cannot listen on the given address."""


def build_app(served: Served) -> FastAPI:
    """The FastAPI app. Its lifespan starts and stops the engine thread."""
    server = Completions(served)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        server.engine.start()
        yield
        await asyncio.to_thread(server.engine.close)

    app = FastAPI(title="toolkit serve", lifespan=lifespan)
    app.state.completions = server
    api_errors.install(app)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatRequest, http: Request) -> Response:
        return await server.chat(body, http)

    @app.post("/v1/completions", response_model=None)
    async def completion(body: CompletionRequest, http: Request) -> Response:
        return await server.completion(body, http)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_card(server)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        server.check_model(name)
        return _model_card(server)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/health")
    async def health() -> Response:
        alive = server.engine.alive
        return JSONResponse({"status": "ok" if alive else "the engine has stopped"}, 200 if alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(server.metrics.text(server.engine.in_flight), media_type="text/plain; version=0.0.4")

    return app


def _model_card(server: Completions) -> dict[str, Any]:
    served = server.served
    return {
        "id": served.model_name,
        "object": "model",
        "created": server.created,
        "owned_by": "toolkit",
        "max_model_len": served.context_length,
    }


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
    """uvicorn with a callback when it is ready for requests."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()


def serve_forever(app: FastAPI, listener: socket.socket, on_ready: Callable[[], None]) -> None:
    """Run until SIGINT or SIGTERM. Running answers get SHUTDOWN_S seconds to finish."""
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=SHUTDOWN_S)
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again after its shutdown
        _Uvicorn(config, on_ready).run(sockets=[listener])
