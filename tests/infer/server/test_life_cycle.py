"""From the first step to the last: what a load balancer is told, and what happens to requests meanwhile."""

from __future__ import annotations

import logging
import signal
import threading
import time

import httpx
import pytest

from tests.infer.running_server import until
from tests.infer.server.test_app import NAME, USER, Scripted
from toolkit.infer.server import admission
from toolkit.infer.server import app as server_app
from toolkit.infer.server.server_settings import ServerSettings

BODY = {"model": NAME, "messages": USER}
LONG = {**BODY, "max_tokens": 400}
WARM_UP = (5, 6, 7)


class Running:
    """The server as `toolkit serve` runs it, in a thread."""

    def __init__(self, scene, settings):
        self.scene, self.ready = scene, threading.Event()
        listener = server_app.listen("127.0.0.1", 0)
        scene.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        app = server_app.build_app(scene.served(), settings)
        self.server = server_app._Uvicorn(server_app.uvicorn_config(app, 2), app.state.life, self.ready.set)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]}, daemon=True)
        self.thread.start()

    def signal(self):
        self.server.handle_exit(signal.SIGTERM, None)

    def ended(self, seconds=15.0):
        self.thread.join(seconds)
        return not self.thread.is_alive()

    def state(self):
        reply = httpx.get(f"{self.scene.url}/ready")
        assert (reply.status_code == 200) == (reply.json()["status"] == "ready")
        return reply.json()["status"]

    def wait_for(self, state, seconds=10.0):
        until(lambda: self.state() == state, seconds)


@pytest.fixture
def start(scripted, tiny_target):
    """start(change, **settings): a server of a scene that `change` has prepared; it is ended after the test."""
    started = []

    def begin(change=lambda scene: None, **settings):
        scene = Scripted(scripted, tiny_target.tokenizer)
        change(scene)
        started.append(Running(scene, ServerSettings(**settings)))
        return started[-1]

    yield begin
    for served in started:
        served.scene.engine.allow.set()
        while served.thread.is_alive():
            served.signal()
            served.thread.join(0.2)


def in_background(call):
    """Runs `call` in a thread; returns a function that waits for its result."""
    results = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()

    def result():
        thread.join(20)
        return results[0]

    return result


def test_ready_when_warm(start):
    """Alive at once, ready only after the first answers, greedy and sampled: a request must not pay for them."""
    served = start(lambda scene: scene.engine.allow.clear(), warm_up_ids=WARM_UP)
    until(lambda: served.scene.engine.waiting)
    assert served.state() == "warming up" and not served.ready.is_set()
    assert httpx.get(f"{served.scene.url}/health").status_code == 200
    seen, step = [], served.scene.engine.step
    served.scene.engine.step = lambda: [seen.append(one.params.temperature) or one for one in step()]
    served.scene.engine.allow.set()
    served.wait_for("ready")
    assert served.ready.wait(5) and set(seen) == {0.0, 1.0}
    assert served.scene.ask().choices[0].message.content == served.scene.text


def test_an_engine_that_cannot_take_its_first_step_ends_the_server(scripted, tiny_target):
    """A server that is up and answers nothing but 500 would be kept by whoever watches it."""
    scene, ready = Scripted(scripted, tiny_target.tokenizer), []
    scene.engine.fail_next_step = RuntimeError("no kernel image")
    app = server_app.build_app(scene.served(), ServerSettings(warm_up_ids=WARM_UP))
    with server_app.listen("127.0.0.1", 0) as listener:
        with pytest.raises(server_app.WarmUpError, match="no kernel image"):
            server_app.serve_forever(app, listener, lambda: ready.append(True))
    assert not ready


def test_draining(start):
    """After SIGTERM the answers that run come whole, new ones are sent away with a time, and the server ends."""
    served = start(drain_timeout_s=20)
    scene = served.scene
    scene.text, scene.engine.run, scene.engine.step_seconds = "apples " * 60, 1, 0.01
    served.wait_for("ready")
    whole = in_background(lambda: scene.post(LONG))
    streamed = in_background(lambda: scene.post({**LONG, "stream": True}))
    until(lambda: len(scene.engine.running) == 2)
    served.signal()
    assert served.state() == "draining" and httpx.get(f"{scene.url}/health").status_code == 200
    refused = scene.post(BODY)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
    assert 1 <= int(refused.headers["retry-after"]) <= 21
    assert whole().json()["choices"][0]["message"]["content"] == scene.text
    assert streamed().text.rstrip().endswith("data: [DONE]") and '"finish_reason": "stop"' in streamed().text
    assert served.ended()


def test_answers_that_do_not_end_in_time_are_cut(start):
    """What was written reaches the client, with its end; what had not begun is a 503."""
    served = start(drain_timeout_s=0.3)
    scene = served.scene
    scene.text, scene.engine.run, scene.engine.step_seconds = "apples " * 400, 1, 0.01
    scene.engine.max_running_requests = 2
    served.wait_for("ready")
    whole = in_background(lambda: scene.post(LONG))
    streamed = in_background(lambda: scene.post({**LONG, "stream": True}))
    until(lambda: len(scene.engine.running) == 2)
    waiting = in_background(lambda: scene.post(LONG))
    until(lambda: scene.engine.waiting)
    served.signal()
    choice = whole().json()["choices"][0]
    assert choice["finish_reason"] == "abort" and scene.text.startswith(choice["message"]["content"])
    assert '"finish_reason": "abort"' in streamed().text and streamed().text.rstrip().endswith("data: [DONE]")
    assert waiting().status_code == 503 and waiting().json()["error"]["code"] == "shutting_down"
    assert served.ended()


def test_a_second_signal_ends_at_once(start):
    """Ctrl-C twice is how a user says that he does not want to wait."""
    served = start(drain_timeout_s=600)
    scene = served.scene
    scene.text, scene.engine.run, scene.engine.step_seconds = "apples " * 400, 1, 0.01
    served.wait_for("ready")
    reply = in_background(lambda: scene.post(LONG))
    until(lambda: scene.engine.running)
    served.signal()
    time.sleep(0.3)
    assert served.thread.is_alive()
    served.signal()
    assert reply().json()["choices"][0]["finish_reason"] == "abort" and served.ended()


def test_a_stuck_step(start, caplog, monkeypatch):
    """The log says where the engine hangs, /ready sends requests elsewhere, new ones are refused; and it goes on."""
    monkeypatch.setattr(logging.getLogger("toolkit"), "propagate", True)
    served = start(watchdog_timeout_s=0.2)
    scene = served.scene
    served.wait_for("ready")
    scene.engine.allow.clear()
    hanging = in_background(lambda: scene.post(BODY))
    served.wait_for("the engine hangs in a step")
    assert "1 requests in flight" in caplog.text and "self.allow.wait(10)" in caplog.text
    refused = scene.post(BODY)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_stuck"
    assert httpx.get(f"{scene.url}/health").status_code == 200
    scene.engine.allow.set()
    assert hanging().json()["choices"][0]["message"]["content"] == scene.text
    served.wait_for("ready")
    assert "the engine goes on" in caplog.text


def test_the_end_with_a_step_that_hangs_on(start, monkeypatch):
    """The process is gone soon after its time to drain: who sent the signal kills it otherwise."""
    monkeypatch.setattr(admission, "CLOSE_S", 0.3)
    served = start(drain_timeout_s=0.2)
    served.wait_for("ready")
    served.scene.engine.allow.clear()
    hanging = in_background(lambda: served.scene.post(BODY))
    until(lambda: served.scene.engine.waiting)
    served.signal()
    assert served.ended(5) and hanging().status_code == 503
