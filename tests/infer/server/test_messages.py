"""Messages of text over HTTP and messages of Python callers are read alike. Python callers have no tools."""

from __future__ import annotations

import copy

import pytest
from pydantic import ValidationError

from toolkit.infer.request.chat_prompt import ChatMessageError, chat_text, strict_message
from toolkit.infer.server.protocol import ChatMessage


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ({"role": "user", "content": "hi"}, {"role": "user", "content": "hi"}),
        ({"role": "developer", "content": "brief"}, {"role": "system", "content": "brief"}),
        ({"role": "assistant", "content": "a", "tool_calls": [], "name": None}, {"role": "assistant", "content": "a"}),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "ab"},
        ),
        ({"role": "user"}, None),
        ({"role": "user", "content": "x", "name": "Bob"}, None),
        ({"role": "user", "content": [{"type": "text", "text": "\ud800"}]}, None),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, None),
    ],
)
def test_both_readers_agree(message, wanted):
    """Another rule in one of them would give one conversation two prompts, or answer what the other refuses."""
    if wanted is None:
        with pytest.raises(ChatMessageError):
            strict_message(message)
        with pytest.raises(ValidationError):
            ChatMessage.model_validate(message)
    else:
        assert strict_message(message) == ChatMessage.model_validate(message).for_template() == wanted


def test_a_template_that_loops_over_parts_gets_parts(tiny_target):
    """A text in their place left every turn empty, without a word."""
    tokenizer = copy.deepcopy(tiny_target.tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{% for c in m.content %}{{ c.text }}|{% endfor %}{% endfor %}"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    assert chat_text(tokenizer, messages) == "s|q|"
