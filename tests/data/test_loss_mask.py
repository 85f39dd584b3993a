"""The response mask marks exactly what the target wrote, on the templates of three families."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from transformers import PreTrainedTokenizerFast

from toolkit.data.chat_template import ChatTemplateError, prompt_ids
from toolkit.data.loss_mask import LossMaskError, response_mask, spans

TokenizerOf = Callable[[str], PreTrainedTokenizerFast]
ENDS = {"chatml": "<|im_end|>", "chatml-tagged": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>"}
CONVERSATION = [
    {"role": "user", "content": "How do I cook rice? assistant\n"},
    {"role": "assistant", "content": "Wash it, then boil it.\n\nYes — naïve 東京."},
    {"role": "user", "content": "Wash it, then boil it."},
    {"role": "assistant", "content": "Certainly."},
]


@pytest.mark.parametrize("family", ENDS)
def test_marked_text_is_the_answers_with_their_end_of_turn(tokenizer_of: TokenizerOf, family: str) -> None:
    """A newline, a header or the user's words in the mask would train the head on what the target never writes."""
    tokenizer = tokenizer_of(family)
    ids, mask = response_mask(tokenizer, CONVERSATION)
    written = [tokenizer.decode(ids[start:end]) for start, end in spans(mask)]
    assert written == [CONVERSATION[1]["content"] + ENDS[family], "Certainly." + ENDS[family]]


@pytest.mark.parametrize("family", ENDS)
def test_ids_are_those_of_the_template_itself(tokenizer_of: TokenizerOf, family: str) -> None:
    """A second BOS or another tokenisation would shift every position against serving."""
    tokenizer = tokenizer_of(family)
    ids, _ = response_mask(tokenizer, CONVERSATION)
    assert ids == tokenizer.apply_chat_template(CONVERSATION, tokenize=True, return_dict=True)["input_ids"]


@pytest.mark.parametrize("family", ENDS)
def test_generation_prompt_is_no_response(tokenizer_of: TokenizerOf, family: str) -> None:
    """In the prompt of the next answer, earlier answers are marked and the generation prompt is not."""
    tokenizer = tokenizer_of(family)
    ids, mask = response_mask(tokenizer, CONVERSATION[:3], add_generation_prompt=True)
    assert ids == prompt_ids(tokenizer, CONVERSATION[:3])
    assert len(spans(mask)) == 1 and not mask[-1]
    assert response_mask(tokenizer, CONVERSATION[:1], add_generation_prompt=True)[1].count(True) == 0


@pytest.mark.parametrize("content", ["", "   ", "  two spaces around  ", "\n\nnewlines\n"])
@pytest.mark.parametrize("family", ["chatml", "llama3"])
def test_spaces_around_an_answer_keep_its_end(tokenizer_of: TokenizerOf, family: str, content: str) -> None:
    """Templates and byte-level offsets that trim spaces must not lose the end-of-turn id or include the newline."""
    tokenizer = tokenizer_of(family)
    ids, mask = response_mask(tokenizer, [CONVERSATION[0], {"role": "assistant", "content": content}])
    ((start, end),) = spans(mask)
    assert tokenizer.decode(ids[start:end]) == (content.strip() if family == "llama3" else content) + ENDS[family]


def test_default_system_prompt_is_no_obstacle(tokenizer_of: TokenizerOf) -> None:
    """SmolLM2's template adds a system turn when the messages have none, and keeps a given one."""
    tokenizer = tokenizer_of("chatml")
    system = {"role": "system", "content": "Yes."}
    ids, mask = response_mask(tokenizer, [system, *CONVERSATION[:2]])
    assert len(spans(mask)) == 1 and "helpful" not in tokenizer.decode(ids)
    assert "helpful" in tokenizer.decode(response_mask(tokenizer, CONVERSATION[:2])[0])


def test_template_without_end_of_turn_marks_the_words_only(tokenizer: PreTrainedTokenizerFast) -> None:
    """With no special id after an answer, the newline and the next speaker's name stay outside."""
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    ids, mask = response_mask(tokenizer, CONVERSATION)
    written = [tokenizer.decode(ids[start:end]).strip() for start, end in spans(mask)]
    assert written == [CONVERSATION[1]["content"], "Certainly."]


@pytest.mark.parametrize(
    "template, message",
    [
        ("{% for m in messages %}{{ m['role'] + messages | length | string }}{% endfor %}", "rewrites answers"),
        ("{% for m in messages %}{{ m['role'] + ':' + m['content'] | upper }}{% endfor %}"
         "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}", "rewrites answers"),
    ],
)  # fmt: skip
def test_unlocatable_answers_are_an_error(tokenizer: PreTrainedTokenizerFast, template: str, message: str) -> None:
    """If a template rewrites earlier turns, the mask must not be guessed."""
    tokenizer.chat_template = template
    with pytest.raises(LossMaskError, match=message):
        response_mask(tokenizer, CONVERSATION)


def test_conversations_without_answers_are_an_error(tokenizer_of: TokenizerOf) -> None:
    """Without supervised ids the training would silently learn nothing."""
    for family in ENDS:
        with pytest.raises(LossMaskError, match="no response ids"):
            response_mask(tokenizer_of(family), CONVERSATION[:1])
    with pytest.raises(LossMaskError, match="begins with an assistant message; add a user message"):
        response_mask(tokenizer_of("chatml"), CONVERSATION[1:])


def test_template_errors_hold_the_message_of_the_template(
    tokenizer_of: TokenizerOf, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Users must correct a rejected role or a missing template, so the error must name them."""
    with pytest.raises(ChatTemplateError, match="System role not supported"):
        response_mask(tokenizer_of("gemma"), [{"role": "system", "content": "x"}, *CONVERSATION])
    tokenizer.chat_template = None
    with pytest.raises(ChatTemplateError, match="no usable chat template"):
        response_mask(tokenizer, CONVERSATION)
