"""Chat messages: the one reader of a message in a row or a request, and the form in which a chat template takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from toolkit.jsonl import DataError

# Names used by ShareGPT and OpenAI files -> OpenAI's role.
ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
}
# A template is a program.
TEMPLATE_ERRORS = (
    TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
SENTINEL = "Zebra7Quartz"  # a text that templates leave as it is
_PART_ROLES: dict[str, frozenset[str]] = {}  # template -> the roles whose content it reads as parts alone


def read_message(entry: Any, where: object) -> tuple[str, str | None]:
    """Return the role, as the row names it, and the text of a message: None without any.

    Takes the keys of ShareGPT (from, value) and OpenAI (role, content); a null is as good as no key, as Arrow fills
    rows up with nulls. Several text parts are joined. Raises `DataError` that begins with `where`.
    """
    if not isinstance(entry, Mapping):
        raise DataError(f"{where}: is a {type(entry).__name__}; expected an object with role and content")
    role, content = (
        next((entry[name] for name in names if entry.get(name) is not None), None)
        for names in (("from", "role"), ("value", "content"))
    )
    if not isinstance(role, str):
        raise DataError(f"{where}: role is {short(role)}; expected a text")
    if isinstance(content, list | tuple):
        content = "".join(_part_text(part, f"{where}, content[{at}]") for at, part in enumerate(content))
    if not isinstance(content, str | None):
        raise DataError(f"{where}: content is a {type(content).__name__}; expected a string")
    return role, None if content is None else encodable(content, f"{where}: content")


def encodable(text: str, where: object) -> str:
    """Return the text. Raises `DataError` for a lone surrogate: JSON allows it, tokenizers do not."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where} is not valid unicode (a lone surrogate at character {error.start})") from error
    return text


def _part_text(part: Any, where: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise DataError(f"{where} is {short(part)}; {{'type': 'text', 'text': ...}} is needed, only text is supported")
    return str(part["text"])


def short(value: Any, most: int = 80) -> str:
    """Return a value as an error quotes it: at most `most` characters, since it may be a whole text."""
    text = repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def messages_for(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as the tokenizer's chat template reads them: with parts in place of a text where it loops over
    the content, since a text would leave its turn empty."""
    template = str(getattr(tokenizer, "chat_template", None))
    if template not in _PART_ROLES:
        _PART_ROLES[template] = _part_roles(tokenizer)
    roles = _PART_ROLES[template]
    return [
        {**one, "content": _parts(one["content"])}
        if isinstance(one.get("content"), str) and ("user" if one["role"] == "tool" else one["role"]) in roles
        else dict(one)
        for one in messages
    ]


def hides_questions(tokenizer: Any) -> bool:
    """Whether the chat template renders a user's message without its text, whatever form that has."""
    asked = messages_for(tokenizer, [{"role": "user", "content": SENTINEL}])
    return _rendered(tokenizer, asked) not in (None, "") and SENTINEL not in str(_rendered(tokenizer, asked))


def _part_roles(tokenizer: Any) -> frozenset[str]:
    found: set[str] = set()
    for role in ("user", "assistant", "system"):
        question = {"role": "user", "content": _parts("Hello") if "user" in found else "Hello"}

        def shows(content: Any, role: str = role, question: dict[str, Any] = question) -> bool:
            one = {"role": role, "content": content}
            turns = {"user": [one], "assistant": [question, one], "system": [one, question]}[role]
            return SENTINEL in str(_rendered(tokenizer, turns))

        if not shows(SENTINEL) and shows(_parts(SENTINEL)):
            found.add(role)
    return frozenset(found)


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _rendered(tokenizer: Any, messages: list[dict[str, Any]]) -> str | None:
    """The text of messages; None if the template refuses them."""
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except TEMPLATE_ERRORS:
        return None
