"""Rollouts hold exactly the ids that the target wrote, in any order of finishing and after any kill."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
from transformers import PreTrainedTokenizerFast

from toolkit.data.chat_template import prompt_ids
from toolkit.data.conversations import Conversation
from toolkit.data.examples import load_examples
from toolkit.data.generation import GenerationRequest
from toolkit.data.rollouts import held_out_ids, write_rollouts
from toolkit.jsonl import DataError, read_rows
from toolkit.recipe import RolloutSettings

SETTINGS = RolloutSettings(max_tokens=40, held_out=0.2)


def conversation(identity: str, *turns: str, system: str | None = None) -> Conversation:
    first = () if system is None else ({"role": "system", "content": system},)
    return Conversation(identity, (*first, *({"role": "user", "content": turn} for turn in turns)))


CONVERSATIONS = [
    conversation(
        f"c{i}", *(f"question {i} of turn {t}" for t in range(1 + i % 3)), system="Be kind." if i % 4 else None
    )
    for i in range(24)
]


def answer(request: GenerationRequest) -> tuple[str, str]:
    """Depends on seed and prompt, as a sampled answer does; a third of the last turns end by length."""
    text = f"Yes {request.seed % 1000}, it is {sum(request.prompt_ids) % 97}."
    return (text, "length") if request.last and request.seed % 3 == 0 else (text, "stop")


Write = Callable[..., dict[str, Any]]


@pytest.fixture
def write(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Write:
    """write_rollouts with this file's defaults into tmp_path/rollouts.jsonl."""

    def call(
        generate: Any, conversations: Any = CONVERSATIONS, settings: Any = SETTINGS, **more: Any
    ) -> dict[str, Any]:
        given = {"target": "tiny", "seed": 1, "max_context": 400} | more
        return write_rollouts(conversations, generate, tokenizer, settings, tmp_path / "rollouts.jsonl", **given)

    return call


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    rows = [row for _, row in read_rows(path)]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def test_rows_hold_the_ids_as_written(
    tokenizer: PreTrainedTokenizerFast, fake_target: Any, write: Write, tmp_path: Path
) -> None:
    """An answer that is decoded and tokenized again is no longer on-policy; the spans must cover it exactly."""
    target = fake_target(tokenizer, answer)
    stats = write(target)
    rows = rows_of(tmp_path / "rollouts.jsonl")
    assert rows.keys() == {one.id for one in CONVERSATIONS}
    for one in CONVERSATIONS:
        row = rows[one.id]
        assert [m for m in row["messages"] if m["role"] != "assistant"] == list(one.messages)
        prompt = prompt_ids(tokenizer, row["messages"][:-1])
        start, end = row["response_spans"][-1]
        assert row["input_ids"][:start] == prompt and end == len(row["input_ids"])
        request = next(call for call in target.calls if call.prompt_ids == prompt)
        text, reason = answer(request)
        written = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert row["input_ids"][start:] == written + [tokenizer.eos_token_id] * (reason == "stop")
        assert row["finish_reason"] == reason and row["messages"][-1]["content"] == text
        spoken = [tokenizer.decode(row["input_ids"][s:e]).removesuffix("<|im_end|>") for s, e in row["response_spans"]]
        assert spoken == [m["content"] for m in row["messages"] if m["role"] == "assistant"]
    assert row["provenance"] == {
        "target": "tiny", "temperature": 0.0, "top_p": 1.0, "seed": 1, "max_tokens": 40, "draft": "head",
    }  # fmt: skip
    assert stats == json.loads((tmp_path / "rollouts_stats.json").read_text())
    assert stats["rollouts"] == 24 and stats["turns"] == 48 and stats["unmarked_turns"] == 0
    assert stats["finish_reasons"]["stop"] + stats["finish_reasons"]["length"] == 24
    assert stats["last_run"]["tokens"] > 0 and stats["last_run"]["tokens_per_s"] > 0


def test_the_batch_stays_full_and_nothing_else_is_held(
    tokenizer: PreTrainedTokenizerFast, fake_target: Any, write: Write
) -> None:
    """Next turns run beside other conversations: one at a time would take many times as long. Of a file of
    conversations larger than memory only those that run are held, also while an interrupted run is picked up."""

    class Text(str):
        """A text that can be watched."""

    alive: WeakSet[Text] = WeakSet()
    most = 0

    class OnDemand(Sequence):
        def __len__(self) -> int:
            return len(CONVERSATIONS)

        def __getitem__(self, index: int) -> Conversation:
            nonlocal most
            one = CONVERSATIONS[index]
            said = [message | {"content": Text(f"{one.id}: {message['content']}")} for message in one.messages]
            alive.update(message["content"] for message in said)
            most = max(most, len({text.partition(":")[0] for text in alive}))
            return Conversation(one.id, tuple(said))

    first = fake_target(tokenizer, answer, 30)
    with pytest.raises(KeyboardInterrupt):
        write(first, OnDemand())
    assert set(first.sizes) == {8}
    assert write(fake_target(tokenizer, answer), OnDemand())["rollouts"] == 24
    assert 8 <= most <= 11, "those that run, the one that ended, and one that is compared"


@pytest.mark.parametrize("die_after", [0, 30])
def test_a_killed_run_ends_with_the_same_rows(
    tokenizer: PreTrainedTokenizerFast, fake_target: Any, write: Write, tmp_path: Path, die_after: int
) -> None:
    """After a kill at any point, also within a line, the second run must add exactly the missing rows."""
    out = tmp_path / "rollouts.jsonl"
    whole = fake_target(tokenizer, answer)
    write(whole)
    expected = rows_of(out)
    out.unlink()
    with pytest.raises(KeyboardInterrupt):
        write(fake_target(tokenizer, answer, die_after))
    kept = len(rows_of(out))
    with out.open("a") as handle:
        handle.write('{"id": "c1", "messages": [{"ro')
    second = fake_target(tokenizer, answer)
    stats = write(second)
    assert rows_of(out) == expected and stats["rollouts"] == 24
    assert len(second.calls) <= 48 - kept
    nothing = fake_target(tokenizer, answer, 0)
    assert write(nothing) == stats and not nothing.calls


def test_skipped_conversations_are_counted(
    tokenizer: PreTrainedTokenizerFast,
    fake_target: Any,
    write: Write,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts over the context length and empty answers must be recorded, and must not be tried again."""
    monkeypatch.setattr(logging.getLogger("toolkit"), "propagate", True)
    given = [
        conversation("long", "why " * 300),
        conversation("later-long", "Hi?", "why " * 300),
        conversation("empty", "say nothing"),
        conversation("later-empty", "Hi?", "say nothing"),
        conversation("fine", "Hi?"),
    ]

    def silent(request: GenerationRequest) -> tuple[str, str]:
        return ("  \n" if "nothing" in tokenizer.decode(request.prompt_ids) else "Yes.", "stop")

    stats = write(fake_target(tokenizer, silent), given, max_context=250)
    assert stats["skipped"] == {"prompt_too_long": 1, "empty_answer": 1}
    assert stats["shortened"] == {"prompt_too_long": 1, "empty_answer": 1}
    assert "2 were skipped" in caplog.text
    rows = rows_of(tmp_path / "rollouts.jsonl")
    assert rows.keys() == {"later-long", "later-empty", "fine"}
    assert all(len(row["messages"]) == 2 for row in rows.values())
    assert rows_of(tmp_path / "rollouts_skipped.jsonl")["long"]["reason"] == "prompt_too_long"
    again = fake_target(tokenizer, silent)
    assert write(again, given, max_context=250) == stats and not again.calls


def test_an_answer_that_later_prompts_cannot_hold_ends_its_conversation(
    tokenizer: PreTrainedTokenizerFast, fake_target: Any, write: Write, tmp_path: Path
) -> None:
    """The next prompt would end an answer that the target had not ended, or lose its special tokens, and the head would
    be taught what the target never wrote. An answer that is the last keeps its row as it is."""
    first = ("Yes<|im_start|>No.", "stop")
    target = fake_target(tokenizer, lambda _: first)
    stats = write(target, [conversation("two", "one?", "two?"), conversation("one", "one?")])
    rows = rows_of(tmp_path / "rollouts.jsonl")
    assert rows["two"]["shortened"] == "special_tokens" and stats["shortened"] == {"special_tokens": 1}
    assert rows["two"]["input_ids"] == rows["one"]["input_ids"] and "shortened" not in rows["one"]
    assert len(rows["two"]["messages"]) == 2 and len(target.calls) == 2
    again = fake_target(tokenizer, lambda _: first)
    assert write(again, [conversation("two", "one?", "two?"), conversation("one", "one?")]) == stats and not again.calls


def test_rows_of_another_run_are_refused(tokenizer: PreTrainedTokenizerFast, fake_target: Any, write: Write) -> None:
    """A file with two sets of rollouts would have no clear provenance."""
    write(fake_target(tokenizer, answer))
    for change, message in (
        ({"seed": 2}, "seed was 1, now 2"),
        ({"settings": replace(SETTINGS, deterministic=True)}, "deterministic was"),
        ({"settings": RolloutSettings(max_tokens=40, held_out=0.99)}, "split was"),
        ({"conversations": CONVERSATIONS[:3]}, "not among the prompts"),
        ({"conversations": [conversation(one.id, "else?") for one in CONVERSATIONS]}, "other user messages"),
    ):
        with pytest.raises(DataError, match=message):
            write(fake_target(tokenizer, answer), **change)


def test_splits_depend_on_the_id_alone_and_both_load(
    tokenizer: PreTrainedTokenizerFast, fake_target: Any, write: Write, tmp_path: Path
) -> None:
    """A held-out conversation that changes sides when data is added would be trained on."""
    stats = write(fake_target(tokenizer, answer))
    for identity, row in rows_of(tmp_path / "rollouts.jsonl").items():
        assert (row["split"] == "held_out") == (identity in held_out_ids([one.id for one in CONVERSATIONS], 0.2))
    many = [f"x{i}" for i in range(4000)]
    assert len(held_out_ids(many, 0.05)) == pytest.approx(200, abs=50)
    assert held_out_ids(many, 0.05) >= held_out_ids(many[:2000], 0.05)
    for split in ("train", "held_out"):
        examples, cut = load_examples(tmp_path / "rollouts.jsonl", split, 512)
        assert len(examples) == stats["splits"][split] and cut == 0


def test_templates_that_rewrite_history_mark_the_last_answer_only(
    tokenizer: PreTrainedTokenizerFast, fake_target: Any, write: Write, tmp_path: Path
) -> None:
    """Reasoning templates drop earlier thoughts: ids stay exact, and unmarked turns are counted instead of guessed."""
    tokenizer.chat_template = tokenizer.chat_template.replace("message['content']", "message['content'] | upper")
    stats = write(fake_target(tokenizer, answer), [conversation("a", "one", "two")])
    (row,) = rows_of(tmp_path / "rollouts.jsonl").values()
    assert len(row["response_spans"]) == 1 and stats["unmarked_turns"] == 1
