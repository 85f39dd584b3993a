"""Converts a conversation to token ids with the chat template of the target's tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError


class ChatPromptError(ValueError):
    """The target's chat template rejects the messages."""


class NoChatTemplateError(ChatPromptError):
    """The target's tokenizer has no chat template."""


def require_chat_template(tokenizer: Any) -> None:
    """Raise NoChatTemplateError if the tokenizer has no chat template."""
    if not tokenizer.chat_template:
        raise NoChatTemplateError(
            "the target's tokenizer has no chat template; choose an instruction-tuned target, or give raw prompts"
        )


def chat_ids(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Return the ids of {"role", "content"} messages and the generation prompt; the template adds the special tokens.

    Raises ChatPromptError if the template rejects the messages, e.g. two user turns in a row.
    """
    require_chat_template(tokenizer)
    try:
        text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        raise ChatPromptError(f"the target's chat template refuses these messages: {error}") from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
