"""Chats whose whole answer has a given form (a schema, an expression, a forced call): what goes with it, and where the
answer begins."""

from __future__ import annotations

import copy

import pytest

from toolkit.infer.server.answer_parser import Parsers
from toolkit.infer.server.api_errors import ApiError
from toolkit.infer.server.prompts import Prompts
from toolkit.infer.server.protocol import ChatRequest

USER = [{"role": "user", "content": "go"}]
ADD = {"type": "function", "function": {"name": "add"}}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


def request(**fields):
    return ChatRequest.model_validate({"model": "m", "messages": USER, **fields})


def test_tools_that_could_not_be_called():
    """The form would forbid every call, in silence; without an offer it is honoured."""
    with pytest.raises(ApiError, match="'tools'") as caught:
        ChatRequest.checked({"model": "m", "messages": USER, "tools": [ADD], "response_format": FORM})
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
