"""The HTTP server in a thread of the test's process."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest


@contextlib.contextmanager
def running(served, settings=None):
    """A server in a thread; yields its base URL and ends it, also when a test fails. Skips the test where no web server
    is installed: the engine's own tests share this conftest and need none."""
    uvicorn = pytest.importorskip("uvicorn")
    pytest.importorskip("fastapi")
    from toolkit.infer.server.app import build_app, listen, uvicorn_config

    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn_config(build_app(served, settings), shutdown_s=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive() and time.monotonic() < deadline, "the server did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
        assert not thread.is_alive(), "the server did not end"


def until(condition, seconds=20.0):
    """Waits until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
