"""Calls that a client asks for: a real engine with drafts, whose grammar makes every answer a call."""

from __future__ import annotations

import copy

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from toolkit.infer.engine.engine import Engine
from toolkit.infer.request.draft_tree import DraftShape
from toolkit.infer.server.answer_parser import Parsers
from toolkit.infer.server.completions import Served
from toolkit.infer.server.request_params import DefaultSampling

USER = [{"role": "user", "content": "count apples"}]


class Box(BaseModel):
    size: int = Field(ge=1, le=9)


class Pack(BaseModel):
    """With a nested model: its schema has $defs and $ref."""

    boxes: list[Box] = Field(min_length=1, max_length=2)


class Stop(BaseModel):
    now: bool


MODELS = {"pack": Pack, "stop": Stop}


TEMPLATE = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{{ messages[-1].content }}:"


@pytest.fixture(scope="module")
def url(tiny_target, tiny_draft, running):
    engine = Engine(tiny_target, tiny_draft, DraftShape.parse("3,3,10"))
    limit, parsers = engine.context_length, Parsers("hermes", "deepseek-r1")
    tokenizer = copy.deepcopy(tiny_target.tokenizer)
    tokenizer.chat_template = TEMPLATE  # short: the tiny target's context is 512 tokens
    served = Served("tiny", tokenizer, engine, limit, "fp", "tree", DefaultSampling(), parsers=parsers)
    with running(served) as address:
        yield address


@pytest.fixture
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def fields(tiny_target):
    """Of every request: without blanks, of which a random model writes too many."""
    texts = {token: tiny_target.tokenizer.decode([token]) for token in range(tiny_target.vocab_size)}
    bias = {str(token): -100 for token, text in texts.items() if text and not text.strip()}
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


def test_a_schema_is_not_reasoning(client, fields):
    """An answer with a grammar of its own is content, also where the family's answers begin with reasoning."""
    extra = {"regex": "[0-9]{3}"}
    plain = {name: value for name, value in fields.items() if name != "tools"}
    message = client.chat.completions.create(**plain, extra_body=extra).choices[0].message
    assert len(message.content) == 3 and message.content.isdigit()


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"regex": "a"}, "regex"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]}, "tools"),
    ],
)
def test_what_does_not_go_together(url, fields, more, param):
    """Two grammars for one answer, and a schema that cannot be enforced, are refused by name."""
    body = {**fields, "tool_choice": "required", **more}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=20)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
