"""Who may ask a server, how much, and how long: every limit answers with its status, and frees what it refused."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.infer.running_server import until
from tests.infer.server.test_app import NAME, USER, Scripted
from toolkit.commands.serve import HOSTS, add_server_arguments, server_settings
from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.request.params import SamplingParams
from toolkit.infer.server.completions import Served
from toolkit.infer.server.server_settings import ServerSettings, ServerSettingsError, read_api_keys

BODY = {"model": NAME, "messages": USER}
SECRET, OTHER = "sk-secret-one", "sk-secret-two"


def with_long_events(scene):
    """What is served, with 4 kB in each event: the kernel's buffers of a socket hold some megabytes."""
    return dataclasses.replace(scene.served(), fingerprint="fp_x" * 1000)


@contextlib.contextmanager
def unread_stream(scene):
    """A client that asks for a long stream and reads nothing but its status. Needs a context of 20,000."""
    words, quick = scene.ids(" apples") * 12_000, scene.engine.script
    scene.engine.script = lambda prompt: words if len(prompt) == 1 else quick(prompt)
    body = json.dumps({"model": NAME, "prompt": [5], "max_tokens": 12_000, "stream": True})
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(20)
        client.connect(scene.address)
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
            host, port = scene.url.removeprefix("http://").split(":")
            scene.address = host, int(port)
            return scene

        yield start


@pytest.fixture
def background():
    """background(call): a future of the call in a thread."""
    with ThreadPoolExecutor(8) as pool:
        yield pool.submit


def error_of(response, status):
    error = response.json()["error"]
    assert response.status_code == status and set(error) == {"message", "type", "param", "code"}, response.text
    return error


def idle(engine):
    until(lambda: not engine.has_work())
    return True


def test_a_slow_reader(serve):
    """A client that does not read its stream keeps no row and no place in the queue, and gets its whole answer."""
    scene = serve(rows=1, context_length=20_000, max_queued_requests=0)
    with unread_stream(scene) as client:
        until(lambda: scene.engine.running)
        until(lambda: not scene.engine.has_work(), 40)
        until(lambda: scene.post(BODY).status_code == 200)
        received = b"".join(iter(lambda: client.recv(65536), b"")).decode()
    assert received.count(" apples") >= 12_000 // len(scene.ids(" apples")) and "[DONE]" in received


def test_the_answers_of_a_request_take_their_places_together(serve, background):
    """Submitted one by one, the second of them waits for a step of the first, and is not counted meanwhile."""
    scene = serve(max_queued_requests=3)
    scene.engine.allow.clear()
    try:
        first = background(scene.post, {**BODY, "n": 4})
        until(lambda: scene.engine.waiting)
        refused = scene.post({**BODY, "n": 4, "timeout": 5})
        assert error_of(refused, 429)["code"] == "queue_full" and refused.headers["retry-after"] == "1"
    finally:
        scene.engine.allow.set()
    assert len(first.result(20).json()["choices"]) == 4
    error = error_of(serve(max_n=2).post({**BODY, "n": 3}), 400)
    assert error["param"] == "n" and "at most 2" in error["message"]


def test_a_deadline_holds_for_every_prompt_of_a_list(serve):
    """Only the first one was cut: a list could hold its rows for hours."""
    scene = serve(rows=1)  # the second prompt waits for the first
    scene.engine.step_seconds, scene.engine.script = 0.02, lambda ids: [7] * (2 if ids == [8] else 400)
    body = {"model": NAME, "prompt": [[8], [9], [9]], "max_tokens": 400, "timeout": 0.5}
    choices = scene.post(body, "/v1/completions").json()["choices"]
    assert [one["finish_reason"] for one in choices] == ["stop", "abort", "abort"] and choices[1]["text"]
    until(lambda: not scene.engine.has_work())


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


# -- who ---------------------------------------------------------------------------------------------------------------


def test_only_a_key_of_the_server_opens_it(serve):
    """A missing, wrong, or half key is a 401; probes need none; every key of the file works."""
    scene = serve(api_keys=(SECRET, OTHER))
    for header in (None, "Bearer", f"Bearer {SECRET[:-1]}", f"Bearer {SECRET}x", f"Basic {SECRET}", SECRET):
        headers = {} if header is None else {"Authorization": header}
        for refused in (
            httpx.post(f"{scene.url}/v1/chat/completions", json=BODY, headers=headers),
            httpx.get(f"{scene.url}/metrics", headers=headers),
            httpx.get(f"{scene.url}/openapi.json", headers=headers),
        ):
            assert error_of(refused, 401)["code"] == "invalid_api_key"
            assert refused.headers["www-authenticate"] == "Bearer" and SECRET not in refused.text
    assert [httpx.get(f"{scene.url}{path}").status_code for path in ("/health", "/ready")] == [200, 200]
    for key in (SECRET, OTHER):
        client = openai.OpenAI(base_url=f"{scene.url}/v1", api_key=key, max_retries=0, timeout=20)
        assert client.chat.completions.create(**BODY).choices[0].message.content == scene.text


def test_a_browser_gets_in_with_the_key_as_password(serve):
    """It cannot send a bearer token; it asks its user when it is told to."""
    scene = serve(api_keys=(SECRET,))
    page = {"Accept": "text/html,*/*"}
    refused = httpx.get(f"{scene.url}/metrics", headers=page)
    assert refused.status_code == 401 and refused.headers["www-authenticate"].startswith("Basic realm=")
    for password, status in ((SECRET, 200), (OTHER, 401), ("", 401)):
        assert httpx.get(f"{scene.url}/metrics", headers=page, auth=("me", password)).status_code == status


def test_keys_come_from_a_file_or_the_environment(tmp_path, monkeypatch):
    """The file wins; the variable is gone afterwards, so that no child process has it; nothing prints a key."""
    path = tmp_path / "keys"
    path.write_text(f"{SECRET}\n\n  {OTHER}  \n")
    monkeypatch.setenv("TOOLKIT_API_KEY", "sk-third")
    assert read_api_keys(path) == (SECRET, OTHER) and read_api_keys(None) == ()
    monkeypatch.setenv("TOOLKIT_API_KEY", "sk-third")
    assert read_api_keys(None) == ("sk-third",)
    assert SECRET not in repr(ServerSettings(api_keys=(SECRET,)))
    for text, says in (("", "no API key"), ("\n", "no API key"), ("two words", "space"), ("schlüssel", "ASCII")):
        path.write_text(text)
        with pytest.raises(ServerSettingsError, match=says):
            read_api_keys(path)
    monkeypatch.setenv("TOOLKIT_API_KEY", " ")
    with pytest.raises(ServerSettingsError, match="no API key"):
        read_api_keys(None)


def test_no_other_web_page_may_read_answers(serve):
    """A browser blocks what has no CORS header; only named origins get one, and ask without a key."""
    asks = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    for settings, allowed in (({}, None), ({"allowed_origins": ("https://page.example",)}, "https://page.example")):
        scene = serve(api_keys=(SECRET,), **settings)
        before = httpx.options(f"{scene.url}/v1/chat/completions", headers=asks)
        headers = {"Origin": "https://page.example", "Authorization": f"Bearer {SECRET}"}
        after = httpx.get(f"{scene.url}/v1/models", headers=headers)
        for reply in (before, after):
            assert reply.headers.get("access-control-allow-origin") == allowed
        assert before.status_code == (200 if allowed else 401)


def test_logs_hold_no_prompts_and_no_keys(serve, caplog, monkeypatch):
    """Answers, refusals, failures of the engine and broken bodies: none of what users send is logged."""
    scene = serve(api_keys=(SECRET,))
    monkeypatch.setattr(logging.getLogger("toolkit"), "propagate", True)
    caplog.set_level(logging.DEBUG)
    ask = {"model": NAME, "messages": [{"role": "user", "content": "my diagnosis"}], "user": "diagnosed"}
    with httpx.Client(base_url=scene.url, headers={"Authorization": f"Bearer {SECRET}"}) as client:
        path = "/v1/chat/completions"
        assert client.post(path, json=ask).status_code == 200
        assert client.post(path, json={**ask, "temprature": "diagnosis"}).status_code == 400
        assert client.post(path, content=json.dumps(ask)[:-9].encode()).status_code == 400
        scene.engine.fail_next_step = RuntimeError("out of pages")
        assert client.post(path, json=ask).status_code == 500
    logged = [
        record.getMessage() + str(record.exc_info) for record in caplog.records if not record.name.startswith("http")
    ]
    assert any("out of pages" in line for line in logged)
    assert not [line for line in logged if "diagnos" in line or SECRET in line]


# -- how much ----------------------------------------------------------------------------------------------------------


def test_a_body_beyond_the_limit(serve):
    """50 MB without its size in the head: a 413 that the client gets to read, and no memory for it."""
    scene = serve(max_body_bytes=100_000)
    large = b"x" * 50_000_000
    content = (large[start : start + 10**6] for start in range(0, len(large), 10**6))
    reply = httpx.post(f"{scene.url}/v1/chat/completions", content=content, timeout=20)
    error = error_of(reply, 413)
    assert error["code"] == "request_too_large" and "100000" in error["message"]
    assert scene.ask().choices[0].message.content == scene.text


def test_half_a_body_is_a_408_and_takes_no_row(serve):
    """The engine hears of a request when it is complete; others are answered meanwhile."""
    scene = serve(body_timeout_s=0.3)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n"
    with socket.create_connection(scene.address, timeout=10) as client:
        client.sendall(f'{head}{{"model": "tiny", '.encode())
        assert scene.ask().choices[0].message.content == scene.text
        reply = b"".join(iter(lambda: client.recv(4096), b""))
    assert reply.startswith(b"HTTP/1.1 408") and b"request_incomplete" in reply and b"18 bytes" in reply


def test_bodies_that_no_parser_takes(serve):
    """Invalid UTF-8 and JSON of 100,000 levels are a 400, not a broken prompt or a crash."""
    scene = serve()
    for content in (json.dumps(BODY).encode().replace(b"count", b"c\xf6unt"), b"[" * 100_000):
        headers = {"Content-Type": "application/json"}
        error_of(httpx.post(f"{scene.url}/v1/chat/completions", content=content, headers=headers), 400)


def test_prompts_at_the_end_of_the_context(tiny_target, tiny_draft, running):
    """One token less than the context is answered by the one token that fits, and it is the target's; the whole context
    and one more are a 400 with both numbers. The last positions of a row, where drafts would not fit, are used."""
    engine = Engine(tiny_target, tiny_draft, DraftShape.chain(4), max_running_requests=2, context_length=48)
    plain = Engine(tiny_target, context_length=48)
    ids = [5 + at % 200 for at in range(49)]
    served = Served(NAME, tiny_target.tokenizer, engine, 48, "fp_x", "chain 4")
    with running(served) as url, httpx.Client(base_url=url, timeout=60) as client:

        def ask(prompt, **more):
            body = {"model": NAME, "prompt": prompt, "temperature": 0, "return_token_ids": True, **more}
            return client.post("/v1/completions", json=body)

        for length, most in ((47, 1), (44, 4), (40, 8)):
            choice = ask(ids[:length], max_tokens=most, ignore_eos=True).json()["choices"][0]
            wanted = plain.generate([ids[:length]], SamplingParams(max_tokens=most, ignore_eos=True))[0]
            assert (choice["token_ids"], choice["finish_reason"]) == (wanted.output_ids, "length")
        for length, most in ((47, 2), (48, 1), (49, 1)):
            error = error_of(ask(ids[:length], max_tokens=most), 400)
            assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"
            assert f"context is 48 tokens, but the prompt has {length}" in error["message"]
            assert ("max_tokens" in error["message"]) == (length < 48)  # lowering it makes no room for one token
    engine.check_integrity()
    engine.close()
    plain.close()


# -- how long ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stream", "by"), [(False, "request"), (True, "server")])
def test_an_answer_is_cut_at_its_deadline(serve, stream, by):
    """What was written until then is the answer, finish_reason says abort, and the engine is free."""
    scene = serve(**({"request_timeout_s": 0.4} if by == "server" else {"request_timeout_s": 30}))
    scene.text, scene.engine.run, scene.engine.step_seconds = "apples " * 400, 1, 0.01
    more = {"max_tokens": 400, "extra_body": {"timeout": 0.4 if by == "request" else 20}}
    if stream:
        chunks = [chunk.choices[0] for chunk in scene.ask(stream=True, **more)]
        text, reason = "".join(one.delta.content or "" for one in chunks), chunks[-1].finish_reason
    else:
        choice = scene.ask(**more).choices[0]
        text, reason = choice.message.content, choice.finish_reason
    assert reason == "abort" and text and scene.text.startswith(text) and len(text) < len(scene.text)
    assert idle(scene.engine) and len(scene.engine.aborted) == 1


def test_a_deadline_before_the_first_token(serve):
    """A step that hangs does not keep the client; the error says that asking again is no use. It is no 5xx if the
    client itself gave so little time."""
    scene = serve(request_timeout_s=0.3)
    scene.engine.allow.clear()
    try:
        waiting = scene.post({**BODY, "timeout": 0.2, "n": 2})
        streamed = scene.post({**BODY, "timeout": 0.2, "stream": True})
        of_server = scene.post({**BODY, "timeout": 20})
    finally:
        scene.engine.allow.set()
    assert error_of(waiting, 408)["code"] == "deadline_exceeded" and "0.2 s" in waiting.json()["error"]["message"]
    assert waiting.headers["x-should-retry"] == of_server.headers["x-should-retry"] == "false"
    assert "0.3 s" in error_of(of_server, 504)["message"]
    assert streamed.status_code == 408 or '"finish_reason": "abort"' in streamed.text
    assert idle(scene.engine) and scene.ask().choices[0].message.content == scene.text


def test_settings_out_of_range():
    """Named by their flags."""
    for settings, says in (
        ({"max_n": 129}, "--max-n is 129"),
        ({"watchdog_timeout_s": -1}, "--watchdog-timeout is -1"),
        ({"drain_timeout_s": float("inf")}, "--drain-timeout is inf"),
    ):
        with pytest.raises(ServerSettingsError, match=says):
            ServerSettings(**settings)


# -- requests that differ ----------------------------------------------------------------------------------------------


def test_priority_and_verify_reach_the_engine(serve, monkeypatch):
    """A field that is accepted must act."""
    scene, seen = serve(), []
    add = scene.engine.add_request
    monkeypatch.setattr(scene.engine, "add_request", lambda *a, **named: (seen.append(named), add(*a, **named))[1])
    assert scene.post({**BODY, "priority": -3, "verify": "target"}).status_code == 200
    assert (seen[0]["verify"], seen[0]["priority"]) == ("target", -3)
