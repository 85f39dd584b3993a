"""Prompts that the target writes itself (the idea of Magpie, arXiv 2406.08464).

The target gets its chat template up to where the user's words would begin, and goes on: it writes a user turn. System
prompts (`prompts.systems`) steer what kind of user writes; attempts take them in turn, and the answers never see them.
Attempt i is sampled with a seed of its own. Raw attempts are kept in attempts.jsonl as they end; accepted are the first
good ones in the order of their numbers, whatever order they ended in and however often the run was killed. So the
outcome is a function of the settings, up to rounding: in bfloat16 a target rounds by the size of its batch, and what is
left after a kill is batched differently, so texts may part where two draws were nearly equal.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from toolkit.data.chat_template import ChatTemplateError, decode, encode, render_text, special_ids
from toolkit.data.conversations import Conversation, write_conversations
from toolkit.data.generation import GenerateFn, GenerationRequest, GenerationResult, derived_seed, run_all, written_ids
from toolkit.data.prompt_filters import rejection, words_of
from toolkit.jsonl import DataError, RowAppender, cut_torn_line, read_rows
from toolkit.log import get_logger
from toolkit.recipe import PromptSettings
from toolkit.weights import sha256_json, write_json

logger = get_logger(__name__)

SENTINEL = "SENTINELWORDSOFTHEUSER"
ATTEMPTS_PER_PROMPT = 4
FIRST_GUESS = 0.85  # share of attempts expected to be accepted, before any is seen
MIN_ROUND = 16
MAX_WORDS = 400

OnProgress = Callable[[int, int, int], None]
"""(prompts accepted, prompts wanted, attempts ended)"""


def user_turn_prefix_ids(tokenizer: PreTrainedTokenizerBase, system: str = "") -> list[int]:
    """Ids of the template up to the user's first word; with an empty `system` the template's own default stands.

    Raises `ChatTemplateError` if the template has no slot for the user, or refuses a system prompt.
    """
    messages = [{"role": "system", "content": system}] if system else []
    text = render_text(tokenizer, [*messages, {"role": "user", "content": SENTINEL}])
    before, found, _ = text.partition(SENTINEL)
    if system not in before:
        raise ChatTemplateError(
            f"the chat template leaves the system prompt {system[:60]!r} out, so it would steer nothing; "
            "remove prompts.systems, or take a target whose template has a system turn"
        )
    ids = encode(tokenizer, before) if found else []
    if not ids:
        raise ChatTemplateError(
            f"the chat template renders a user's words as {text[:80]!r}: nothing before them to prompt the target "
            "with. Self-synthesis needs a template with a user slot; give prompts.sources instead"
        )
    return ids


def synthesise_prompts(
    generate: GenerateFn,
    tokenizer: PreTrainedTokenizerBase,
    settings: PromptSettings,
    out_path: str | Path,
    *,
    target: str,
    seed: int,
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Write `settings.synthesize` user turns by the target to the .jsonl `out_path`; returns the statistics.

    Beside it: attempts.jsonl (raw attempts, to resume from) and `<stem>_stats.json` (rejections by reason).
    Only turns that ended by themselves count. There are at most 4 attempts per wanted prompt: fewer prompts then are a
    warning, fewer than half a `DataError`, which is also raised when attempts.jsonl comes from other settings.
    """
    out = Path(out_path)
    wanted = settings.synthesize
    if wanted < 1:
        raise DataError(f"prompts.synthesize = {wanted}; at least 1 prompt is needed")
    systems = settings.systems or ("",)
    prefixes = [user_turn_prefix_ids(tokenizer, system) for system in systems]
    recipe = {
        "target": target,
        "seed": seed,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "max_tokens": settings.max_tokens,
    }
    mark = sha256_json(recipe | {"prefixes": prefixes})[:16]
    attempts_path = out.with_name("attempts.jsonl")
    judge = _Judge(tokenizer, settings.min_words, special_ids(tokenizer), wanted)
    judge.ended = _read_attempts(attempts_path, mark)
    judge.advance()
    with RowAppender(attempts_path) as attempts:
        while numbers := _next_round(judge, wanted):
            requests = [
                _request(prefixes[number % len(prefixes)], settings, derived_seed(seed, "prompt", number))
                for number in numbers
            ]
            for index, result in run_all(generate, requests):
                number = numbers[index]
                attempts.append({"attempt": number, "settings": mark, **_as_row(result)})
                judge.ended[number] = result
                judge.advance()
                if on_progress is not None:
                    on_progress(len(judge.accepted), wanted, len(judge.ended))
    return _finish(out, judge, recipe, systems)


def _request(prefix: list[int], settings: PromptSettings, seed: int) -> GenerationRequest:
    return GenerationRequest(prefix, settings.temperature, settings.top_p, settings.max_tokens, seed)


@dataclass
class _Judge:
    """Takes attempts strictly by number: an attempt is judged when all before it are, so order of ending is nothing."""

    tokenizer: PreTrainedTokenizerBase
    min_words: int
    specials: frozenset[int]
    wanted: int
    ended: dict[int, GenerationResult] = field(default_factory=dict)
    accepted: dict[int, str] = field(default_factory=dict)
    rejected: Counter[str] = field(default_factory=Counter)
    seen: set[tuple[str, ...]] = field(default_factory=set)
    judged: int = 0

    def advance(self) -> None:
        while self.judged in self.ended and len(self.accepted) < self.wanted:
            text, reason = self._verdict(self.ended[self.judged])
            if reason is None:
                self.accepted[self.judged] = text
                self.seen.add(words_of(text))
            else:
                self.rejected[reason] += 1
            self.judged += 1

    def _verdict(self, result: GenerationResult) -> tuple[str, str | None]:
        if result.finish_reason != "stop":
            return "", "unfinished"
        ids = written_ids(result)
        if not self.specials.isdisjoint(ids):
            return "", "special_token"
        text = decode(self.tokenizer, ids).strip()
        reason = rejection(text, self.min_words, MAX_WORDS)
        if reason is None and words_of(text) in self.seen:
            reason = "duplicate"
        return text, reason


def _next_round(judge: _Judge, wanted: int) -> list[int]:
    """Numbers of the attempts to make next: gaps that a kill left, then as many new ones as will probably do."""
    missing = wanted - len(judge.accepted)
    cap = ATTEMPTS_PER_PROMPT * wanted
    if missing == 0 or judge.judged >= cap:
        return []
    share = max(len(judge.accepted) / judge.judged, 1 / ATTEMPTS_PER_PROMPT) if judge.judged else FIRST_GUESS
    # A few too many cost little in a batch; one too few costs a whole round.
    end = min(cap, judge.judged + max(MIN_ROUND, math.ceil(1.1 * missing / share)))
    return [number for number in range(judge.judged, end) if number not in judge.ended]


def _as_row(result: GenerationResult) -> dict[str, Any]:
    return {"output_ids": list(result.output_ids), "finish_reason": result.finish_reason, "draft": result.draft_used}


def _read_attempts(path: Path, mark: str) -> dict[int, GenerationResult]:
    """Attempts of an earlier run by number; a torn last line is cut. Raises `DataError` for those of other settings."""
    if cut_torn_line(path):
        logger.warning(f"{path}: cut a torn last line")
    ended: dict[int, GenerationResult] = {}
    for number, row in read_rows(path) if path.exists() else ():
        if row.get("settings") != mark:
            raise DataError(
                f"{path}:{number}: written with other settings (target, template, system prompts, seed or sampling); "
                "delete the file or write the prompts to another folder"
            )
        ended[row["attempt"]] = GenerationResult(row["output_ids"], row["finish_reason"], row["draft"])
    if ended:
        logger.info(f"{path}: {len(ended)} attempts were made before")
    return ended


def _finish(out: Path, judge: _Judge, recipe: dict[str, Any], systems: Sequence[str]) -> dict[str, Any]:
    """Write prompts and statistics; say clearly when there are too few."""
    count, wanted = len(judge.accepted), judge.wanted
    stats = {
        "wanted": wanted,
        "accepted": count,
        "attempts": judge.judged,
        "rejected": dict(sorted(judge.rejected.items())),
        "attempt_tokens": sum(len(judge.ended[number].output_ids) for number in range(judge.judged)),
        "provenance": recipe,
    }
    write_json(out.with_name(f"{out.stem}_stats.json"), stats)
    told = f"{count} of {wanted} prompts accepted in {judge.judged} attempts, rejected: {stats['rejected'] or 'none'}"
    if 2 * count < wanted:
        raise DataError(
            f"{told}. The target hardly writes usable user turns: raise prompts.max_tokens if most are unfinished, "
            "lower prompts.temperature, or give prompts.sources"
        )
    if count < wanted:
        logger.warning(f"{told}; going on with {count}")
    conversations, provenance = [], {}
    for number, text in judge.accepted.items():
        conversations.append(Conversation(f"synth-{number:06d}", ({"role": "user", "content": text},)))
        provenance[conversations[-1].id] = {
            **recipe,
            "method": "self-synthesis",
            "attempt": number,
            "system": systems[number % len(systems)],
        }
    write_conversations(out, conversations, provenance)
    return stats
