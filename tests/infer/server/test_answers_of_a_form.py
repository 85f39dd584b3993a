"""Chats whose whole answer has a given form (a schema, an expression, a forced call): what goes with it, and where the
answer begins."""

from __future__ import annotations

import copy

import pytest
from pydantic import ValidationError

from toolkit.infer.server.answer_parser import Parsers
from toolkit.infer.server.api_errors import ApiError, from_validation
from toolkit.infer.server.chat_prompts import ChatPrompts
from toolkit.infer.server.openai_protocol import ChatRequest
from toolkit.infer.server.responses import ResponsesRequest, chat_of

USER = [{"role": "user", "content": "go"}]
ADD = {"type": "function", "function": {"name": "add"}}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
FORMS = {"response_format": FORM, "json_schema": {"type": "object"}, "regex": "[0-9]"}


def request(**fields):
    return ChatRequest.model_validate({"model": "m", "messages": USER, **fields})


@pytest.mark.parametrize("name", FORMS)
def test_tools_that_could_not_be_called(name):
    """The form would forbid every call, in silence; without an offer it is honoured."""
    with pytest.raises(ValidationError) as caught:
        request(tools=[ADD], **{name: FORMS[name]})
    error = from_validation(caught.value.errors())
    assert error.param == name and "'tools'" in str(error) and name in str(error)
    assert request(tools=[ADD], tool_choice="none", **{name: FORMS[name]}).has_grammar
    assert request(tools=[], **{name: FORMS[name]}).has_grammar


def test_the_same_in_responses():
    """They have their own names for the fields, and the same rule."""
    tool = {"type": "function", "name": "add"}
    text = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}
    with pytest.raises(ApiError, match="'tools'"):
        chat_of(ResponsesRequest.model_validate({"model": "m", "input": "x", "tools": [tool], "text": text}))


def prompts(tiny_target, template, parsers):
    tokenizer = copy.deepcopy(tiny_target.tokenizer)
    tokenizer.chat_template = template
    return ChatPrompts(tokenizer, parsers), tokenizer


SWITCH = "{{ messages[-1].content }}:{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
THINKS, HARMONY = "{{ messages[-1].content }}:<think>{{ '\\n' }}", "{{ messages[-1].content }}<|start|>assistant"
CLOSED = "go:<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("template", "parsers", "open_prompt", "form_prompt"),
    [
        (SWITCH, Parsers(None, "qwen3"), "go:", CLOSED),
        (THINKS, Parsers(None, "qwen3"), "go:<think>\n", CLOSED),
        (THINKS, Parsers(), "go:<think>\n", "go:<think>\n"),
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
    assert tokenizer.decode(made.ids(request())) == open_prompt
    for fields in ({"regex": "[0-9]"}, {"response_format": FORM}, {"tools": [ADD], "tool_choice": "required"}):
        if parsers.calls is not None or "tools" not in fields:
            assert tokenizer.decode(made.ids(request(**fields))).endswith(form_prompt)


def test_reasoning_that_is_asked_for(tiny_target):
    """The wish is honoured where it can be, and else refused by name."""
    made, tokenizer = prompts(tiny_target, SWITCH, Parsers(None, "qwen3"))
    off, on = ({"chat_template_kwargs": {"enable_thinking": value}} for value in (False, True))
    assert tokenizer.decode(made.ids(request(**on))) == "go:"
    assert tokenizer.decode(made.ids(request(**off, regex="a"))) == CLOSED
    with pytest.raises(ApiError, match="without reasoning") as caught:
        made.ids(request(**on, regex="a"))
    assert caught.value.param == "chat_template_kwargs.enable_thinking"
