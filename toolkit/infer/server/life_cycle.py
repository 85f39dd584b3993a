"""The life of a server: warming up, ready, draining; and stuck, while the engine hangs in a step.

start -> warming up -> ready <-> stuck
                         |
                      SIGTERM -> draining: answers that run go on, requests that come are a 503 -> end
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from toolkit.infer.engine.engine_thread import EngineThread, Watchdog
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.server.api_errors import ApiError
from toolkit.infer.server.server_settings import ServerSettings
from toolkit.log import get_logger

logger = get_logger(__name__)

WARM_UP_TOKENS = 16
STUCK_RETRY_S = 30
CLOSE_S = 5.0  # time for the step that runs when all requests have ended or were cut


class LifeCycle:
    """The state of one server. Only the event loop's thread uses it.

    failure: the error of the warm-up; None: there was none.
    """

    def __init__(self, engine: EngineThread, settings: ServerSettings) -> None:
        self.failure: Exception | None = None
        self._engine, self._settings = engine, settings
        self._watchdog = Watchdog(engine, settings.watchdog_timeout_s)
        self._warm = False
        self._answering = 0  # requests whose reply is not complete
        self._drain_until: float | None = None

    def start(self) -> None:
        """Start the engine's thread and its watchdog."""
        self._engine.start()
        self._watchdog.start()

    def close(self) -> None:
        """End both threads; active requests fail. A step that hangs is not waited for longer than CLOSE_S."""
        if not self._engine.close(CLOSE_S):
            logger.warning("the engine's step has not ended; the server ends without it")
        self._watchdog.close()

    @property
    def state(self) -> str:
        """The word "ready", or why no request should be sent to this server."""
        if not self._engine.alive:
            return "the engine has stopped"
        if self._drain_until is not None:
            return "draining"
        if self._watchdog.stuck:
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

    # -- requests ------------------------------------------------------------------------------------------------------

    def check_accepts(self) -> None:
        """Raise the 503 for a request that comes while the server drains or the engine hangs."""
        if self._drain_until is not None:
            after = {"Retry-After": str(1 + max(0, int(self._drain_until - time.monotonic())))}
            raise ApiError(503, "the server is shutting down; ask another one", code="shutting_down", headers=after)
        if self._watchdog.stuck:
            message = "the engine hangs in a step; the server's log says where"
            raise ApiError(503, message, code="engine_stuck", headers={"Retry-After": str(STUCK_RETRY_S)})

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request until its reply is complete."""
        self._answering += 1
        try:
            yield
        finally:
            self._answering -= 1

    # -- the end -------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Take no more requests. A second call ends those that run."""
        left = 0.0 if self._drain_until is not None else self._settings.drain_timeout_s
        self._drain_until = time.monotonic() + left

    def drained(self) -> bool:
        """Whether the server may end. At the end of the time to drain it cuts the answers that still run.

        Answers that are written do not hold it up: their clients get some seconds to read them (uvicorn's shutdown).
        """
        if self._drain_until is None or not self._answering or not self._engine.open:
            return True
        if time.monotonic() < self._drain_until:
            return False
        logger.warning("%d requests did not end in time; their answers are cut", self._answering)
        self._engine.cut_all("shutdown")
        return True
