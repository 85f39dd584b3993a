"""Chat messages: strict checks of one message, and the token ids of a conversation by the target's chat template.

A message is {"role", "content"}, in the form that chat templates read. A known but unsupported field raises an error
that names it, unless it has a neutral value (`tool_calls`: []).
"""

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


ANY = object()  # every value is neutral: the field is only a label of the request
ROLES = ("system", "developer", "user", "assistant")
# Field -> its neutral values, which change nothing; null is neutral for every field.
MESSAGE_NEUTRAL: dict[str, tuple[Any, ...]] = {
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
        super().__init__(f"'{field}' is not supported: got {value!r}, only {allowed} is accepted; leave it out")
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


def read_message(message: Mapping[str, Any]) -> dict[str, str]:
    """Return the template message of a mapping with OpenAI's fields. Raises ChatMessageError that names the field."""
    fields = without_neutral(message, MESSAGE_NEUTRAL)
    for name in ("role", "content"):
        if name not in fields:
            raise ChatMessageError(f"the field '{name}' is missing")
    unknown = next((name for name in fields if name not in ("role", "content")), None)
    if unknown is not None:
        raise ChatMessageError(f"unknown field '{unknown}'")
    role, content = fields["role"], fields["content"]
    if role not in ROLES:
        raise ChatMessageError(f"'role' is {role!r}; one of {', '.join(ROLES)} is needed")
    if isinstance(content, list):
        content = "".join(_part_text(part, f"content[{at}]") for at, part in enumerate(content))
    if not isinstance(content, str):
        raise ChatMessageError(f"'content' is {content!r}; a text or a list of text parts is needed")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise ChatMessageError("'content' is not valid unicode (a lone surrogate)") from error
    return template_message(role, content)


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, Mapping) and part.keys() == {"type", "text"} and part["type"] == "text":
        if isinstance(part["text"], str):
            return part["text"]
    raise ChatMessageError(f"'{where}' is {part!r}; {{'type': 'text', 'text': ...}} is needed")


def _same(value: Any, neutral: Any) -> bool:
    """True if the values are equal and both or neither are bools: 0 is not False here."""
    return neutral is ANY or (value == neutral and isinstance(value, bool) == isinstance(neutral, bool))
