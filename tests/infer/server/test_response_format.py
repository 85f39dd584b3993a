"""Structured output over HTTP: the client's `.parse`, raw schemas and regular expressions, with a real engine."""

from __future__ import annotations

import json
import re
import threading
from enum import StrEnum
from typing import Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from toolkit.infer.engine.engine import Engine
from toolkit.infer.request import grammar
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.server.completions import Served
from toolkit.infer.server.request_params import DefaultSampling

USER = [{"role": "user", "content": "count apples"}]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"]}
SCHEMA["additionalProperties"] = False


class Kind(StrEnum):
    FOX = "fox"
    DOG = "dog"


class Part(BaseModel):
    kind: Kind
    size: int = Field(ge=1, le=20)


class Report(BaseModel):
    """With a nested model, an enum, an optional value and a literal, as the client's users write them."""

    title: str = Field(max_length=5)
    parts: list[Part] = Field(max_length=2)
    note: Literal["none"] | None
    done: bool


@pytest.fixture(scope="module")
def url(tiny_target, tiny_draft, running):
    engine = Engine(tiny_target, tiny_draft, DraftShape.parse("3,3,10"))
    served = Served("tiny", tiny_target.tokenizer, engine, engine.context_length, "fp_x", "tree", DefaultSampling())
    with running(served) as address:
        yield address


@pytest.fixture
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def ask(client, **fields):
    return client.chat.completions.create(**{"model": "tiny", "messages": USER, "max_tokens": 200, **fields})


@pytest.mark.parametrize("temperature", [0, 1])
def test_parse_returns_the_model(client, tiny_target, temperature):
    """What pydantic's schemas use ($defs, $ref, anyOf, enum, const, bounds) is enforced, so the client's parser accepts
    the answer; drafts stay on."""
    texts = {token: tiny_target.tokenizer.decode([token]) for token in range(tiny_target.vocab_size)}
    bias = {str(token): -100 for token, text in texts.items() if text and not text.strip()}
    answer = client.chat.completions.parse(
        model="tiny", messages=USER, max_tokens=400, temperature=temperature, logit_bias=bias, response_format=Report
    )
    report = answer.choices[0].message.parsed
    assert isinstance(report, Report) and answer.choices[0].finish_reason == "stop"
    details = answer.usage.completion_tokens_details
    assert answer.usage.speculative["shape"] == "tree"
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 0


def test_a_raw_schema_streamed_and_whole(client):
    """One grammar for both forms, and for each of several answers."""
    asked = {"type": "json_schema", "json_schema": {"name": "count", "schema": SCHEMA, "strict": True}}
    whole = ask(client, response_format=asked, temperature=0, n=2)
    chunks = ask(client, response_format=asked, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert [choice.message.content for choice in whole.choices] == [text, text]
    assert 0 <= json.loads(text)["n"] <= 99


def test_sglangs_fields(client, url):
    """`regex` and `json_schema` (a text or an object) on both endpoints."""
    pattern = r"(fox|dog){1,3} [0-9]{2}"
    chat = ask(client, extra_body={"regex": pattern}).choices[0].message.content
    raw = client.completions.create(model="tiny", prompt="the", max_tokens=40, extra_body={"regex": pattern})
    assert re.fullmatch(pattern, chat) and re.fullmatch(pattern, raw.choices[0].text)
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        raw = client.completions.create(model="tiny", prompt="the", max_tokens=60, extra_body={"json_schema": schema})
        assert 0 <= json.loads(raw.choices[0].text)["n"] <= 99


def named(schema, **more):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}, **more}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (named({"not": {}}), "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "strict": True}}, "response_format.strict"),
        ({"regex": "["}, "regex"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": "{}", "regex": "a"}, "regex"),
        ({"json_schema": "{}", **named({})}, "json_schema"),
        ({"regex": "a+", "stop": ["aa"]}, "stop"),
    ],
)
def test_what_cannot_be_honoured_is_a_400_that_says_so(url, fields, param):
    """A schema that were enforced in part would break the client's parser later, far from its cause."""
    reply = httpx.post(f"{url}/v1/chat/completions", json={"model": "tiny", "messages": USER, **fields}, timeout=60)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_a_grammar_that_fails_is_an_error_of_its_request(client, monkeypatch):
    """An answer that were cut there would look complete. It is the request's own fault: asking again is no use."""
    monkeypatch.setitem(grammar.LIMITS, "max_items_in_row", 3)
    schema = {"type": "array", "items": {"type": ["integer", "array", "object", "string"]}}
    with pytest.raises(openai.BadRequestError, match="the grammar failed") as refused:
        ask(client, extra_body={"json_schema": schema})
    assert refused.value.code == "grammar_failed" and refused.value.response.headers["x-should-retry"] == "false"
    with pytest.raises(openai.APIError, match="the grammar failed"):
        list(ask(client, extra_body={"json_schema": schema}, stream=True))
    assert ask(client, max_tokens=3).usage.completion_tokens > 0


def test_compiling_keeps_no_request_waiting(url, monkeypatch):
    """A schema may take long to compile: the engine's thread finds it compiled."""

    threads = []
    real = grammar.Grammars._compile
    monkeypatch.setattr(
        grammar.Grammars, "_compile", lambda *one: (threads.append(threading.current_thread().name), real(*one))[1]
    )
    body = {"model": "tiny", "messages": USER, "regex": "fox{7}", "max_tokens": 20}
    assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code == 200
    assert len(threads) == 1 and threads[0] != "toolkit-engine"
