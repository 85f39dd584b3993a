"""Synthesized prompts depend only on the settings, not on batches, the order of finishing, or kills."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from toolkit.data.chat_template import ChatTemplateError
from toolkit.data.conversations import read_conversations
from toolkit.data.generation import GenerationRequest, derived_seed
from toolkit.data.synthesis import rejection, synthesise_prompts, user_turn_prefix_ids, words_of
from toolkit.jsonl import DataError, read_rows
from toolkit.recipe import PromptSettings

SETTINGS = PromptSettings(synthesize=30, max_tokens=60)
NUMBER_OF = {derived_seed(1, "prompt", number): number for number in range(400)}


def turn(request: GenerationRequest) -> tuple[str, str]:
    """The text of an attempt by its number: of ten, five are usable, and the others fail in different ways."""
    number = NUMBER_OF[request.seed]
    special = {
        1: (f"Tell me about river {number}", "length"),
        3: ("What is two plus two?", "stop"),
        5: ("Hi", "stop"),
        7: (f"assistant\nYes, certainly {number}", "stop"),
        9: (f"Tell me <|im_start|> about cat {number}", "stop"),
    }
    return special.get(number % 10, (f"Write a story about cat number {number}", "stop"))


Synthesise = Callable[..., dict[str, Any]]


@pytest.fixture
def synthesise(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Synthesise:
    """synthesise_prompts with this file's defaults into tmp_path/prompts.jsonl."""

    def call(generate: Any, settings: Any = SETTINGS, **more: Any) -> dict[str, Any]:
        given = {"target": "tiny", "seed": 1} | more
        return synthesise_prompts(generate, tokenizer, settings, tmp_path / "prompts.jsonl", **given)

    return call


@pytest.mark.parametrize(
    "family, end",
    [
        ("chatml", "<|im_start|>user\n"),
        ("llama3", "<|start_header_id|>user<|end_header_id|>\n\n"),
    ],
)
def test_prefix_ends_where_the_user_begins(
    tokenizer_of: Callable[[str], PreTrainedTokenizerFast], family: str, end: str
) -> None:
    """With one id too many or too few, the target would not write a user turn."""
    tokenizer = tokenizer_of(family)
    prefix = user_turn_prefix_ids(tokenizer)
    assert tokenizer.decode(prefix).endswith(end)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=True, return_dict=True)
    assert rendered["input_ids"][: len(prefix)] == prefix


def test_accepted_are_the_first_good_attempts(
    tokenizer: PreTrainedTokenizerFast, fake_target: Any, synthesise: Synthesise, tmp_path: Path
) -> None:
    """In the order of their numbers, each rejection counted, each with its provenance, deduplicated."""
    target = fake_target(tokenizer, turn)
    stats = synthesise(target)
    prompts = read_conversations(tmp_path / "prompts.jsonl")
    numbers = [number for number in range(100) if number % 2 == 0 or number == 3][:30]
    assert [one.id for one in prompts] == [f"synth-{number:06d}" for number in numbers]
    assert prompts[2].messages[0]["content"] == "What is two plus two?" and len(prompts[2].messages) == 1
    assert stats["accepted"] == 30 and stats["attempts"] == numbers[-1] + 1
    assert stats["rejected"] == {
        "duplicate": 5, "role_name": 5, "special_token": 5, "too_short": 6, "unfinished": 6,
    }  # fmt: skip
    assert stats == json.loads((tmp_path / "prompts_stats.json").read_text())
    row = next(read_rows(tmp_path / "prompts.jsonl"))[1]
    assert row["provenance"]["attempt"] == 0 and row["provenance"]["target"] == "tiny"
    assert {request.temperature for request in target.calls} == {1.0}


@pytest.mark.parametrize("die_after", [0, 17])
def test_a_killed_run_ends_with_the_same_prompts(
    tokenizer: PreTrainedTokenizerFast, fake_target: Any, synthesise: Synthesise, tmp_path: Path, die_after: int
) -> None:
    """After a kill, with gaps in the numbers and an incomplete line, the second run must write the same file."""
    stats = synthesise(fake_target(tokenizer, turn))
    expected = (tmp_path / "prompts.jsonl").read_bytes()
    for name in ("prompts.jsonl", "attempts.jsonl"):
        (tmp_path / name).unlink()
    with pytest.raises(KeyboardInterrupt):
        synthesise(fake_target(tokenizer, turn, die_after))
    assert not (tmp_path / "prompts.jsonl").exists()
    with (tmp_path / "attempts.jsonl").open("a") as handle:
        handle.write('{"attempt": 3')
    second = fake_target(tokenizer, turn)
    assert synthesise(second) == stats
    assert (tmp_path / "prompts.jsonl").read_bytes() == expected
    numbers = [row["attempt"] for _, row in read_rows(tmp_path / "attempts.jsonl")]
    assert len(numbers) == len(set(numbers)) and len(second.calls) == len(numbers) - die_after
    nothing = fake_target(tokenizer, turn, 0)
    assert synthesise(nothing) == stats and not nothing.calls


def test_a_template_that_drops_the_system_prompt_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    """The system prompt would have no effect, but the provenance would list it."""
    tokenizer.chat_template = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    with pytest.raises(ChatTemplateError, match=r"prompts\.systems"):
        user_turn_prefix_ids(tokenizer, "You write code.")


def test_system_prompts_steer_the_attempts_in_turn(
    tokenizer: PreTrainedTokenizerFast, fake_target: Any, synthesise: Synthesise, tmp_path: Path
) -> None:
    """Attempt i starts from system prompt i mod n and says so; the prompt has no system turn; others are refused."""
    systems = ("", "You write code.", "You tell stories.")
    prefixes = [user_turn_prefix_ids(tokenizer, system) for system in systems]
    assert len({tuple(prefix) for prefix in prefixes}) == 3
    settings = PromptSettings(synthesize=30, max_tokens=60, systems=systems)
    target = fake_target(tokenizer, turn)
    synthesise(target, settings)
    assert all(request.prompt_ids == prefixes[NUMBER_OF[request.seed] % 3] for request in target.calls)
    for _, row in read_rows(tmp_path / "prompts.jsonl"):
        assert row["provenance"]["system"] == systems[row["provenance"]["attempt"] % 3]
        assert [message["role"] for message in row["messages"]] == ["user"]
    with pytest.raises(DataError, match="other settings"):
        synthesise(target, PromptSettings(synthesize=30, max_tokens=60, systems=systems[:2]))


def test_real_requests_pass() -> None:
    """Rejecting real requests would narrow what the head learns."""
    for text in (
        "How do I bake sourdough bread at home?",
        "Write a Python function that adds two numbers:\n\ndef add(a, b):\n    # your code here\n",
        "東京の天気はどうですか",
        "Explain the difference between a list and a tuple. Explain the difference between a set and a list.",
        "Répondez-moi, s'il vous plaît: qu'est-ce que l'été?",
    ):
        assert rejection(text, 3, 400) is None, text


def test_noise_is_rejected_by_name() -> None:
    """Reasons are counted, so each must be distinguished."""
    for text, reason in (
        ("  \n", "empty"),
        ("Thanks a", "too_short"),
        ("word " * 3 + "many different words follow here and on", "too_long"),
        ("**User:** write a poem for me", "role_name"),
        ("the cat sat on the mat the cat sat on the mat the cat sat on the mat", "repetition"),
        ("a \x00\x01\x02 broken answer", "not_text"),
    ):
        assert rejection(text, 3, 8 if reason == "too_long" else 400) == reason


def test_same_words_are_the_same_prompt() -> None:
    """Case, spaces and punctuation do not make a new prompt; another number does."""
    assert words_of("What is 2+2?") == words_of("what  is 2 + 2 ") != words_of("What is 2+3?")
