"""Notices an engine that hangs in one call, such as a step, and logs where."""

from __future__ import annotations

import threading

from toolkit.infer.engine.engine_thread import EngineThread
from toolkit.log import get_logger

logger = get_logger(__name__)


class Watchdog:
    """A thread that looks at the engine's thread. `stuck` is True while a call of the engine takes over `timeout_s`.

    A call: a step, or taking or dropping a request."""

    def __init__(self, engine: EngineThread, timeout_s: float) -> None:
        self.stuck = False
        self._engine, self._timeout_s = engine, timeout_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="toolkit-watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._closing.wait(min(1.0, self._timeout_s / 4)):
            seconds = self._engine.call_seconds
            if seconds > self._timeout_s and not self.stuck:
                where, requests = self._engine.where(), self._engine.in_flight
                logger.error(
                    "a call of the engine has not ended for %.1f s, with %d requests in flight; it hangs here:\n%s",
                    seconds, requests, where,
                )  # fmt: skip
                self.stuck = True
            elif self.stuck and seconds <= self._timeout_s:
                logger.warning("the call that hung has ended; the engine goes on")
                self.stuck = False
