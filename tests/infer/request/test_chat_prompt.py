"""The text of a conversation by a chat template."""

from __future__ import annotations

import copy

import pytest

from toolkit.infer.request.chat_prompt import ChatPromptError, chat_text


def test_a_template_that_loops_over_parts_gets_parts(tiny_target):
    """A text in their place left every turn empty, without a word."""
    tokenizer = copy.deepcopy(tiny_target.tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{% for c in m.content %}{{ c.text }}|{% endfor %}{% endfor %}"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    assert chat_text(tokenizer, messages) == "s|q|"
    with pytest.raises(ChatPromptError, match="not valid unicode"):
        chat_text(tokenizer, [{"role": "user", "content": "\udcff"}])
