"""Render messages with the tokenizer's chat template; data/ calls the template only here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from toolkit.chat_rows import TEMPLATE_ERRORS, messages_for
from toolkit.jsonl import DataError
from toolkit.targets.chat_templates import REMEDY

CHANNEL, MESSAGE = "<|channel|>", "<|message|>"  # harmony: <|channel|>name<|message|>text
Message = dict[str, str]
"""{"role": "system" | "user" | "assistant", "content": text}"""


class ChatTemplateError(DataError):
    """The tokenizer has no chat template, or the template rejects the messages."""


def template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the Jinja source of the tokenizer's chat template. Raises `ChatTemplateError` when there is none."""
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        raise ChatTemplateError(f"the target has no usable chat template; {REMEDY}") from error


def render_text(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, add_generation_prompt: bool = False
) -> str:
    """Render the conversation as text. Raises `ChatTemplateError` with the template's message when it rejects it."""
    return _apply(tokenizer, messages, add_generation_prompt=add_generation_prompt, tokenize=False)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Return the prompt ids for the next answer: the conversation and the generation prompt."""
    return encode(tokenizer, render_text(tokenizer, messages, add_generation_prompt=True))


def encode(tokenizer: PreTrainedTokenizerBase, rendered: str) -> list[int]:
    """Tokenize rendered text. No special tokens are added: the template has written them, BOS included."""
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
    """Decode ids to text without cleaning up spaces."""
    text = tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    assert isinstance(text, str), "one sequence of ids decodes to one text"
    return text


def answer_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> tuple[str, bool]:
    """Return the message text of an answer in later prompts, and whether that text is complete.

    ids: the answer without its stop id. For an answer in channels (harmony, the format of GPT-OSS) the text is that of
    the last channel: the template drops the others from later prompts and writes the header of `final` itself.
    The text is incomplete when the last channel is not `final`, or when it contains special tokens, which are dropped.
    """
    ids, final = list(ids), True
    added = tokenizer.get_added_vocab()
    if CHANNEL in added and added.get(MESSAGE) in ids:
        start = len(ids) - ids[::-1].index(added[MESSAGE])
        header = ids[:start]
        opened = len(header) - header[::-1].index(added[CHANNEL]) if added[CHANNEL] in header else 0
        final = decode(tokenizer, header[opened:], skip_special_tokens=True).strip() == "final"
        ids = ids[start:]
    text = decode(tokenizer, ids, skip_special_tokens=True)
    return text, final and text == decode(tokenizer, ids)


def encode_with_answers(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, add_generation_prompt: bool
) -> tuple[list[int], list[bool]]:
    """Return the rendered ids, and for each whether it is between the template's {% generation %} tags."""
    encoded = _apply(
        tokenizer,
        messages,
        add_generation_prompt=add_generation_prompt,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return list(encoded["input_ids"]), [bool(value) for value in encoded["assistant_masks"]]


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of special tokens and of all tokens that were added to the vocabulary."""
    return frozenset(tokenizer.all_special_ids) | frozenset(tokenizer.added_tokens_decoder)


def _apply(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **options: Any) -> Any:
    template_text(tokenizer)
    try:
        return tokenizer.apply_chat_template(messages_for(tokenizer, messages), **options)
    except TEMPLATE_ERRORS as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ChatTemplateError(
            f"the chat template of {tokenizer.name_or_path or 'the tokenizer'} rejects the roles [{roles}]: {error}; "
            "use the roles and the order that the template supports"
        ) from error
