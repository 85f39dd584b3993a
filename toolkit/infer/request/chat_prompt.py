"""Chat messages: strict checks of one message, and the token ids of a conversation by the target's chat template.

A message is {"role", "content"}, in the form that chat templates read. A known but unsupported field raises an error
that names it, unless it has a neutral value (`tool_calls`: []).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.chat_rows import TEMPLATE_ERRORS, messages_for, read_message, short
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
    turns in a row.
    """
    require_chat_template(tokenizer)
    settings = {"add_generation_prompt": True, **variables}
    # A template would write a null as "None"; transformers leaves it out too, but 5.17 did not.
    stated = [{name: value for name, value in message.items() if value is not None} for message in messages]
    try:
        shown = messages_for(tokenizer, stated)
        return str(tokenizer.apply_chat_template(shown, tools=tools, tokenize=False, **settings))
    except TEMPLATE_ERRORS as error:
        raise ChatPromptError(f"the target's chat template refuses these messages: {error}") from error


def chat_ids(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the ids of the same. Raises ChatPromptError."""
    return text_ids(tokenizer, chat_text(tokenizer, messages))


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text that has its special tokens."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


ANY = object()  # every value is neutral: the field is only a label of the request
ROLES = ("system", "developer", "user", "assistant")
# Field -> its neutral values, which change nothing; null is neutral for every field.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "name": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "tool_calls": ([],),
    "function_call": (),
    "tool_call_id": (),
    "reasoning_content": (),
}


class ChatMessageError(ValueError):
    """A mapping is not a valid chat message."""


class UnsupportedFieldError(ChatMessageError):
    """A field has a value that is not supported; `field` is its name."""

    def __init__(self, field: str, value: Any, neutral: tuple[Any, ...]) -> None:
        allowed = " or ".join(map(repr, neutral)) or "null"
        super().__init__(f"'{field}' is not supported: got {short(value)}, only {allowed} is accepted; leave it out")
        self.field = field


def without_neutral(body: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return `body` without nulls and neutral fields. Raises UnsupportedFieldError for other values of those fields."""
    kept = {}
    for name, value in body.items():
        if value is None:
            continue
        if name not in neutral:
            kept[name] = value
        elif not any(_same(value, one) for one in neutral[name]):
            raise UnsupportedFieldError(name, value, neutral[name])
    return kept


def template_message(role: str, content: str) -> dict[str, str]:
    """Return the message that chat templates read; OpenAI's role `developer` becomes `system`."""
    return {"role": "system" if role == "developer" else role, "content": content}


def strict_message(message: Mapping[str, Any]) -> dict[str, str]:
    """Return the template message of a mapping with OpenAI's fields. Raises ChatMessageError that names the field."""
    fields = without_neutral(message, NEUTRAL)
    for name in ("role", "content"):
        if name not in fields:
            raise ChatMessageError(f"the field '{name}' is missing")
    unknown = next((name for name in fields if name not in ("role", "content")), None)
    if unknown is not None:
        raise ChatMessageError(f"unknown field {short(unknown)}")
    try:
        role, content = read_message(fields, "the message")
    except DataError as error:
        raise ChatMessageError(str(error)) from error
    if role not in ROLES:
        raise ChatMessageError(f"'role' is {short(role)}; one of {', '.join(ROLES)} is needed")
    return template_message(role, content or "")


def _same(value: Any, neutral: Any) -> bool:
    """True if the values are equal, an object's nulls left out, and both or neither are bools: 0 is not False here."""
    if isinstance(value, Mapping):
        value = {name: one for name, one in value.items() if one is not None}
    return neutral is ANY or (value == neutral and isinstance(value, bool) == isinstance(neutral, bool))
