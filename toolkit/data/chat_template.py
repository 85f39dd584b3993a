"""Messages rendered by the tokenizer's own chat template; the one place where data/ calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from toolkit.jsonl import DataError

CHANNEL, MESSAGE = "<|channel|>", "<|message|>"  # harmony: channel's name between them, its text behind
Message = dict[str, str]
"""{"role": "system" | "user" | "assistant", "content": text}"""


class ChatTemplateError(DataError):
    """The tokenizer has no chat template, or the template refuses the messages."""


def template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """The Jinja source of the tokenizer's chat template."""
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        raise ChatTemplateError(
            f"{tokenizer.name_or_path or 'the tokenizer'} has no chat template to use ({str(error)[:160]}); take an "
            "instruction-tuned target, or put a chat_template.jinja beside its tokenizer"
        ) from error


def render_text(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, add_generation_prompt: bool = False
) -> str:
    """The rendered conversation as text. Raises `ChatTemplateError` with the template's own words when it refuses."""
    return _apply(tokenizer, messages, add_generation_prompt=add_generation_prompt, tokenize=False)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """The ids that a target is given to write the next answer: the conversation and the generation prompt."""
    return encode(tokenizer, render_text(tokenizer, messages, add_generation_prompt=True))


def encode(tokenizer: PreTrainedTokenizerBase, rendered: str) -> list[int]:
    """Rendered text as ids; the template has written the special tokens (BOS too), so none are added."""
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
    """Ids as the text they stand for, spaces left as they are."""
    text = tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    assert isinstance(text, str), "one sequence of ids decodes to one text"
    return text


def answer_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> tuple[str, bool]:
    """The message that an answer makes in later prompts, and whether it holds all that the answer says there.

    ids: what the target wrote, without its end. Of an answer in channels (harmony, GPT-OSS's format) it is the text of
    the last one: the template leaves the others out of later prompts, and writes the header of the `final` one itself.
    False for another last channel, and where special tokens stand within the text: the message loses them.
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
    """Ids, and which of them stand between the template's {% generation %} tags."""
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
    """Ids that no text stands for: the special tokens, and all tokens added to the vocabulary by hand."""
    return frozenset(tokenizer.all_special_ids) | frozenset(tokenizer.added_tokens_decoder)


def _apply(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **options: Any) -> Any:
    template_text(tokenizer)
    try:
        return tokenizer.apply_chat_template(list(messages), **options)
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ChatTemplateError(
            f"the chat template of {tokenizer.name_or_path or 'the tokenizer'} refuses the roles [{roles}]: {error}; "
            "give it messages in the order and roles it knows"
        ) from error
