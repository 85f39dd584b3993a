"""Rollouts: the target's own answers to prompts, stored as the ids it generated, with their provenance.

Conversations of several turns are answered turn by turn; each turn sees the target's own earlier answers. Turns of many
conversations are generated together. Each finished conversation is written at once as one line; a restarted run keeps
the finished ones. A rollout depends only on the id of its conversation and the settings.

A row: {"id", "split", "messages", "input_ids", "response_spans", "finish_reason", "provenance"}, and with a draft head
"drafting": {"verify_steps", "accepted"}. `input_ids` is the rendered prompt of the last turn followed by the ids that
the target generated, which are never tokenized again; spans are [start, end).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from toolkit.data.chat_template import LossMaskError, Message, answer_text, prompt_ids, response_mask, spans
from toolkit.data.conversations import Conversation, Conversations, user_turns
from toolkit.data.generation import (
    UNANSWERED,
    GenerateFn,
    GenerationRequest,
    GenerationResult,
    derived_seed,
    written_ids,
)
from toolkit.jsonl import DataError, RowAppender, cut_torn_line, read_rows
from toolkit.log import get_logger
from toolkit.recipe import RolloutSettings
from toolkit.weights import atomic_write, read_json, write_json

logger = get_logger(__name__)

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
) -> dict[str, Any]:
    """Answer the user turns of `conversations`, write the rows to the .jsonl file `out_path`, return the statistics.

    Also written: `<stem>_skipped.jsonl` (id and reason of conversations without a row: prompt_too_long, empty_answer,
    no_round_trip, refused) and `<stem>_stats.json`. For the same reasons a later turn ends the conversation before that
    turn. An answer that is cut, or whose message would lose special tokens, ends the conversation after that turn. Such
    rows have the reason under "shortened".
    `max_context` limits the ids of prompt and answer together. Draws are seeded by (seed, id, turn).
    `temperatures`, by conversation id, override that of the settings; `more_provenance` is added to each row.
    Conversations are read from the sequence as `generate` takes them. Memory: these, and about 300 bytes for each.
    Raises `DataError` when the file holds rollouts of other prompts or settings.
    """
    paths = RolloutPaths(Path(out_path))
    ids = conversations.ids if isinstance(conversations, Conversations) else [one.id for one in conversations]
    places = {name: at for at, name in enumerate(ids)}
    assert len(places) == len(ids), "ids of conversations are unique"
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
        waiting = (user_turns(conversations[at]) for at in pending)
        writer = _Writer(waiting, tokenizer, settings, held_out, provenance_of, max_context, rows, skipped, tally)
        began = time.monotonic()
        for index, result in generate(writer):
            tally.written_tokens += len(result.output_ids)
            writer.take(index, result)
            if on_progress is not None:
                on_progress(tally.ended, len(places), tally.written_tokens)
        tally.seconds = time.monotonic() - began
    if temperatures is not None:
        provenance["temperature"] = sorted({provenance_of(name)["temperature"] for name in places})
    return write_stats(paths, tally, len(places), provenance, settings.held_out)


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
class _Writer(Iterator[GenerationRequest]):
    """Asks the next turns of conversations, begun ones first, and stores their answers.

    As an iterator it ends when no turn can be asked now; after an answer there may be more.
    """

    conversations: Iterator[Conversation]
    tokenizer: PreTrainedTokenizerBase
    settings: RolloutSettings
    held_out: frozenset[str]
    provenance: Callable[[str], Mapping[str, Any]]  # by conversation id
    max_context: int
    rows: RowAppender
    skipped: RowAppender
    tally: Tally
    begun: deque[_Dialogue] = field(default_factory=deque)
    asked: dict[int, tuple[_Dialogue, list[int]]] = field(default_factory=dict)  # dialogue, prompt
    count: int = 0
    warned: bool = False

    def __next__(self) -> GenerationRequest:
        while True:
            if self.begun:
                one = self.begun.popleft()
            else:
                conversation = next(self.conversations)
                one = _Dialogue(conversation.id, list(conversation.messages))
            one.ask()
            ids = prompt_ids(self.tokenizer, one.messages)
            room = self.max_context - len(ids)
            if room >= 1:
                break
            self._close(one, "prompt_too_long", prompt_tokens=len(ids), max_context=self.max_context)
        self.asked[self.count] = one, ids
        self.count += 1
        sample = self.provenance(one.id)
        sample_seed = derived_seed(sample["seed"], "rollout", one.id, one.turn)
        sampling = (sample["temperature"], self.settings.top_p, min(self.settings.max_tokens, room), sample_seed)
        return GenerationRequest(ids, *sampling, turn=one.turn, last=not one.waiting)

    def take(self, number: int, result: GenerationResult) -> None:
        """Store the answer to the request of this number, counted from 0."""
        one, prompt = self.asked.pop(number)
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
        else:
            self.begun.append(one)

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


REMEDY = "write to another file, or move this one away"


@dataclass(frozen=True)
class RolloutPaths:
    """The three files of a stage, named after the first: x.jsonl, x_skipped.jsonl, x_stats.json."""

    rows: Path

    @property
    def skipped(self) -> Path:
        return self.rows.with_name(f"{self.rows.stem}_skipped.jsonl")

    @property
    def stats(self) -> Path:
        return self.rows.with_name(f"{self.rows.stem}_stats.json")


def held_out_ids(ids: Iterable[str], share: float) -> frozenset[str]:
    """Return the ids that are held out from training: those whose hash, in [0, 1), is below `share`.

    The choice of an id does not depend on the other ids. If the hashes of two or more ids select none, the id with the
    smallest hash is held out, so that training on few prompts can still forecast. A share of 0 holds out none.
    """
    draws = {one: int.from_bytes(hashlib.sha256(f"split {one}".encode()).digest()[:8], "big") / 2**64 for one in ids}
    found = frozenset(one for one, draw in draws.items() if draw < share)
    if found or share == 0 or len(draws) < 2:
        return found
    return frozenset([min(draws, key=lambda one: draws[one])])


def split_name(identity: str, held_out: Collection[str]) -> str:
    """Return the value of `split` in a row."""
    return "held_out" if identity in held_out else "train"


@dataclass
class Tally:
    """Counts over all rows, including earlier runs; `written_tokens` and `seconds` count this run only."""

    counts: Counter[str] = field(default_factory=Counter)
    splits: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    shortened: Counter[str] = field(default_factory=Counter)
    written_tokens: int = 0
    seconds: float = 0.0

    def add(self, row: Mapping[str, Any]) -> None:
        """Count one row of the rollouts file."""
        turns = sum(message["role"] == "assistant" for message in row["messages"])
        self.counts["rollouts"] += 1
        self.counts["turns"] += turns
        self.counts["unmarked_turns"] += turns - len(row["response_spans"])
        self.counts["tokens"] += len(row["input_ids"])
        self.counts["response_tokens"] += sum(end - start for start, end in row["response_spans"])
        self.splits[row["split"]] += 1
        self.finish_reasons[row["finish_reason"]] += 1
        if "shortened" in row:
            self.shortened[row["shortened"]] += 1

    @property
    def ended(self) -> int:
        """Finished conversations, including skipped ones."""
        return self.counts["rollouts"] + self.skipped.total()


def read_finished(
    paths: RolloutPaths,
    asked: Callable[[str], Conversation | None],
    held_out: Collection[str],
    provenance: Callable[[str], Mapping[str, Any]],
) -> tuple[set[str], Tally]:
    """Return the ids finished in earlier runs, and their tally; an incomplete last line is removed.

    Conversations that a server left UNANSWERED are not finished: another may answer them. `asked` maps an id to its
    prompt (None: unknown id), `provenance` to its settings. Raises `DataError` for a row of other prompts or settings,
    since the file would mix two sets of rollouts.
    """
    done: set[str] = set()
    tally = Tally()
    for path in (paths.rows, paths.skipped):
        if cut_torn_line(path):
            logger.warning(f"{path}: removed an incomplete last line")
        if path == paths.skipped:
            drop_unanswered(path, "reason")
        for number, row in read_rows(path) if path.exists() else ():
            where = f"{path}:{number}"
            one = asked(row.get("id", ""))
            if one is None or row["id"] in done:
                raise DataError(f"{where}: id {row.get('id')!r} is not among the prompts, or is repeated; {REMEDY}")
            done.add(row["id"])
            if path == paths.skipped:
                tally.skipped[row["reason"]] += 1
                continue
            wanted = {"deterministic": None, **provenance(row["id"]), "split": split_name(row["id"], held_out)}
            _check_row(row, where, wanted, one)
            tally.add(row)
    return done, tally


def drop_unanswered(path: Path, key: str) -> None:
    """Remove the rows whose `key` is among UNANSWERED, atomically: their requests are asked again."""
    rows = [row for _, row in read_rows(path)] if path.exists() else []
    kept = [row for row in rows if row[key] not in UNANSWERED]
    if len(kept) == len(rows):
        return
    with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8") as handle:
        handle.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in kept)
    logger.info(f"{path}: {len(rows) - len(kept)} with {key} {' or '.join(UNANSWERED)} are asked again")


def _check_row(row: Mapping[str, Any], where: str, wanted: Mapping[str, Any], asked: Conversation) -> None:
    found = {**row["provenance"], "split": row["split"]}
    differs = [
        f"{key} was {found.get(key)!r}, now {value!r}" for key, value in wanted.items() if found.get(key) != value
    ]
    if differs:
        raise DataError(f"{where}: written with other settings ({'; '.join(differs)}); {REMEDY}")
    before = [message for message in row["messages"] if message["role"] != "assistant"]
    if before != list(asked.messages)[: len(before)]:
        raise DataError(f"{where}: {row['id']!r} answers other user messages than the prompts have now; {REMEDY}")


def write_stats(
    paths: RolloutPaths, tally: Tally, total: int, provenance: Mapping[str, Any], held_out: float
) -> dict[str, Any]:
    """Write and return the statistics; warn about skipped conversations, and about an empty held-out split."""
    if tally.skipped or tally.shortened:
        logger.warning(
            f"{paths.rows}: of {total} conversations {tally.skipped.total()} were skipped {dict(tally.skipped)}, "
            f"{tally.shortened.total()} shortened {dict(tally.shortened)}"
        )
    if held_out > 0 and not tally.splits["held_out"]:
        logger.warning(f"{paths.rows}: no rollout is held out at a share of {held_out}")
    last_run = {
        "tokens": tally.written_tokens,
        "seconds": round(tally.seconds, 3),
        "tokens_per_s": round(tally.written_tokens / tally.seconds, 3) if tally.seconds > 0 else None,
    }
    if not tally.written_tokens and paths.stats.exists():
        last_run = read_json(paths.stats)["last_run"]
    stats = {
        "conversations": total,
        **{name: tally.counts[name] for name in ("rollouts", "turns", "unmarked_turns", "tokens", "response_tokens")},
        "splits": {name: tally.splits[name] for name in ("train", "held_out")},
        "finish_reasons": {name: tally.finish_reasons[name] for name in ("stop", "length")},
        "skipped": dict(tally.skipped),
        "shortened": dict(tally.shortened),
        "last_run": last_run,
        "provenance": dict(provenance),
    }
    write_json(paths.stats, stats)
    return stats
