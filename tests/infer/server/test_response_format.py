"""Answers of a given form, with a real engine: `.parse` of the client, schemas, regular expressions, forced calls."""

from __future__ import annotations

import copy
import json
import re
from enum import StrEnum
from typing import Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from toolkit.infer.engine.engine import Engine
from toolkit.infer.request import grammar
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.server.answer_parser import Parsers
from toolkit.infer.server.api_errors import ApiError
from toolkit.infer.server.completions import Served
from toolkit.infer.server.prompts import Prompts
from toolkit.infer.server.protocol import ChatRequest

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


class Pack(BaseModel):
    """With a nested model: its schema has $defs and $ref."""

    parts: list[Part] = Field(min_length=1, max_length=2)


class Stop(BaseModel):
    now: bool


MODELS = {"pack": Pack, "stop": Stop}
TEMPLATE = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{{ messages[-1].content }}:"


@pytest.fixture(scope="module")
def url(tiny_target, tiny_draft, running):
    engine = Engine(tiny_target, tiny_draft, DraftShape.parse("3,3,10"))
    tokenizer = copy.deepcopy(tiny_target.tokenizer)
    tokenizer.chat_template = TEMPLATE  # short: the tiny target's context is 512 tokens
    parsers = Parsers("hermes", "deepseek-r1")
    limit = engine.context_length
    served = Served("tiny", tokenizer, engine, limit, "fp_x", "tree", parsers=parsers)
    with running(served) as address:
        yield address


@pytest.fixture(scope="module")
def bias(tiny_target):
    """Against blanks, of which a random model writes too many."""
    texts = {token: tiny_target.tokenizer.decode([token]) for token in range(tiny_target.vocab_size)}
    return {str(token): -100 for token, text in texts.items() if text and not text.strip()}


@pytest.fixture
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def ask(client, **fields):
    return client.chat.completions.create(**{"model": "tiny", "messages": USER, "max_tokens": 200, "seed": 0, **fields})


@pytest.mark.parametrize("temperature", [0, 1])
def test_parse_returns_the_model(client, bias, temperature):
    """What pydantic's schemas use ($defs, $ref, anyOf, enum, const, bounds) is enforced, so the client's parser accepts
    the answer; drafts stay on."""
    answer = client.chat.completions.parse(
        model="tiny", messages=USER, max_tokens=400, temperature=temperature, logit_bias=bias, response_format=Report
    )
    report = answer.choices[0].message.parsed
    assert isinstance(report, Report) and answer.choices[0].finish_reason == "stop"
    details = answer.usage.completion_tokens_details
    assert answer.usage.speculative["shape"] == "tree"
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 0


def test_sglangs_fields(client, url):
    """`regex` and `json_schema` (a text or an object) on both endpoints."""
    pattern = r"(fox|dog){1,3} [0-9]{2}"
    chat = ask(client, extra_body={"regex": pattern}).choices[0].message.content
    raw = client.completions.create(model="tiny", prompt="the", max_tokens=40, seed=0, extra_body={"regex": pattern})
    assert re.fullmatch(pattern, chat) and re.fullmatch(pattern, raw.choices[0].text)
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        raw = client.completions.create(
            model="tiny", prompt="the", max_tokens=300, seed=0, extra_body={"json_schema": schema}
        )
        assert 0 <= json.loads(raw.choices[0].text)["n"] <= 99


def named(schema, **more):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}, **more}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (named({"not": {}}), "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
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


# -- forced calls ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fields(bias):
    tools = [openai.pydantic_function_tool(model, name=name) for name, model in MODELS.items()]
    return {"model": "tiny", "messages": USER, "tools": tools, "logit_bias": bias, "temperature": 1, "seed": 3}


def check(calls):
    assert calls
    for call in calls:
        MODELS[call.function.name].model_validate_json(call.function.arguments)


def test_required(client, fields):
    """Every call is one of the functions, with arguments that its schema accepts; streamed the same. What the target
    would have reasoned about is no part of it."""
    choice = client.chat.completions.create(**fields, tool_choice="required", parallel_tool_calls=False).choices[0]
    check(choice.message.tool_calls)
    assert choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 1 and not choice.message.content
    streamed = ""
    for chunk in client.chat.completions.create(
        **fields, tool_choice="required", parallel_tool_calls=False, stream=True
    ):
        for delta in chunk.choices[0].delta.tool_calls or ():
            streamed += delta.function.arguments
    assert streamed == choice.message.tool_calls[0].function.arguments


def test_a_named_function(client, fields):
    """One call of this function, in chats and in responses."""
    name = "pack"
    choice = {"type": "function", "function": {"name": name}}
    answer = client.chat.completions.create(**fields, tool_choice=choice).choices[0]
    check(answer.message.tool_calls)
    assert [call.function.name for call in answer.message.tool_calls] == [name]
    functions = [{"type": "function", **tool["function"]} for tool in fields["tools"]]
    response = client.responses.create(
        model="tiny",
        input="count apples",
        tools=functions,
        tool_choice={"type": "function", "name": name},
        temperature=0,
    )
    assert response.status == "incomplete" or [item.name for item in response.output] == [name]
    assert all(item.type == "function_call" for item in response.output)


# -- what goes with a form, and where the answer begins ----------------------------------------------------------------

GO = [{"role": "user", "content": "go"}]
ADD = {"type": "function", "function": {"name": "add"}}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


def request(**fields):
    return ChatRequest.model_validate({"model": "m", "messages": GO, **fields})


def test_tools_that_could_not_be_called():
    """The form would forbid every call, in silence; without an offer it is honoured."""
    with pytest.raises(ApiError, match="'tools'") as caught:
        ChatRequest.checked({"model": "m", "messages": GO, "tools": [ADD], "response_format": FORM})
    assert caught.value.param == "response_format"
    assert request(tools=[ADD], tool_choice="none", response_format=FORM).has_grammar


def prompts(tiny_target, template, parsers):
    tokenizer = copy.deepcopy(tiny_target.tokenizer)
    tokenizer.chat_template = template
    return Prompts(tokenizer, parsers), tokenizer


SWITCH = "{{ messages[-1].content }}:{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
THINKS, HARMONY = "{{ messages[-1].content }}:<think>{{ '\\n' }}", "{{ messages[-1].content }}<|start|>assistant"
CLOSED = "go:<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("template", "parsers", "open_prompt", "form_prompt"),
    [
        (SWITCH, Parsers(None, "qwen3"), "go:", CLOSED),
        (THINKS, Parsers(None, "qwen3"), "go:<think>\n", CLOSED),
        (
            HARMONY,
            Parsers("gpt-oss", "gpt-oss"),
            "go<|start|>assistant",
            "go<|start|>assistant<|channel|>final<|message|>",
        ),
    ],
)
def test_no_form_within_the_reasoning(tiny_target, template, parsers, open_prompt, form_prompt):
    """JSON written inside of an open block would be the model's reasoning, or stand in a header."""
    made, tokenizer = prompts(tiny_target, template, parsers)
    assert tokenizer.decode(made.of_chat(request())) == open_prompt
    for fields in ({"regex": "[0-9]"}, {"response_format": FORM}, {"tools": [ADD], "tool_choice": "required"}):
        if parsers.calls is not None or "tools" not in fields:
            assert tokenizer.decode(made.of_chat(request(**fields))).endswith(form_prompt)


def test_reasoning_that_is_asked_for(tiny_target):
    """The wish is honoured where it can be, and else refused by name."""
    made, tokenizer = prompts(tiny_target, SWITCH, Parsers(None, "qwen3"))
    off, on = ({"chat_template_kwargs": {"enable_thinking": value}} for value in (False, True))
    assert tokenizer.decode(made.of_chat(request(**on))) == "go:"
    assert tokenizer.decode(made.of_chat(request(**off, regex="a"))) == CLOSED
    with pytest.raises(ApiError, match="without reasoning") as caught:
        made.of_chat(request(**on, regex="a"))
    assert caught.value.param == "chat_template_kwargs.enable_thinking"
