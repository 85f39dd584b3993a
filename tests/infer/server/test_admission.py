"""How requests are let in: their places in the queue, their deadline and the size of their text, before any work."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from tests.infer.server.test_app import NAME, USER, Scripted
from toolkit.commands.server_arguments import HOSTS, add_server_arguments, server_settings
from toolkit.infer.server.admission import PromptLimit
from toolkit.infer.server.api_errors import ApiError
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
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    host, port = scene.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(20)
        client.connect((host, int(port)))
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        assert client.recv(12) == b"HTTP/1.1 200"
        yield


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


def test_a_slow_reader_does_not_fill_the_queue(serve):
    """Its answer is written: an idle engine must not send others away until it is read."""
    scene = serve(rows=1, context_length=20_000, max_queued_requests=0)
    with unread_stream(scene):
        until(lambda: scene.engine.running)
        until(lambda: not scene.engine.has_work(), 40)
        time.sleep(0.1)
        assert scene.post(BODY).status_code == 200


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
    scene.engine.context_length = 512
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptLimit, "check", lambda *_: None)
        first = background(scene.post, long, "/v1/completions")
        assert waiting.wait(10)
        assert scene.post(BODY).status_code == 429
        allow.set()
        assert first.result(20).json()["error"]["code"] == "context_length_exceeded"
    assert scene.post(BODY).status_code == 200


def test_a_deadline_begins_when_the_request_arrives(serve, held, monkeypatch):
    """Tokenising a long prompt, or compiling a grammar, is part of what a client waits for."""
    scene = serve(context_length=200_000)
    monkeypatch.setattr(PromptLimit, "check", lambda *_: None)
    waiting, _ = held(scene)
    began = time.monotonic()
    reply = scene.post({"model": NAME, "prompt": "a" * 60_000, "timeout": 0.3}, "/v1/completions")
    assert waiting.is_set() and time.monotonic() - began < 8
    assert reply.status_code == 408 and reply.json()["error"]["code"] == "deadline_exceeded"
    assert not scene.engine.has_work() and scene.post(BODY).status_code == 200


def test_a_deadline_holds_for_every_prompt_of_a_list(serve):
    """Only the first one was cut: a list could hold its rows for hours."""
    scene = serve(rows=1)  # the second prompt waits for the first
    scene.engine.step_seconds, scene.engine.script = 0.02, lambda ids: [7] * (2 if ids == [8] else 400)
    body = {"model": NAME, "prompt": [[8], [9], [9]], "max_tokens": 400, "timeout": 0.5}
    choices = scene.post(body, "/v1/completions").json()["choices"]
    assert [one["finish_reason"] for one in choices] == ["stop", "abort", "abort"] and choices[1]["text"]
    until(lambda: not scene.engine.has_work())


# -- the size of a text ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bytewise():
    """bytewise(normalizer): a byte-level tokenizer of 400 tokens."""

    def build(normalizer=None, alphabet=True):
        tokenizer = Tokenizer(BPE())
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        known = pre_tokenizers.ByteLevel.alphabet() if alphabet else []
        texts = ["the quick brown fox jumps over the lazy dog    " * 3, "漢字とかな ångström é"]
        tokenizer.train_from_iterator(texts, BpeTrainer(vocab_size=400, initial_alphabet=known, show_progress=False))
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer)

    return build


@pytest.mark.parametrize("form", [None, "NFC"])
def test_no_text_that_fits_is_refused_by_its_size(bytewise, form):
    """The bound holds for any text: a refused one has more tokens than the context."""
    tokenizer = bytewise(None if form is None else normalizers.NFC())
    chance, words = (
        random.Random(1),
        ["the", " quick brown fox", "    ", "漢字とかな", "é", "\u212b", "ι\u0308\u0301", "\0"],
    )
    refused = 0
    for context in (4, 16):
        limit = PromptLimit(tokenizer, context)
        for length in range(1, 200, 3):
            text = "".join(chance.choice(words[: 1 + length % len(words)]) for _ in range(length))
            try:
                limit.check(text, None, "prompt")
            except ApiError as error:
                refused += 1
                tokens = len(tokenizer(text)["input_ids"])
                assert tokens > context and error.code == "context_length_exceeded", text
                assert int(str(error).partition("at least ")[2].split()[0]) <= tokens
    assert refused > 20


def test_tokenizers_without_a_bound(bytewise, small_target):
    """One that drops characters, or has one token for any word, may fit any text into a context."""
    for tokenizer in (small_target.tokenizer, bytewise(alphabet=False), bytewise(normalizers.Strip()), object()):
        limit = PromptLimit(tokenizer, 4)
        assert limit.most_bytes is None
        limit.check("x" * 10_000, None, "prompt")


def test_a_text_beyond_any_context_is_not_tokenised(serve, monkeypatch):
    """Seconds of work for a prompt that is refused anyway, on every way in."""
    scene, seen = serve(), []
    assert PromptLimit(scene.tokenizer, 512).most_bytes is not None
    tokenise = type(scene.tokenizer).__call__
    monkeypatch.setattr(
        type(scene.tokenizer), "__call__", lambda self, text, **more: (seen.append(len(text)), tokenise(self, text))[1]
    )
    text = "apples " * 40_000
    prompt, chat = {"prompt": text}, {"messages": [{"role": "user", "content": text}]}
    for path, body, param in (
        ("/v1/chat/completions", chat, "messages"), ("/v1/completions", prompt, "prompt"),
        ("/tokenize", chat, "messages"), ("/tokenize", prompt, "prompt"),
    ):  # fmt: skip
        reply = scene.post({"model": NAME, **body}, path)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
        assert "at least" in error["message"]
    assert not [size for size in seen if size > 100_000]


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
