"""Chat templates and the response mask: on the templates of the usual families, against renderings written out by hand.

The templates are in short: turns, headers, ends and quirks, without tools and images.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from transformers import PreTrainedTokenizerFast

from toolkit.data.chat_template import (
    ChatTemplateError,
    LossMaskError,
    answer_text,
    prompt_ids,
    render_text,
    response_mask,
    spans,
)
from toolkit.data.conversations import Conversation
from toolkit.data.rollouts import write_rollouts
from toolkit.jsonl import read_rows
from toolkit.recipe import RolloutSettings


@dataclass(frozen=True)
class Family:
    """golden: the conversation below as it renders; written: what of that the target writes, answer by answer."""

    template: str
    specials: tuple[str, ...]
    golden: str
    written: tuple[str, str]


Q1, A1, Q2, A2 = (
    "How do I cook rice?",
    "Wash it, then boil it.\n\nYes — naïve 東京.",
    "Wash it, then boil it.",
    "Certainly.",
)
CONVERSATION = [
    {"role": "user", "content": Q1},
    {"role": "assistant", "content": A1},
    {"role": "user", "content": Q2},
    {"role": "assistant", "content": A2},
]
TokenizerOf = Callable[[str], PreTrainedTokenizerFast]
IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# Qwen3: reasoning is taken out of the answers before the last question; a block of it stands before the last answer.
QWEN3 = (
    "{%- set ns = namespace(last=0) %}{%- for message in messages %}{%- if message.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}{%- set content = message.content %}{%- set reasoning = '' %}"
    "{%- if '</think>' in content %}"
    "{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}{%- if loop.index0 > ns.last %}"
    "{{- '<|im_start|>assistant\n<think>\n' + reasoning + '\n</think>\n\n' + content + '<|im_end|>\n' }}{%- else %}"
    "{{- '<|im_start|>assistant\n' + content + '<|im_end|>\n' }}{%- endif %}{%- else %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# Llama 3.1: a system turn with dates, words trimmed.
LLAMA3 = (
    "{{- '<|begin_of_text|>' }}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n<|eot_id|>' }}"
    "{%- for message in messages %}{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}"
    "{{- message.content | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
# Mistral 7B v0.3: no generation prompt, a space before the words, one token that ends answers.
MISTRAL = (
    "{{ '<s>' }}{% for message in messages %}"
    "{% if message.role == 'user' %}{{ '[INST] ' + message.content + '[/INST]' }}"
    "{% else %}{{ ' ' + message.content + '</s>' }}{% endif %}{% endfor %}"
)
# DeepSeek R1: the generation prompt opens the reasoning, which answers in the conversation no longer have.
DEEPSEEK_R1 = (
    "{{ '<｜begin▁of▁sentence｜>' }}{% for message in messages %}{% if message.role == 'user' %}"
    "{{ '<｜User｜>' + message.content }}{% else %}{% set content = message.content %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)
# GPT-OSS (harmony): the target writes the channel's header too; the last answer ends with a token of its own.
HARMONY = (
    "{{- '<|start|>system<|message|>You are ChatGPT.\n\nReasoning: low<|end|>' }}{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}"
    "{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{%- else %}"
    "{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)
# Phi-3: the end of the text after the last turn, unless an answer is asked for.
PHI3 = (
    "{% for message in messages %}{{ '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"
)

# Of a model that also sees images: a text in place of parts leaves the turns empty.
PARTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_TURNS = (
    f"<|im_start|>user\n{Q1}<|im_end|>\n<|im_start|>assistant\n{A1}<|im_end|>\n"
    f"<|im_start|>user\n{Q2}<|im_end|>\n<|im_start|>assistant\n"
)
LLAMA3_HEAD = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n<|eot_id|>"
LLAMA3_USER, LLAMA3_ASSISTANT = (f"<|start_header_id|>{role}<|end_header_id|>\n\n" for role in ("user", "assistant"))
SENTENCE = "<｜end▁of▁sentence｜>"
DEEPSEEK_GOLDEN = (
    f"<｜begin▁of▁sentence｜><｜User｜>{Q1}<｜Assistant｜>{A1}{SENTENCE}<｜User｜>{Q2}<｜Assistant｜>{A2}{SENTENCE}"
)
DEEPSEEK_SPECIALS = ("<｜begin▁of▁sentence｜>", SENTENCE, "<｜User｜>", "<｜Assistant｜>")
FINAL = "<|channel|>final<|message|>"

FAMILIES = {
    "qwen3": Family(
        QWEN3, IM, f"{CHATML_TURNS}<think>\n\n</think>\n\n{A2}<|im_end|>\n",
        (f"{A1}<|im_end|>", f"<think>\n\n</think>\n\n{A2}<|im_end|>"),
    ),
    "llama3.1": Family(
        LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        f"{LLAMA3_HEAD}{LLAMA3_USER}{Q1}<|eot_id|>{LLAMA3_ASSISTANT}{A1}<|eot_id|>"
        f"{LLAMA3_USER}{Q2}<|eot_id|>{LLAMA3_ASSISTANT}{A2}<|eot_id|>",
        (f"{A1}<|eot_id|>", f"{A2}<|eot_id|>"),
    ),
    "mistral": Family(
        MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), f"<s>[INST] {Q1}[/INST] {A1}</s>[INST] {Q2}[/INST] {A2}</s>",
        (f" {A1}</s>", f" {A2}</s>"),
    ),
    "deepseek-r1": Family(DEEPSEEK_R1, DEEPSEEK_SPECIALS, DEEPSEEK_GOLDEN, (A1 + SENTENCE, A2 + SENTENCE)),
    "gpt-oss": Family(
        HARMONY,
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>"),
        "<|start|>system<|message|>You are ChatGPT.\n\nReasoning: low<|end|>"
        f"<|start|>user<|message|>{Q1}<|end|><|start|>assistant{FINAL}{A1}<|end|>"
        f"<|start|>user<|message|>{Q2}<|end|><|start|>assistant{FINAL}{A2}<|return|>",
        (f"{FINAL}{A1}<|end|>", f"{FINAL}{A2}<|return|>"),
    ),
    "phi3": Family(
        PHI3,
        ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"),
        f"<|user|>\n{Q1}<|end|>\n<|assistant|>\n{A1}<|end|>\n<|user|>\n{Q2}<|end|>\n<|assistant|>\n{A2}<|end|>\n<|endoftext|>",
        (f"{A1}<|end|>", f"{A2}<|end|>"),
    ),
    "parts": Family(
        PARTS, IM, f"{CHATML_TURNS}{A2}<|im_end|>\n", (f"{A1}<|im_end|>", f"{A2}<|im_end|>"),
    ),
}  # fmt: skip

THOUGHTS = "<think>\nThey ask twice.\n</think>\n\n"


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, build_tokenizer) -> tuple[str, PreTrainedTokenizerFast]:
    spec = FAMILIES[request.param]
    return request.param, build_tokenizer(spec.template, list(spec.specials), spec.specials[1])


def test_the_mask_marks_what_the_target_writes(family) -> None:
    """All of it, from the end of the generation prompt to the end of the turn, and nothing else: no header, no newline
    between turns, no text that the template puts at the end of a conversation."""
    name, tokenizer = family
    spec = FAMILIES[name]
    assert render_text(tokenizer, CONVERSATION) == spec.golden
    ids, mask = response_mask(tokenizer, CONVERSATION)
    assert tuple(tokenizer.decode(ids[start:end]) for start, end in spans(mask)) == spec.written
    assert tokenizer.decode(ids) == spec.golden
    # A rollout of several turns finds the first answer in its next prompt; an answer that repeats the question is found
    # by its place, not by its words.
    ids, mask = response_mask(tokenizer, CONVERSATION[:3], add_generation_prompt=True)
    assert ids == prompt_ids(tokenizer, CONVERSATION[:3])
    assert [tokenizer.decode(ids[start:end]) for start, end in spans(mask)] == [spec.written[0]]
    ids, mask = response_mask(tokenizer, [CONVERSATION[0], {"role": "assistant", "content": Q1}])
    assert [tokenizer.decode(ids[start:end]) for start, end in spans(mask)] == [spec.written[1].replace(A2, Q1)]


def test_reasoning(build_tokenizer) -> None:
    """Qwen3 and DeepSeek R1 take it out of earlier answers; what is left of them is marked. The last one keeps it in
    Qwen3's rendering, where it is the target's own."""
    conversation = [dict(message) for message in CONVERSATION]
    for at in (1, 3):
        conversation[at]["content"] = THOUGHTS + conversation[at]["content"]
    for name, last in (
        ("qwen3", f"{THOUGHTS}{A2}<|im_end|>"),
        ("deepseek-r1", "\n\n" + FAMILIES["deepseek-r1"].written[1]),
    ):
        spec = FAMILIES[name]
        tokenizer = build_tokenizer(spec.template, list(spec.specials), spec.specials[1])
        ids, mask = response_mask(tokenizer, conversation)
        first, second = (tokenizer.decode(ids[start:end]) for start, end in spans(mask))
        assert first.lstrip("\n") == spec.written[0] and second == last


ANALYSIS = "<|channel|>analysis<|message|>They ask twice.<|end|><|start|>assistant"


def test_an_answer_in_channels(build_tokenizer) -> None:
    """Otherwise the next prompt would hold the thoughts as part of the final answer, after the word "analysis"."""
    spec = FAMILIES["gpt-oss"]
    tokenizer = build_tokenizer(spec.template, list(spec.specials), spec.specials[1])
    for written, message, complete in (
        (f"{ANALYSIS}{FINAL}{A1}", A1, True),
        (f"{ANALYSIS}<|channel|>commentary<|message|>{A1}", A1, False),
        (f"{FINAL}{A1}<|start|>{A2}", A1 + A2, False),
        (A1, A1, True),
    ):
        ids = tokenizer(written, add_special_tokens=False)["input_ids"]
        assert answer_text(tokenizer, ids) == (message, complete), written


def test_rollouts_in_channels(build_tokenizer, fake_target, tmp_path) -> None:
    """The second prompt holds the first answer's last channel, as the target's template writes it, and marks it."""
    spec = FAMILIES["gpt-oss"]
    tokenizer = build_tokenizer(spec.template, list(spec.specials), "<|return|>")
    target = fake_target(tokenizer, lambda _: (f"{ANALYSIS}{FINAL}{A1}", "stop"))
    asked = Conversation("a", ({"role": "user", "content": Q1}, {"role": "user", "content": Q2}))
    out = tmp_path / "rollouts.jsonl"
    write_rollouts([asked], target, tokenizer, RolloutSettings(), out, target="t", seed=0, max_context=999)
    ((_, row),) = read_rows(out)
    first, last = (tokenizer.decode(row["input_ids"][start:end]) for start, end in row["response_spans"])
    assert first == f"{FINAL}{A1}<|end|>" and last == f"{ANALYSIS}{FINAL}{A1}<|return|>"
    assert "analysis" not in tokenizer.decode(row["input_ids"][: row["response_spans"][-1][0]])


def test_generation_tags_mark_the_answers(tokenizer_of: TokenizerOf) -> None:
    """A second BOS or another tokenisation would shift every position against serving."""
    tokenizer = tokenizer_of("chatml-tagged")
    ids, mask = response_mask(tokenizer, CONVERSATION)
    assert [tokenizer.decode(ids[start:end]) for start, end in spans(mask)] == [f"{one}<|im_end|>" for one in (A1, A2)]
    assert ids == tokenizer.apply_chat_template(CONVERSATION, tokenize=True, return_dict=True)["input_ids"]


@pytest.mark.parametrize("content", ["", "\n\nnewlines\n"])
@pytest.mark.parametrize("family", ["chatml", "llama3"])
def test_spaces_around_an_answer_keep_its_end(tokenizer_of: TokenizerOf, family: str, content: str) -> None:
    """Templates and byte-level offsets that trim spaces must not lose the end-of-turn id or include the newline."""
    tokenizer = tokenizer_of(family)
    ids, mask = response_mask(tokenizer, [CONVERSATION[0], {"role": "assistant", "content": content}])
    ((start, end),) = spans(mask)
    assert (
        tokenizer.decode(ids[start:end])
        == (content.strip() if family == "llama3" else content)
        + {"chatml": "<|im_end|>", "llama3": "<|eot_id|>"}[family]
    )


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
    for family in ("chatml", "chatml-tagged"):
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
