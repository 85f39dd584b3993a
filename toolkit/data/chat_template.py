"""Render messages with the tokenizer's chat template; data/ calls the template only here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from toolkit.chat_rows import TEMPLATE_ERRORS, messages_for
from toolkit.jsonl import DataError
from toolkit.targets.chat_templates import REMEDY
from toolkit.targets.target import SENTINEL

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


_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


class LossMaskError(ChatTemplateError):
    """The response ids of a conversation cannot be located, or it has none."""


def response_mask(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, add_generation_prompt: bool = False
) -> tuple[list[int], list[bool]]:
    """Return the ids of the rendered conversation, and for each id whether it belongs to an answer.

    An answer includes its end-of-turn id, but neither the template's text after that (a newline) nor the generation
    prompt. If the template has {% generation %} tags, the mask follows them.
    Raises `LossMaskError` when the answers cannot be located or are empty. With `add_generation_prompt`, which renders
    the prompt of a further answer, the conversation may have no answers.
    """
    if _GENERATION_TAG.search(template_text(tokenizer)):
        encoded = _apply(
            tokenizer,
            messages,
            add_generation_prompt=add_generation_prompt,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids, mask = list(encoded["input_ids"]), [bool(value) for value in encoded["assistant_masks"]]
    else:
        ids, mask = _from_renderings(tokenizer, messages, add_generation_prompt)
    if not any(mask) and not add_generation_prompt:
        roles = ", ".join(message["role"] for message in messages)
        raise LossMaskError(f"no response ids in a conversation with roles [{roles}]; add an assistant message")
    return ids, mask


def spans(mask: Sequence[bool]) -> list[list[int]]:
    """Return the runs of True as [start, end) pairs."""
    padded = [False, *mask, False]
    edges = [index for index in range(len(mask) + 1) if padded[index] != padded[index + 1]]
    return [[start, end] for start, end in zip(edges[::2], edges[1::2], strict=True)]


# ChatML, one answer:   <|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n
#                       |---------------------- prompt -------------------------||-||--- tail ---|
#                                                                          answer
# Response: the ids that begin inside the answer, then the ids of the tail up to its first special id (end of turn).
def _from_renderings(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], add_generation_prompt: bool
) -> tuple[list[int], list[bool]]:
    if not tokenizer.is_fast:
        raise LossMaskError(
            f"{type(tokenizer).__name__} gives no character offsets; use a fast tokenizer (tokenizer.json), "
            "or a chat template with {% generation %} tags"
        )
    text = render_text(tokenizer, messages, add_generation_prompt=add_generation_prompt)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, starts = list(encoded["input_ids"]), _starts(encoded["offset_mapping"])
    specials = special_ids(tokenizer)
    mask = [False] * len(ids)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        probe = [*messages]
        probe[index] = {**message, "content": SENTINEL}
        around = render_text(tokenizer, probe, add_generation_prompt=add_generation_prompt)
        begin, answer_end, turn_end = _answer_characters(tokenizer, messages, index, text, around)
        tail: list[int] = []
        for at, start in enumerate(starts):
            if begin <= start < answer_end:
                mask[at] = True
            elif answer_end <= start < turn_end:
                tail.append(at)
        ended = next((place for place, at in enumerate(tail) if ids[at] in specials), None)
        for at in tail[: ended + 1] if ended is not None else ():
            mask[at] = True
    return ids, mask


def _starts(offsets: Sequence[tuple[int, int]]) -> list[int]:
    """Return the first character of each token. Byte-level offsets omit spaces: a token of spaces has length zero."""
    starts: list[int] = []
    reached = 0
    for start, end in offsets:
        starts.append(reached if start == end else start)
        reached = max(reached, end)
    return starts


def _answer_characters(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], index: int, text: str, around: str
) -> tuple[int, int, int]:
    """Return characters of `text`: the start of answer `index`, the end of its content, the latest end of its turn.

    around: the same conversation with `SENTINEL` as the answer. It shows the text before and after the content even
    when the template changes the content (trims it, removes the reasoning).
    """
    if index == 0:
        raise LossMaskError("the conversation begins with an assistant message; add a user message before it")
    content = messages[index]["content"].strip()
    before, found, after = around.partition(SENTINEL)
    end = len(text) - len(after)
    last_line = content.splitlines()[-1].strip() if content else ""
    if not found or not text.endswith(after) or not text[:end].rstrip().endswith(last_line):
        raise LossMaskError(
            f"message {index} cannot be located: {content[:40]!r} is not in the rendered conversation unchanged. "
            "The template rewrites answers; add {% generation %} tags around them in the template"
        )
    alone = render_text(tokenizer, [*messages[:index], {**messages[index], "content": SENTINEL}])
    tail = alone.partition(SENTINEL)[2]
    # Some templates end the last turn unlike earlier turns. Then only the token right after the content can end it.
    turn_end = end + (len(tail) if after.startswith(tail) else min(1, len(after)))
    return _begin(tokenizer, messages, index, text, before, end), end, turn_end


def _begin(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], index: int, text: str, before: str, end: int
) -> int:
    """Return the end of the generation prompt, since the target writes all that follows: channel headers, reasoning.

    If the template has no generation prompt, or omits it before earlier answers, return the start of the content.
    """
    prompt = render_text(tokenizer, messages[:index], add_generation_prompt=True)
    if text.startswith(prompt) and len(prompt) <= end:
        asks = prompt != render_text(tokenizer, messages[:index])
        if asks or not before[len(prompt) :].strip():
            return len(prompt)
    if text.startswith(before) and len(before) <= end:
        return len(before)
    raise LossMaskError(
        f"message {index} cannot be located: the messages before it render to text that is no prefix of the full text. "
        "The template rewrites earlier turns; add {% generation %} tags around the answers in the template"
    )
