"""Rollouts: the target's own answers to prompts, stored as the ids it generated, with their provenance.

Conversations of several turns are answered turn by turn; each turn sees the target's own earlier answers. The n-th
turns of many conversations are generated together as one wave. Each finished conversation is written at once as one
line; a restarted run keeps the finished ones. A rollout depends only on the id of its conversation and the settings.

A row: {"id", "split", "messages", "input_ids", "response_spans", "finish_reason", "provenance"}, and with a draft head
"drafting": {"verify_steps", "accepted"}. `input_ids` is the rendered prompt of the last turn followed by the ids that
the target generated, which are never tokenized again; spans are [start, end).
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
from toolkit.data.generation import (
    UNANSWERED,
    GenerateFn,
    GenerationRequest,
    GenerationResult,
    derived_seed,
    run_all,
    written_ids,
)
from toolkit.data.loss_mask import LossMaskError, response_mask, spans
from toolkit.data.rollout_files import RolloutPaths, Tally, held_out_ids, read_finished, split_name, write_stats
from toolkit.jsonl import DataError, RowAppender
from toolkit.log import get_logger
from toolkit.recipe import RolloutSettings

logger = get_logger(__name__)

# Enough conversations to fill a batch; few enough that a kill loses few unfinished ones.
CONVERSATIONS_PER_WAVE = 1024

OnProgress = Callable[[int, int, int], None]
"""(finished conversations, all conversations, tokens generated in this run)"""


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
    per_wave: int = 0,
) -> dict[str, Any]:
    """Answer the user turns of `conversations`, write the rows to the .jsonl file `out_path`, return the statistics.

    Also written: `<stem>_skipped.jsonl` (id and reason of conversations without a row: prompt_too_long, empty_answer,
    no_round_trip, refused) and `<stem>_stats.json`. For the same reasons a later turn ends the conversation before that
    turn. An answer that is cut, or whose message would lose special tokens, ends the conversation after that turn. Such
    rows have the reason under "shortened".
    `max_context` limits the ids of prompt and answer together. Draws are seeded by (seed, id, turn).
    `temperatures`, by conversation id, override that of the settings; `more_provenance` is added to each row.
    Conversations are read from the sequence wave by wave; `per_wave` makes a wave larger. Memory: one wave, and about
    300 bytes per conversation.
    Raises `DataError` when the file holds rollouts of other prompts or settings, when ids repeat, and when no
    conversation becomes a rollout (unless `may_be_empty`, for one process's share).
    """
    paths = RolloutPaths(Path(out_path))
    ids = conversations.ids if isinstance(conversations, Conversations) else [one.id for one in conversations]
    places = {name: at for at, name in enumerate(ids)}
    if len(places) < len(ids):
        repeated = [name for name, count in Counter(ids).items() if count > 1]
        raise DataError(f"{len(repeated)} conversation ids are repeated ({repeated[:3]}); give each its own id")
    provenance = {
        "target": target,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "seed": seed,
        "max_tokens": settings.max_tokens,
        **({"deterministic": True} if settings.deterministic else {}),
        **(more_provenance or {}),
    }
    temperature_of = temperatures or {}

    def provenance_of(name: str) -> dict[str, Any]:
        return provenance | {"temperature": temperature_of.get(name, settings.temperature)}

    def asked(name: str) -> Conversation | None:
        return user_turns(conversations[places[name]]) if name in places else None

    held_out = held_out_ids(places, settings.held_out)
    done, tally = read_finished(paths, asked, held_out, provenance_of)
    pending = [at for name, at in places.items() if name not in done]
    if done:
        logger.info(f"{paths.rows}: {len(done)} of {len(places)} conversations are already done, {len(pending)} remain")
    with RowAppender(paths.rows) as rows, RowAppender(paths.skipped) as skipped:
        writer = _Writer(generate, tokenizer, settings, held_out, provenance_of, max_context, rows, skipped, tally)
        size = max(per_wave, CONVERSATIONS_PER_WAVE)
        for first in range(0, len(pending), size):
            wave = pending[first : first + size]
            for _ in writer.answer(user_turns(conversations[at]) for at in wave):
                if on_progress is not None:
                    on_progress(tally.ended, len(places), tally.written_tokens)
    if temperatures is not None:
        provenance["temperature"] = sorted({provenance_of(name)["temperature"] for name in places})
    return write_stats(paths, tally, len(places), provenance, settings.held_out, may_be_empty=may_be_empty)


@dataclass
class _Dialogue:
    """One conversation in progress: `waiting` holds the messages not yet asked, `row` the row of the turns so far."""

    id: str
    waiting: list[Message]
    messages: list[Message] = field(default_factory=list)
    row: dict[str, Any] | None = None

    def ask(self) -> None:
        """Move the next user message, and a system message before it, from `waiting` to `messages`."""
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
    provenance: Callable[[str], Mapping[str, Any]]  # by conversation id
    max_context: int
    rows: RowAppender
    skipped: RowAppender
    tally: Tally
    warned: bool = False

    def answer(self, conversations: Iterable[Conversation]) -> Iterator[None]:
        """Answer all turns of `conversations`, one wave per turn number; yield after each answer."""
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
        if result.finish_reason in UNANSWERED:
            self._close(one, result.finish_reason, turn=one.turn, prompt_tokens=len(prompt))
            return
        text, complete = answer_text(self.tokenizer, written_ids(result))
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
            "provenance": {**self.provenance(one.id), "draft": result.draft_used, **result.by_server},
            **_drafting(one.row, result),
        }
        if not one.waiting:
            self._write(one.row)
        elif result.finish_reason == "length":  # the next prompt would add an end that the target did not write
            self._close(one, "cut_answer")
        elif not complete:
            self._close(one, "special_tokens")

    def _close(self, one: _Dialogue, reason: str, **details: int) -> None:
        """End a conversation early: write the turns answered so far, or record it as skipped if there are none."""
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
        """Return the spans of earlier answers in the prompt; none, with a warning, if they cannot be located."""
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
            logger.warning(f"in conversations of several turns only the last answer is marked as response: {reason}")
        self.warned = True


def _drafting(before: Mapping[str, Any] | None, result: GenerationResult) -> dict[str, Any]:
    """Return the draft counts of a conversation, including its earlier turns; empty for plain decoding."""
    if result.draft_used is None:
        return {}
    earlier = (before or {}).get("drafting", {"verify_steps": 0, "accepted": 0})
    steps, accepted = earlier["verify_steps"] + result.verify_steps, earlier["accepted"] + result.accepted
    return {"drafting": {"verify_steps": steps, "accepted": accepted}}
