"""The text and the token ids of a conversation, by the target's chat template.

A message is {"role", "content"}, in the form that chat templates read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.chat_rows import TEMPLATE_ERRORS, encodable, messages_for
from toolkit.jsonl import DataError
from toolkit.targets.chat_templates import has_chat_template


class ChatPromptError(ValueError):
    """The target's chat template rejects the messages."""


class NoChatTemplateError(ChatPromptError):
    """The target's tokenizer has no chat template."""


def require_chat_template(tokenizer: Any) -> None:
    """Raise NoChatTemplateError if the tokenizer has no chat template."""
    if not has_chat_template(tokenizer):
        raise NoChatTemplateError(
            "the target has no chat template; give plain texts (/v1/completions), or set `chat_template` to chatml or "
            "a file"
        )


def chat_text(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """Return the text of {"role", "content"} messages and the generation prompt, special tokens included.

    tools: in the form of chat templates; only for a template that reads them. variables: further variables of the
    template, or add_generation_prompt=False. Raises ChatPromptError if the template rejects the messages, e.g. two user
    turns in a row, and for a lone surrogate.
    """
    require_chat_template(tokenizer)
    settings = {"add_generation_prompt": True, **variables}
    # A template would write a null as "None"; transformers leaves it out too, but 5.17 did not.
    stated = [{name: value for name, value in message.items() if value is not None} for message in messages]
    try:
        shown = messages_for(tokenizer, stated)
        text = str(tokenizer.apply_chat_template(shown, tools=tools, tokenize=False, **settings))
    except TEMPLATE_ERRORS as error:
        raise ChatPromptError(f"the target's chat template refuses these messages: {error}") from error
    try:
        return encodable(text, "the text of these messages")
    except DataError as error:
        raise ChatPromptError(str(error)) from error


def chat_ids(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the ids of the same. Raises ChatPromptError."""
    return text_ids(tokenizer, chat_text(tokenizer, messages))


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text that has its special tokens."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
