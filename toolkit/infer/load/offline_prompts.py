"""Reads the prompts of `LLM.generate`: texts, lists of ids or conversations become ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from toolkit.infer.request.chat_prompt import ChatMessageError, ChatPromptError, chat_ids, strict_message
from toolkit.infer.request.params import EngineError

TEXT, IDS, CONVERSATION = "a text", "a list of ids", "a conversation"
NEEDED = 'a text, a list of token ids, or a conversation (a list of {"role": ..., "content": ...}) is needed'


class OfflinePromptError(EngineError):
    """A value that is not a prompt, or prompts of different kinds in one call."""


@dataclass(frozen=True)
class OfflinePrompts:
    """Prompts as ids. raw: the answers continue the prompts' text; False: each answer is a turn of a conversation."""

    ids: list[list[int]]
    raw: bool


def read_offline_prompts(prompts: Any, tokenizer: Any) -> OfflinePrompts:
    """Convert one prompt, or a list of prompts of one kind. Raises OfflinePromptError with the prompt's index."""
    listed = _as_list(prompts)
    kinds = [_kind(prompt, place) for place, prompt in enumerate(listed)]
    other = next((place for place, kind in enumerate(kinds) if kind != kinds[0]), None)
    if other is not None:
        raise OfflinePromptError(
            f"prompt 0 is {kinds[0]} and prompt {other} is {kinds[other]}; pass each kind in a call of its own"
        )
    read = {TEXT: _text_ids, IDS: _checked_ids, CONVERSATION: _conversation_ids}[kinds[0]]
    return OfflinePrompts(
        [read(prompt, place, tokenizer) for place, prompt in enumerate(listed)], kinds[0] in (TEXT, IDS)
    )


def _as_list(prompts: Any) -> Sequence[Any]:
    """The prompts as a list; a single prompt becomes a list of one. A text is never split into characters."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise OfflinePromptError(f"prompts is {_short(prompts)}; a list of prompts is needed")
    if not prompts:
        raise OfflinePromptError("the list of prompts is empty; at least one prompt is needed")
    return [prompts] if isinstance(prompts[0], Integral | Mapping) else prompts


def _kind(prompt: Any, place: int) -> str:
    if isinstance(prompt, str):
        return TEXT
    if isinstance(prompt, list | tuple) and prompt:
        if isinstance(prompt[0], Integral):
            return IDS
        if isinstance(prompt[0], Mapping):
            return CONVERSATION
    what = "is empty" if isinstance(prompt, list | tuple) and not prompt else f"is {_short(prompt)}"
    raise OfflinePromptError(f"prompt {place} {what}; {NEEDED}")


def _text_ids(prompt: str, place: int, tokenizer: Any) -> list[int]:
    ids = list(tokenizer(prompt)["input_ids"])
    if not ids:
        raise OfflinePromptError(f"prompt {place} is {prompt!r}, which has no tokens; at least one is needed")
    return ids


def _checked_ids(prompt: Sequence[Any], place: int, tokenizer: Any) -> list[int]:
    for at, token in enumerate(prompt):
        if not isinstance(token, Integral) or isinstance(token, bool):
            raise OfflinePromptError(f"prompt {place} is a list of ids, but item {at} is {_short(token)}; {NEEDED}")
    return [int(token) for token in prompt]


def _conversation_ids(prompt: Sequence[Any], place: int, tokenizer: Any) -> list[int]:
    messages = []
    for at, message in enumerate(prompt):
        where = f"prompt {place}, message {at}"
        if not isinstance(message, Mapping):
            raise OfflinePromptError(f'{where} is {_short(message)}; {{"role": ..., "content": ...}} is needed')
        try:
            messages.append(strict_message(message))
        except ChatMessageError as error:
            raise OfflinePromptError(f"{where}: {error}") from error
    try:
        return chat_ids(tokenizer, messages)
    except ChatPromptError as error:
        raise OfflinePromptError(f"prompt {place}: {error}") from error


def _short(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
