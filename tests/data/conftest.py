"""Tokenizers trained in the test, with the chat templates of three families, and a fake target that writes by rule."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from toolkit.data.generation import GenerationRequest, GenerationResult

TEXT = [
    "Tell me about the river, please. How do I cook rice? Yes, certainly: wash it, then boil it.",
    "user assistant system model Write a short story about a cat. The cat sat on the mat.\n\nWhy is the sky blue?",
    "You are a helpful assistant. What is two plus two? It is four. Explain how a clock works.\n",
]

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_TAGGED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ '<bos>' }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
FAMILIES = {
    "chatml": (CHATML, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "<|im_end|>"),
    "chatml-tagged": (CHATML_TAGGED, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "<|im_end|>"),
    "llama3": (LLAMA3, ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], "<|eot_id|>"),
    "gemma": (GEMMA, ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], "<end_of_turn>"),
}


def build(family: str) -> PreTrainedTokenizerFast:
    return trained(*FAMILIES[family])


def trained(template: str, specials: list[str], end_of_turn: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with these special tokens and this template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end_of_turn, additional_special_tokens=specials
    )
    fast.chat_template = template
    return fast


@pytest.fixture(scope="session")
def tokenizer_of() -> Callable[[str], PreTrainedTokenizerFast]:
    """family -> its tokenizer, trained once; treat it as read-only."""
    built = {family: build(family) for family in FAMILIES}
    return built.__getitem__


@pytest.fixture(scope="session")
def build_tokenizer() -> Callable[[str, list[str], str], PreTrainedTokenizerFast]:
    """(template, special tokens, end of turn) -> a tokenizer."""
    return trained


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """A ChatML tokenizer of this test alone, free to be changed."""
    return build("chatml")


class FakeTarget:
    """A `generate` of eight requests at once whose output depends on the request alone; it ends them out of order, and
    can die half-way.

    `answer(request)` gives (text, finish_reason); the end-of-turn id follows a "stop". `calls` keeps all requests,
    `sizes` how many ran as each ended.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        answer: Callable[[GenerationRequest], tuple[str, str]],
        die_after: int | None = None,
    ) -> None:
        self.tokenizer, self.answer, self.die_after = tokenizer, answer, die_after
        self.calls: list[GenerationRequest] = []
        self.sizes: list[int] = []

    def __call__(self, requests: Iterable[GenerationRequest]) -> Iterator[tuple[int, GenerationResult]]:
        waiting, draw = enumerate(requests), random.Random(0)
        running: list[tuple[int, GenerationRequest]] = []
        while True:
            running += islice(waiting, 8 - len(running))
            if not running:
                return
            if self.die_after is not None and len(self.calls) >= self.die_after:
                raise KeyboardInterrupt
            self.sizes.append(len(running))
            index, request = running.pop(draw.randrange(len(running)))
            self.calls.append(request)
            text, reason = self.answer(request)
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"][: request.max_tokens]
            yield index, GenerationResult(ids + [self.tokenizer.eos_token_id] * (reason == "stop"), reason, "head")


@pytest.fixture
def fake_target() -> type[FakeTarget]:
    """The class of fake targets."""
    return FakeTarget
