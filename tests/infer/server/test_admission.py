"""How requests are let in: their places in the queue, their deadline and the size of their text, before any work."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.infer.server.test_app import NAME, USER, Scripted
from toolkit.commands.server_arguments import HOSTS, add_server_arguments, server_settings
from toolkit.infer.server.server_settings import ServerSettings

BODY = {"model": NAME, "messages": USER}


def with_long_events(scene):
    """What is served, with 4 kB in each event: the kernel's buffers of a socket hold some megabytes."""
    return dataclasses.replace(scene.served(), fingerprint="fp_x" * 1000)


@contextlib.contextmanager
def unread_stream(scene, answer=None, **fields):
    """A client that asks for a long stream and reads nothing but its status. Needs a context of 20,000.

    answer: ids. fields: of the request."""
    words, quick = scene.ids(" apples") * 12_000 if answer is None else answer, scene.engine.script
    scene.engine.script = lambda prompt: words if len(prompt) == 1 else quick(prompt)
    body = json.dumps({"model": NAME, "prompt": [5], "max_tokens": 12_000, "stream": True, **fields})
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    host, port = scene.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(20)
        client.connect((host, int(port)))
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        assert client.recv(12) == b"HTTP/1.1 200"
        yield client


@pytest.fixture
def serve(scripted, tiny_target, running):
    """serve(running, context_length, **settings): a scripted scene of so many rows behind a server."""
    with contextlib.ExitStack() as stack:

        def start(rows=4, context_length=512, **settings):
            scene = Scripted(scripted, tiny_target.tokenizer)
            scene.engine.context_length, scene.engine.max_running_requests = context_length, rows
            scene.url = stack.enter_context(running(with_long_events(scene), ServerSettings(**settings)))
            return scene

        yield start


@pytest.fixture
def background():
    """background(call): a future of the call in a thread."""
    with ThreadPoolExecutor(8) as pool:
        yield pool.submit


@pytest.fixture
def held(monkeypatch):
    """held(scene): lets the tokenizer wait at long texts. Returns (waiting, go on), two events."""
    opened = []

    def hold(scene):
        waiting, allow = threading.Event(), threading.Event()
        opened.append(allow)
        tokenise = type(scene.tokenizer).__call__

        def slow(self, text, **named):
            if len(text) > 50_000:
                waiting.set()
                allow.wait(10)
            return tokenise(self, text, **named)

        monkeypatch.setattr(type(scene.tokenizer), "__call__", slow)
        return waiting, allow

    yield hold
    for allow in opened:
        allow.set()


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_slow_reader(serve):
    """A client that does not read its stream keeps no row and no place in the queue, and gets its whole answer."""
    scene = serve(rows=1, context_length=20_000, max_queued_requests=0)
    with unread_stream(scene) as client:
        until(lambda: scene.engine.running)
        until(lambda: not scene.engine.has_work(), 40)
        until(lambda: scene.post(BODY).status_code == 200)
        received = b"".join(iter(lambda: client.recv(65536), b"")).decode()
    assert received.count(" apples") >= 12_000 // len(scene.ids(" apples")) and "[DONE]" in received


def test_a_stop_string_frees_the_row_of_a_slow_reader(serve):
    """Where an answer ends is seen when its text is read, and must not wait until the client has read all."""
    scene = serve(context_length=20_000)
    apples = scene.ids(" apples") * 1500
    answer = [*apples, *scene.ids(" pears"), *apples]
    step = scene.engine.step
    # after the stop string steps are slow: the server sees it long before the last of them
    scene.engine.step = lambda: (
        time.sleep(0.01 * any(len(r.output_ids) > len(apples) for r in scene.engine.running)),
        step(),
    )[1]
    with unread_stream(scene, answer, stop="pears"):
        until(lambda: scene.engine.running)
        until(lambda: not scene.engine.has_work(), 40)
        assert len(scene.engine.aborted) == 1 and len(scene.engine.aborted[0].output_ids) < len(answer)


def test_the_answers_of_a_request_take_their_places_together(serve, background):
    """Submitted one by one, the second of them waits for a step of the first, and is not counted meanwhile."""
    scene = serve(max_queued_requests=3)
    scene.engine.allow.clear()
    try:
        first = background(scene.post, {**BODY, "n": 4})
        until(lambda: scene.engine.waiting)
        refused = scene.post({**BODY, "n": 4, "timeout": 5})
        assert refused.status_code == 429 and "4 answers would wait" in refused.json()["error"]["message"]
    finally:
        scene.engine.allow.set()
    assert len(first.result(20).json()["choices"]) == 4


def test_places_are_kept_while_a_prompt_is_tokenised(serve, background, held):
    """Requests beyond the queue are sent away before their prompts are read; a refused prompt gives its place back."""
    scene = serve(rows=1, max_queued_requests=0)
    waiting, allow = held(scene)
    long = {"model": NAME, "prompt": "a" * 60_000}
    first = background(scene.post, long, "/v1/completions")
    assert waiting.wait(10)
    assert scene.post(BODY).status_code == 429
    allow.set()
    assert first.result(20).json()["error"]["code"] == "context_length_exceeded"
    assert scene.post(BODY).status_code == 200


def test_a_deadline_begins_when_the_request_arrives(serve, held):
    """Tokenising a long prompt, or compiling a grammar, is part of what a client waits for."""
    scene = serve(context_length=200_000)
    waiting, _ = held(scene)
    began = time.monotonic()
    reply = scene.post({"model": NAME, "prompt": "a" * 60_000, "timeout": 0.3}, "/v1/completions")
    assert waiting.is_set() and time.monotonic() - began < 8
    assert reply.status_code == 408 and reply.json()["error"]["code"] == "deadline_exceeded"
    assert not scene.engine.has_work() and scene.post(BODY).status_code == 200


# -- by which name -----------------------------------------------------------------------------------------------------


def test_a_page_of_another_name_does_not_reach_a_server_without_a_key(serve):
    """DNS rebinding: the page's own name resolves to 127.0.0.1, so that the browser lets it read the answers."""
    scene = serve(allowed_hosts=HOSTS)
    for host, status in (
        ("evil.example:8000", 400), ("localhost.evil.example", 400), ("", 400),
        ("LOCALHOST:8000", 200), ("127.0.0.1:1", 200), ("[::1]:8000", 200),
    ):  # fmt: skip
        reply = httpx.post(f"{scene.url}/v1/chat/completions", json=BODY, headers={"Host": host})
        assert reply.status_code == status, host
        assert httpx.get(f"{scene.url}/status", headers={"Host": host}).status_code == status


def test_settings_of_the_command_line(tmp_path, monkeypatch):
    """The names are checked where no key is asked for and only this machine is meant; every limit has its flag."""
    monkeypatch.delenv("TOOLKIT_API_KEY", raising=False)
    keys = tmp_path / "keys"
    keys.write_text("sk-one\n")
    keys.chmod(0o600)

    def settings(*line):
        parser = argparse.ArgumentParser()
        parser.add_argument("--host", default="127.0.0.1")
        add_server_arguments(parser.add_argument_group("server"))
        return server_settings(parser.parse_args(line))

    assert settings().allowed_hosts == settings("--host", "localhost").allowed_hosts == HOSTS
    assert settings("--host", "0.0.0.0").allowed_hosts == settings("--api-key-file", str(keys)).allowed_hosts == ()
    assert settings("--body-timeout", "5").body_timeout_s == 5
