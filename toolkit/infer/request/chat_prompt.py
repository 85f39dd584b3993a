"""A conversation as the ids that the target reads, by its tokenizer's own chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError


class ChatPromptError(ValueError):
    """The target's chat template refuses the messages."""


class NoChatTemplateError(ChatPromptError):
    """The target's tokenizer has no chat template."""


def require_chat_template(tokenizer: Any) -> None:
    """Raises NoChatTemplateError."""
    if not tokenizer.chat_template:
        raise NoChatTemplateError(
            "the target's tokenizer has no chat template; choose an instruction-tuned target, or give raw prompts"
        )


def chat_ids(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Ids of {"role", "content"} messages and the beginning of the next answer; the template writes the special tokens.

    Raises ChatPromptError: templates refuse what their model was not trained on, e.g. two user turns.
    """
    require_chat_template(tokenizer)
    try:
        text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        raise ChatPromptError(f"the target's chat template refuses these messages: {error}") from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
