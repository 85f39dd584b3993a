"""The HTTP server in a thread of the test's process."""

from __future__ import annotations

import contextlib
import threading
import time

import uvicorn

from toolkit.infer.server.app import build_app, listen


@contextlib.contextmanager
def running(served):
    """A server in a thread; yields its base URL and ends it, also when a test fails."""
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(build_app(served), log_level="error", timeout_graceful_shutdown=1))
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
