"""Rollouts: the target's own answers to prompts, written down as the ids it produced, with their provenance.

Conversations of several turns are answered turn by turn, each turn seeing the target's own earlier answers. All turns
number n are generated together as one wave. A finished conversation is one line, flushed at once; started again, the
finished ones are kept and the rest is done. What a conversation gets depends on its id and the settings, not on order.

A row: {"id", "split", "messages", "input_ids", "response_spans", "finish_reason", "provenance"}, and with a draft head
"drafting": {"verify_steps", "accepted"}. `input_ids` is the rendered prompt of the last turn followed by the ids the
target wrote, never tokenised again; spans are [start, end).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from toolkit.data.chat_template import Message, answer_text, prompt_ids
from toolkit.data.conversations import Conversation, Conversations, user_turns
from toolkit.data.generation import GenerateFn, GenerationRequest, GenerationResult, derived_seed, run_all, written_ids
from toolkit.data.loss_mask import LossMaskError, response_mask, spans
from toolkit.data.rollout_files import RolloutPaths, Tally, held_out_ids, read_finished, split_name, write_stats
from toolkit.jsonl import DataError, RowAppender
from toolkit.log import get_logger
from toolkit.recipe import RolloutSettings

logger = get_logger(__name__)

# Conversations in flight together: enough to keep a batch full, few enough that a kill loses few half-done dialogues.
CONVERSATIONS_PER_WAVE = 1024

OnProgress = Callable[[int, int, int], None]
"""(conversations done, conversations in all, tokens written in this run)"""


def write_rollouts(
    conversations: Sequence[Conversation],
    generate: GenerateFn,
    tokenizer: PreTrainedTokenizerBase,
    settings: RolloutSettings,
    out_path: str | Path,
    *,
    target: str,
    seed: int,
    max_context: int,
    temperatures: Mapping[str, float] | None = None,
    more_provenance: Mapping[str, Any] | None = None,
    on_progress: OnProgress | None = None,
    may_be_empty: bool = False,
) -> dict[str, Any]:
    """Answer the user turns of `conversations` into the .jsonl file `out_path`; returns the statistics.

    Beside it: `<stem>_skipped.jsonl` (id and reason of conversations without a row: prompt_too_long, empty_answer) and
    `<stem>_stats.json`. A later turn that is too long or empty ends its conversation at the turn before, and an answer
    that is cut, or holds special tokens that its message would lose, ends it there ("shortened", with the reason).
    `max_context` counts ids of prompt and answer; an answer is cut where it ends. Draws are seeded by (seed, id, turn).
    `temperatures` by conversation id take the place of the settings' one; `more_provenance` goes into every row.
    Conversations are taken from their sequence when it is their turn. Memory: some 300 bytes for each (its id, in a few
    tables), and those of one wave.
    Raises `DataError` when the file holds rollouts of other prompts or settings, when ids repeat, and when no
    conversation becomes a rollout (unless `may_be_empty`: a share of a whole).
    """
    paths = RolloutPaths(Path(out_path))
    ids = conversations.ids if isinstance(conversations, Conversations) else [one.id for one in conversations]
    places = {name: at for at, name in enumerate(ids)}
    if len(places) < len(ids):
        repeated = [name for name, count in Counter(ids).items() if count > 1]
        raise DataError(f"{len(repeated)} conversation ids come more than once ({repeated[:3]}); give each its own")
    provenance = {
        "target": target,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "seed": seed,
        "max_tokens": settings.max_tokens,
        **(more_provenance or {}),
    }
    heat = temperatures or {}

    def provenance_of(name: str) -> dict[str, Any]:
        return provenance | {"temperature": heat.get(name, settings.temperature)}

    def asked(name: str) -> Conversation | None:
        return user_turns(conversations[places[name]]) if name in places else None

    held_out = held_out_ids(places, settings.held_out)
    done, tally = read_finished(paths, asked, held_out, provenance_of)
    pending = [at for name, at in places.items() if name not in done]
    if done:
        logger.info(f"{paths.rows}: {len(done)} of {len(places)} conversations were done before, {len(pending)} to do")
    with RowAppender(paths.rows) as rows, RowAppender(paths.skipped) as skipped:
        writer = _Writer(generate, tokenizer, settings, held_out, provenance_of, max_context, rows, skipped, tally)
        for first in range(0, len(pending), CONVERSATIONS_PER_WAVE):
            wave = pending[first : first + CONVERSATIONS_PER_WAVE]
            for _ in writer.answer(user_turns(conversations[at]) for at in wave):
                if on_progress is not None:
                    on_progress(tally.ended, len(places), tally.written_tokens)
    if temperatures is not None:
        provenance["temperature"] = sorted({provenance_of(name)["temperature"] for name in places})
    return write_stats(paths, tally, len(places), provenance, settings.held_out, may_be_empty=may_be_empty)


@dataclass
class _Dialogue:
    """One conversation on its way: `waiting` are the messages not asked yet, `row` what is answered so far."""

    id: str
    waiting: list[Message]
    messages: list[Message] = field(default_factory=list)
    row: dict[str, Any] | None = None

    def ask(self) -> None:
        """Move the next user message (and a system message before it) over."""
        while True:
            self.messages.append(self.waiting.pop(0))
            if self.messages[-1]["role"] == "user":
                return

    @property
    def turn(self) -> int:
        return sum(message["role"] == "user" for message in self.messages)


@dataclass
class _Writer:
    generate: GenerateFn
    tokenizer: PreTrainedTokenizerBase
    settings: RolloutSettings
    held_out: frozenset[str]
    provenance: Callable[[str], Mapping[str, Any]]  # of a conversation id
    max_context: int
    rows: RowAppender
    skipped: RowAppender
    tally: Tally
    warned: bool = False

    def answer(self, conversations: Iterable[Conversation]) -> Iterator[None]:
        """Answer all turns of `conversations`, one wave per turn number; yields after each answer."""
        wave = [_Dialogue(one.id, list(one.messages)) for one in conversations]
        while wave:
            asked, requests = self._requests(wave)
            began = time.monotonic()
            for index, result in run_all(self.generate, requests):
                self.tally.written_tokens += len(result.output_ids)
                self._take(asked[index], requests[index].prompt_ids, result)
                yield
            self.tally.seconds += time.monotonic() - began
            wave = [one for one in asked if one.waiting]

    def _requests(self, wave: Sequence[_Dialogue]) -> tuple[list[_Dialogue], list[GenerationRequest]]:
        asked: list[_Dialogue] = []
        requests: list[GenerationRequest] = []
        for one in wave:
            one.ask()
            ids = prompt_ids(self.tokenizer, one.messages)
            room = self.max_context - len(ids)
            if room < 1:
                self._close(one, "prompt_too_long", prompt_tokens=len(ids), max_context=self.max_context)
                continue
            sample = self.provenance(one.id)
            sample_seed = derived_seed(sample["seed"], "rollout", one.id, one.turn)
            length = min(self.settings.max_tokens, room)
            asked.append(one)
            sampling = (sample["temperature"], self.settings.top_p, length, sample_seed)
            requests.append(GenerationRequest(ids, *sampling, turn=one.turn, last=not one.waiting))
        return asked, requests

    def _take(self, one: _Dialogue, prompt: list[int], result: GenerationResult) -> None:
        text, all_said = answer_text(self.tokenizer, written_ids(result))
        if not text.strip():
            self._close(one, "empty_answer", turn=one.turn)
            return
        earlier = self._earlier_spans(one.messages, prompt)
        one.messages.append({"role": "assistant", "content": text})
        one.row = {
            "id": one.id,
            "split": split_name(one.id, self.held_out),
            "messages": list(one.messages),
            "input_ids": prompt + list(result.output_ids),
            "response_spans": [*earlier, [len(prompt), len(prompt) + len(result.output_ids)]],
            "finish_reason": result.finish_reason,
            "provenance": {**self.provenance(one.id), "draft": result.draft_used},
            **_drafting(one.row, result),
        }
        if not one.waiting:
            self._write(one.row)
        elif result.finish_reason == "length":  # the next prompt would end what the target had not ended
            self._close(one, "cut_answer")
        elif not all_said:
            self._close(one, "special_tokens")

    def _close(self, one: _Dialogue, reason: str, **details: int) -> None:
        """End a conversation early: keep the turns answered before, else write it down as skipped."""
        one.waiting.clear()
        if one.row is not None:
            self._write(one.row | {"shortened": reason})
            return
        self.skipped.append({"id": one.id, "reason": reason, **details})
        self.tally.skipped[reason] += 1

    def _write(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.tally.add(row)

    def _earlier_spans(self, messages: Sequence[Message], prompt: list[int]) -> list[list[int]]:
        """Where the target's earlier answers stand in the prompt; none, and a warning, where that cannot be told."""
        if not any(message["role"] == "assistant" for message in messages):
            return []
        try:
            ids, mask = response_mask(self.tokenizer, messages, add_generation_prompt=True)
        except LossMaskError as error:
            self._warn_once(str(error))
            return []
        if ids != prompt:
            self._warn_once("the template renders differently with its generation tags")
            return []
        return spans(mask)

    def _warn_once(self, reason: str) -> None:
        if not self.warned:
            logger.warning(f"only last answers are marked as responses in conversations of several turns: {reason}")
        self.warned = True


def _drafting(before: Mapping[str, Any] | None, result: GenerationResult) -> dict[str, Any]:
    """How far the drafts of a conversation reached, its earlier turns included; nothing for plain decoding."""
    if result.draft_used is None:
        return {}
    earlier = (before or {}).get("drafting", {"verify_steps": 0, "accepted": 0})
    steps, accepted = earlier["verify_steps"] + result.verify_steps, earlier["accepted"] + result.accepted
    return {"drafting": {"verify_steps": steps, "accepted": accepted}}
