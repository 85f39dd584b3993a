"""Which ids of a rendered conversation the target answered with: the response mask.

From the {% generation %} tags of the chat template where it has them; else from renderings: everything up to an answer,
rendered with the generation prompt, is a prefix of the whole text, so the answer begins where it ends; and the whole
with another answer in its place has the same text after it. The whole text is tokenised once and read by character
offsets; parts are never tokenised: ids at a cut may differ.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from toolkit.data.chat_template import (
    ChatTemplateError,
    Message,
    encode_with_answers,
    render_text,
    special_ids,
    template_text,
)
from toolkit.targets.target import SENTINEL

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


class LossMaskError(ChatTemplateError):
    """The response ids of a conversation cannot be told apart, or there are none."""


def response_mask(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, add_generation_prompt: bool = False
) -> tuple[list[int], list[bool]]:
    """Ids of the rendered conversation, and per id whether it belongs to an answer.

    An answer is its own ids and the end-of-turn id after it; neither the template's text after that (a newline) nor the
    generation prompt. Where the template has {% generation %} tags, they alone decide.
    Raises `LossMaskError` when the answers cannot be located or hold no id at all. (With `add_generation_prompt`, the
    form in which a further answer is asked for, a conversation without answers is fine.)
    """
    if _GENERATION_TAG.search(template_text(tokenizer)):
        ids, mask = encode_with_answers(tokenizer, messages, add_generation_prompt=add_generation_prompt)
    else:
        ids, mask = _from_renderings(tokenizer, messages, add_generation_prompt)
    if not any(mask) and not add_generation_prompt:
        roles = ", ".join(message["role"] for message in messages)
        raise LossMaskError(f"no response ids in a conversation of roles [{roles}]; it needs an assistant's answer")
    return ids, mask


def spans(mask: Sequence[bool]) -> list[list[int]]:
    """The runs of True as [start, end) pairs."""
    padded = [False, *mask, False]
    edges = [index for index in range(len(mask) + 1) if padded[index] != padded[index + 1]]
    return [[start, end] for start, end in zip(edges[::2], edges[1::2], strict=True)]


# ChatML, one answer:   <|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n
#                       |---------------------- prompt -------------------------||-||--- tail ---|
#                                                                          answer
# Response: the ids that begin inside the answer, then those of the tail up to its first special id (end of turn).
def _from_renderings(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], add_generation_prompt: bool
) -> tuple[list[int], list[bool]]:
    if not tokenizer.is_fast:
        raise LossMaskError(
            f"{type(tokenizer).__name__} gives no character offsets; a fast tokenizer (tokenizer.json) is needed, "
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
    """First character of each token. Byte-level offsets are trimmed of spaces: a token of only spaces has none left."""
    starts: list[int] = []
    reached = 0
    for start, end in offsets:
        starts.append(reached if start == end else start)
        reached = max(reached, end)
    return starts


def _answer_characters(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], index: int, text: str, around: str
) -> tuple[int, int, int]:
    """Where answer `index` begins, where its words end, and where its turn ends at most, as characters of `text`.

    around: the same conversation with `SENTINEL` for the answer, which tells what stands before and after the words
    whatever the template does to them (trims them, takes the reasoning out).
    """
    if index == 0:
        raise LossMaskError("a conversation begins with an assistant's message; it needs a user's message before it")
    content = messages[index]["content"].strip()
    before, found, after = around.partition(SENTINEL)
    end = len(text) - len(after)
    last_line = content.splitlines()[-1].strip() if content else ""
    if not found or not text.endswith(after) or not text[:end].rstrip().endswith(last_line):
        raise LossMaskError(
            f"message {index} cannot be located: {content[:40]!r} does not stand in the rendered conversation as it "
            "is. The template rewrites answers; put {% generation %} tags around them in it"
        )
    alone = render_text(tokenizer, [*messages[:index], {**messages[index], "content": SENTINEL}])
    tail = alone.partition(SENTINEL)[2]
    # Templates that end the last turn in another way than earlier ones: only what follows the words at once can be its
    # end of turn.
    turn_end = end + (len(tail) if after.startswith(tail) else min(1, len(after)))
    return _begin(tokenizer, messages, index, text, before, end), end, turn_end


def _begin(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], index: int, text: str, before: str, end: int
) -> int:
    """Where the generation prompt ends: what follows is the target's to write, be it a channel's header or an empty
    reasoning block. Where the words begin, if the template has no such prompt or does not keep it with earlier answers.
    """
    prompt = render_text(tokenizer, messages[:index], add_generation_prompt=True)
    if text.startswith(prompt) and len(prompt) <= end:
        asks = prompt != render_text(tokenizer, messages[:index])
        if asks or not before[len(prompt) :].strip():
            return len(prompt)
    if text.startswith(before) and len(before) <= end:
        return len(before)
    raise LossMaskError(
        f"message {index} cannot be located: what comes before it renders to text that is no prefix of the whole. The "
        "template rewrites earlier turns; put {% generation %} tags around the answers in it"
    )
