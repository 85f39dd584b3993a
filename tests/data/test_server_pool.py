"""Answers by OpenAI-compatible servers: the ids are the target's, and a server may fail in any way without harm."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from transformers import PreTrainedTokenizerFast

from toolkit.data import server_pool
from toolkit.data.conversations import Conversation
from toolkit.data.generation import NO_ROUND_TRIP, REFUSED, GenerationRequest, GenerationResult
from toolkit.data.rollouts import write_rollouts
from toolkit.data.server_pool import ServerError, open_servers, same_model, server_urls
from toolkit.jsonl import read_rows
from toolkit.recipe import RolloutSettings
from toolkit.targets.facts import ServedTarget

COUNT = 24
TEXTS = [f"Explain how a clock works, part {place}." for place in range(COUNT)]
Reply = tuple[int, dict[str, Any]]  # status, JSON


class FakeServer:
    """A server behind the client's transport. `fault(n)` replaces the reply to the n-th completion, from 0, if it is
    not None.

    `answer` gives the choice of a request's body. `asked` keeps the bodies, `keys` those of all requests. down: nobody
    can connect. delay: seconds of a reply.
    """

    def __init__(self, url: str, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.url, self.answer, self.cards = url, answer, [{"id": "tiny", "owned_by": "fake", "max_model_len": 300}]
        self.fault: Callable[[int], Reply | None] = lambda number: None
        self.die_after: int | None = None
        self.down, self.delay = False, 0.0
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str] = set()

    async def reply(self, request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(self.delay)
        if self.down:
            raise httpx.ConnectError("nobody listens", request=request)
        self.keys.add(request.headers["authorization"])
        if request.method == "GET":
            known: dict[str, Any] = {"/v1/models": {"data": self.cards}, "/version": {"version": "1.2"}}
            path = request.url.path
            return httpx.Response(200 if path in known else 404, json=known.get(path, {}))
        body, number = json.loads(request.content), len(self.asked)
        self.asked.append(body)
        if self.die_after is not None and number >= self.die_after:
            self.down = True
            raise httpx.ReadError("it ended", request=request)
        fault = self.fault(number)
        if fault is not None:
            return httpx.Response(fault[0], json=fault[1])
        choice = self.answer(body)
        count = choice.pop("count", len(choice.get("token_ids") or ()))
        reply = {"choices": [choice], "model": body["model"], "usage": {"completion_tokens": count}}
        return httpx.Response(200, json=reply)


def ids_of(tokenizer: PreTrainedTokenizerFast, request: dict[str, Any] | GenerationRequest) -> list[int]:
    """What the target writes for a prompt: it depends on the prompt alone."""
    prompt = request["prompt"] if isinstance(request, dict) else request.prompt_ids
    return tokenizer(f"It is {sum(prompt) % 97}, yes.", add_special_tokens=False)["input_ids"]


@pytest.fixture
def start(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeServer]:
    """Starts a server; by default it returns token ids, with the stop id. Rests take milliseconds."""
    started: dict[str, FakeServer] = {}

    def client(**given: Any) -> openai.AsyncOpenAI:
        transport = httpx.MockTransport(lambda request: started[request.url.host].reply(request))
        return openai.AsyncOpenAI(http_client=httpx.AsyncClient(transport=transport), **given)

    monkeypatch.setattr(server_pool, "AsyncOpenAI", client)
    monkeypatch.setattr(server_pool, "REST_S", 0.005)
    monkeypatch.setattr(server_pool, "RETRIES", 1)
    monkeypatch.setattr(openai._base_client, "INITIAL_RETRY_DELAY", 0.001)
    monkeypatch.setattr(logging.getLogger("toolkit"), "propagate", True)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def with_ids(body: dict[str, Any]) -> dict[str, Any]:
        ids = ids_of(tokenizer, body)
        return {"text": "not read", "finish_reason": "stop", "token_ids": [*ids, tokenizer.eos_token_id]}

    def call(answer: Callable[[dict[str, Any]], dict[str, Any]] = with_ids) -> FakeServer:
        host = f"server{len(started)}"
        started[host] = FakeServer(f"http://{host}", answer)
        return started[host]

    return call


@pytest.fixture
def target(tokenizer: PreTrainedTokenizerFast) -> Callable[..., ServedTarget]:
    """(servers or URLs) -> the target that they serve."""

    def call(*servers: FakeServer | str, name: str = "org/Tiny", **more: Any) -> ServedTarget:
        urls = tuple(one if isinstance(one, str) else one.url for one in servers)
        facts: Any = SimpleNamespace(name=name)
        return ServedTarget(facts, tokenizer, frozenset([tokenizer.eos_token_id]), 500, urls, **more)

    return call


@pytest.fixture
def requests(tokenizer: PreTrainedTokenizerFast) -> list[GenerationRequest]:
    return [
        GenerationRequest(tokenizer(text, add_special_tokens=False)["input_ids"], 0.7, 0.9, 32, seed)
        for seed, text in enumerate(TEXTS)
    ]


@pytest.fixture
def expected(tokenizer: PreTrainedTokenizerFast, requests: list[GenerationRequest]) -> list[list[int]]:
    return [[*ids_of(tokenizer, one), tokenizer.eos_token_id] for one in requests]


def answers(target: ServedTarget, requests: list[GenerationRequest], per_server: int = 4) -> list[GenerationResult]:
    with open_servers(target, per_server) as pool:
        return [result for _, result in sorted(pool.generate(requests), key=lambda one: one[0])]


PROMPTS = [Conversation(f"c{at}", ({"role": "user", "content": text},)) for at, text in enumerate(TEXTS)]


@pytest.fixture
def write(target, tokenizer, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """(servers) -> the statistics of the rollouts that they add to r.jsonl."""

    def call(*servers: FakeServer, given: Any = PROMPTS, per_server: int = 4, name: str = "r.jsonl") -> dict[str, Any]:
        settings, own = RolloutSettings(max_tokens=20, held_out=0.1), target(*servers)
        with open_servers(own, per_server) as pool:
            return write_rollouts(
                given, pool.generate, tokenizer, settings, tmp_path / name, target="t", seed=0, max_context=300
            )

    return call


def test_token_ids_are_taken_as_they_are(start, target, requests, expected, monkeypatch) -> None:
    """The request must name the target's sampling in full: what is left out, servers fill in by themselves."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    server = start()
    results = answers(target(server), requests)
    assert [one.output_ids for one in results] == expected
    assert {one.finish_reason for one in results} == {"stop"}
    assert results[0].by_server == {"server": {"model": "tiny", "engine": "fake", "version": "1.2"}}
    body = next(one for one in server.asked if one["seed"] == 3)
    assert body == {
        "model": "tiny", "prompt": requests[3].prompt_ids, "max_tokens": 32, "temperature": 0.7, "top_p": 0.9,
        "seed": 3, "stop_token_ids": [expected[0][-1]], "return_token_ids": True, "top_k": -1, "min_p": 0.0,
        "repetition_penalty": 1.0,
    }  # fmt: skip
    assert server.keys == {"Bearer secret"}


def test_a_cut_answer(start, target, requests, tokenizer) -> None:
    """As the engine says: "length" without a stop id, and "stop" where the last id that fits is one."""
    ends = {0: [5, 6], 1: [5, tokenizer.eos_token_id]}
    server = start(lambda body: {"text": "", "finish_reason": "length", "token_ids": ends[body["seed"]]})
    results = answers(target(server), requests[:2])
    assert [(one.output_ids, one.finish_reason) for one in results] == [(ends[0], "length"), (ends[1], "stop")]
    server.answer = lambda body: {"text": "", "finish_reason": "stop", "token_ids": [5, 6]}
    other = answers(target(server), requests[:1])[0]
    assert (other.output_ids, other.finish_reason) == ([], NO_ROUND_TRIP), "it ended where the target does not"


def test_text_is_tokenised_where_no_ids_come(start, target, requests, expected, tokenizer) -> None:
    """Ids that the target did not write would be trained on as if it had: those are counted, and left out."""

    def text_alone(body: dict[str, Any]) -> dict[str, Any]:
        ids = ids_of(tokenizer, body)
        reason = "length" if body["seed"] == 2 else "stop"
        odd = {
            4: {"count": len(ids) + 2},  # the target wrote the same text with other ids
            5: {"text": " part"},  # it merges with the prompt's end
        }
        count = len(ids) + (reason == "stop")
        return {"text": tokenizer.decode(ids), "finish_reason": reason, "count": count} | odd.get(body["seed"], {})

    requests[5] = GenerationRequest(tokenizer(" how do", add_special_tokens=False)["input_ids"][:-1], 0, 1, 9, 5)
    server = start(text_alone)
    results = answers(target(server), requests)
    left_out = {place for place, one in enumerate(results) if one.finish_reason == NO_ROUND_TRIP}
    assert 4 in left_out and left_out <= {4, 5}
    assert results[2].output_ids == expected[2][:-1] and results[2].finish_reason == "length"
    assert all(one.output_ids == expected[at] for at, one in enumerate(results) if at not in left_out | {2})


def test_left_out_answers_are_counted(start, write, tokenizer, tmp_path: Path) -> None:
    """In the statistics. They alone are asked for again, so that a server that returns token ids fills the gaps."""
    whole = len(tokenizer("Yes.", add_special_tokens=False)["input_ids"]) + 1
    server = start(lambda body: {"text": "Yes.", "finish_reason": "stop", "count": whole + sum(body["prompt"]) % 2})
    stats = write(server)
    left_out = {row["id"] for _, row in read_rows(tmp_path / "r_skipped.jsonl")}
    assert 0 < stats["skipped"][NO_ROUND_TRIP] == COUNT - stats["rollouts"] == len(left_out) < COUNT
    row = next(read_rows(tmp_path / "r.jsonl"))[1]
    assert row["provenance"]["server"] == {"model": "tiny", "engine": "fake", "version": "1.2"}
    assert write(server) == stats and len(server.asked) == COUNT + len(left_out)
    assert {row["id"] for _, row in read_rows(tmp_path / "r_skipped.jsonl")} == left_out
    with_ids = start()
    stats = write(with_ids)
    assert (stats["rollouts"], stats["skipped"]) == (COUNT, {}) and len(with_ids.asked) == len(left_out)
    assert not list(read_rows(tmp_path / "r_skipped.jsonl"))


def test_errors_that_pass(start, target, requests, expected) -> None:
    """A busy server, a proxy's 502, an answer that a shutdown cut: the same request is asked again."""
    server, steady = start(), start()
    steady.delay = 0.02
    aborted = {"choices": [{"finish_reason": "abort", "token_ids": []}]}
    faults: list[Reply] = [(429, {}), (500, {"error": "out of memory"}), (200, aborted), (502, {})]
    server.fault = lambda number: faults[number // 2] if number % 2 == 0 and number < 2 * len(faults) else None
    assert [one.output_ids for one in answers(target(server, steady), requests, 2)] == expected
    assert len(server.asked) + len(steady.asked) == COUNT + len(faults)


def test_a_server_that_was_down_joins(start, target, requests, expected) -> None:
    """Rollouts begin while a machine still loads the model."""
    first, second = start(), start()
    first.delay, second.down = 0.005, True
    answer = first.answer

    def later(body: dict[str, Any]) -> dict[str, Any]:
        second.down = False
        return answer(body)

    first.answer = later
    assert [one.output_ids for one in answers(target(first, second), requests, 1)] == expected
    assert second.asked, "it was not asked again"


def test_all_servers_die_and_the_run_goes_on_later(start, write, tmp_path: Path) -> None:
    """An error that says what each server said. What is answered is kept: the second run asks for the rest alone."""

    def rows(name: str) -> dict[str, Any]:
        return {row["id"]: row for _, row in read_rows(tmp_path / name)}

    dying, failing, healthy = start(), start(), start()
    dying.die_after, failing.fault = 9, lambda number: (500, {"detail": "no memory"}) if number > 3 else None
    with pytest.raises(ServerError, match="(?s)no server answers any more.*what was answered is kept") as caught:
        write(dying, failing, per_server=2)
    assert f"{failing.url}/v1: status 500" in str(caught.value) and "no memory" in str(caught.value)
    assert f"{dying.url}/v1: " in str(caught.value)
    kept = len(rows("r.jsonl"))
    assert kept == 9 + 4
    write(healthy)
    write(start(), name="whole.jsonl")
    assert rows("r.jsonl") == rows("whole.jsonl")
    assert len(healthy.asked) == COUNT - kept


def test_another_model(start, target, requests, expected) -> None:
    """Both are named. The name of the target on the server may be given."""
    server = start()
    server.cards = [{"id": "org/other"}, {"id": "lora"}]
    with pytest.raises(ServerError, match="serves 'org/other', 'lora', but the target is 'org/Tiny'; .*server_model"):
        answers(target(server), [])
    with pytest.raises(ServerError, match="but rollouts.server_model is 'mine'"):
        answers(target(server, served_model="mine"), [])
    assert [one.output_ids for one in answers(target(server, served_model="lora"), requests)] == expected
    assert {body["model"] for body in server.asked} == {"lora"}


def test_what_tells_that_a_model_is_the_target(tmp_path: Path) -> None:
    """The same last part under another organisation or folder may be another model, and its answers others."""
    for name in ("org/tiny", "tiny.gguf", "tiny"):
        assert same_model("org/Tiny", name)
    for name in ("other/tiny", "/models/tiny", "org/tiny-2", None):
        assert not same_model("org/Tiny", name)
    (tmp_path / "a" / "tiny").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert same_model(str(tmp_path / "a" / "tiny"), f"{tmp_path}/link/tiny/")


def test_another_model_after_a_restart(start, target, requests) -> None:
    """SGLang and llama.cpp answer whatever model a request names, so it is looked up after a failure."""
    server, steady = start(), start()
    steady.delay = 0.01

    def restart(number: int) -> Reply | None:
        if number == 3:
            server.cards = [{"id": "other"}]
        return (503, {}) if number in (3, 4) else None

    server.fault = restart
    with pytest.raises(ServerError, match="serves 'other', but the target is 'org/Tiny'"):
        answers(target(server, steady), requests, 1)


@pytest.mark.parametrize(
    "reply, told",
    [
        ((401, {}), "set OPENAI_API_KEY"),
        ((200, {"choices": []}), "answers in another form"),
        ((200, {"choices": [{"finish_reason": "stop", "token_ids": [1]}], "model": "b"}), "'b' answered"),
    ],
)
def test_refusals_end_the_run(start, target, requests, reply: Reply, told: str) -> None:
    """Another try would end in the same way."""
    server = start()
    server.fault = lambda number: reply
    with pytest.raises(ServerError, match=told):
        answers(target(server), requests)
    assert len(server.asked) <= 4


def test_a_prompt_that_is_too_long_for_a_server_is_skipped(start, write, tmp_path, caplog) -> None:
    """Its card states no context length. Even if the first request is refused, the others are answered."""
    server, refused = start(), (0, 5)
    server.cards = [{"id": "tiny"}]
    given = list(PROMPTS)
    for at in refused:
        given[at] = Conversation(f"c{at}", ({"role": "user", "content": "clock " * 60},))
    too_long: Reply = (400, {"error": {"message": "exceeds the available context size"}})
    server.fault = lambda number: too_long if len(server.asked[number]["prompt"]) > 59 else None

    stats = write(server, given=given, per_server=1)
    assert stats["skipped"] == {REFUSED: 2} and stats["rollouts"] == COUNT - 2
    rows = [row for _, row in read_rows(tmp_path / "r_skipped.jsonl")]
    assert [row["id"] for row in rows] == ["c0", "c5"] and all(row["prompt_tokens"] > 59 for row in rows)
    assert len(server.asked) == COUNT and caplog.text.count("exceeds the available context size") == 1
    assert write(start(), given=given)["skipped"] == {}, "a server with more room is not asked"


def test_urls(tmp_path: Path) -> None:
    """URLs with and without /v1, and files of them; anything else is told."""
    listed = tmp_path / "servers.txt"
    listed.write_text("\ufeff# the first rack\nhttp://a:1/v1/\n\nhttps://b\n")
    assert server_urls(["http://c", str(listed), "http://a:1"]) == ["http://c/v1", "http://a:1/v1", "https://b/v1"]
    with pytest.raises(ServerError, match="'localhost:8000' is neither a URL nor a file"):
        server_urls(["localhost:8000"])
    listed.write_text("#\n")
    with pytest.raises(ServerError, match="is neither a URL"):
        server_urls([str(listed)])
