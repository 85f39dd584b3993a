"""Synthesis of prompts by the target itself, as in Magpie (arXiv 2406.08464).

The target continues its chat template from where the user's content would begin, so it writes a user turn. System
prompts (`prompts.systems`) steer the kind of user; attempts use them in turn, and the answers never see them.
Attempt i has its own seed. Raw attempts are stored in attempts.jsonl as they finish. The first usable attempts by
number are accepted, whatever the order in which they finished and however often the run was killed. So the result is a
function of the settings, up to rounding: in bfloat16 the rounding depends on the batch size, and a resumed run has
other batches, so texts may differ where two draws were nearly equal.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from toolkit.chat_rows import SENTINEL
from toolkit.data.chat_template import ChatTemplateError, decode, encode, render_text, special_ids
from toolkit.data.conversations import Conversation, write_conversations
from toolkit.data.generation import GenerateFn, GenerationRequest, GenerationResult, derived_seed, written_ids
from toolkit.data.rollouts import drop_unanswered
from toolkit.jsonl import DataError, RowAppender, cut_torn_line, read_rows
from toolkit.log import get_logger
from toolkit.recipe import PromptSettings
from toolkit.targets.chat_templates import is_plain
from toolkit.weights import sha256_json, write_json

logger = get_logger(__name__)

ATTEMPTS_PER_PROMPT = 4
FIRST_GUESS = 0.85  # assumed share of accepted attempts before the first is judged
MIN_ROUND = 16
MAX_WORDS = 400

OnProgress = Callable[[int, int, int], None]
"""(accepted prompts, requested prompts, finished attempts)"""


def user_turn_prefix_ids(tokenizer: PreTrainedTokenizerBase, system: str = "") -> list[int]:
    """Return the ids of the template up to the user's content; an empty `system` keeps the template's default.

    Raises `ChatTemplateError` if the template has no slot for the user, or drops or rejects the system prompt.
    """
    messages = [{"role": "system", "content": system}] if system else []
    text = render_text(tokenizer, [*messages, {"role": "user", "content": SENTINEL}])
    before, found, _ = text.partition(SENTINEL)
    if system not in before:
        raise ChatTemplateError(
            f"the chat template drops the system prompt {system[:60]!r}, so it would have no effect; "
            "remove prompts.systems, or use a target whose template has a system turn"
        )
    ids = encode(tokenizer, before) if found else []
    if not ids and is_plain(tokenizer) and tokenizer.eos_token_id is not None:
        ids = [tokenizer.eos_token_id]  # it ended the text before, as texts were joined in training
    if not ids:
        raise ChatTemplateError(
            f"the chat template renders a user message as {text[:80]!r}: no text before the content can prompt the "
            "target. Self-synthesis needs a template with a user slot; give prompts.sources instead"
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
    """Let the target write `settings.synthesize` user turns to the .jsonl `out_path`; return the statistics.

    Also written: attempts.jsonl (raw attempts, to resume from) and `<stem>_stats.json` (rejections by reason).
    Only turns that end with a stop id count. At most 4 attempts per requested prompt are made. Fewer accepted prompts
    than requested are a warning. Raises `DataError` for fewer than half, and when attempts.jsonl has other settings.
    """
    out = Path(out_path)
    wanted = settings.synthesize
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
            for index, result in generate(requests):
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
    """Judges attempts strictly by number, so that the order in which they finish has no effect."""

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
        whole = "length" if is_plain(self.tokenizer) else "stop"  # the beginning of a plain text is a prompt, too
        if result.finish_reason not in ("stop", whole):
            return "", "unfinished" if result.finish_reason == "length" else result.finish_reason
        ids = written_ids(result)
        if not self.specials.isdisjoint(ids):
            return "", "special_token"
        text = decode(self.tokenizer, ids).strip()
        reason = rejection(text, self.min_words, MAX_WORDS)
        if reason is None and words_of(text) in self.seen:
            reason = "duplicate"
        return text, reason


def _next_round(judge: _Judge, wanted: int) -> list[int]:
    """Return the numbers of the next attempts: gaps left by a kill, then as many new ones as will probably suffice."""
    missing = wanted - len(judge.accepted)
    cap = ATTEMPTS_PER_PROMPT * wanted
    if missing == 0 or judge.judged >= cap:
        return []
    share = max(len(judge.accepted) / judge.judged, 1 / ATTEMPTS_PER_PROMPT) if judge.judged else FIRST_GUESS
    # Surplus attempts cost little in a batch; a missing one costs another round.
    end = min(cap, judge.judged + max(MIN_ROUND, math.ceil(1.1 * missing / share)))
    return [number for number in range(judge.judged, end) if number not in judge.ended]


def _as_row(result: GenerationResult) -> dict[str, Any]:
    written = {"output_ids": list(result.output_ids), "finish_reason": result.finish_reason}
    return {**written, "draft": result.draft_used, **result.by_server}


def _read_attempts(path: Path, mark: str) -> dict[int, GenerationResult]:
    """Read the attempts of an earlier run by number. Raises `DataError` for attempts with other settings.

    Attempts that a server left UNANSWERED are removed: another may answer them.
    """
    if cut_torn_line(path):
        logger.warning(f"{path}: removed an incomplete last line")
    drop_unanswered(path, "finish_reason")
    ended: dict[int, GenerationResult] = {}
    for number, row in read_rows(path) if path.exists() else ():
        if row.get("settings") != mark:
            raise DataError(
                f"{path}:{number}: written with other settings (target, template, system prompts, seed or sampling); "
                "write the prompts to another folder, or move the file away"
            )
        ended[row["attempt"]] = GenerationResult(
            row["output_ids"], row["finish_reason"], row["draft"], server=row.get("server")
        )
    if ended:
        logger.info(f"{path}: {len(ended)} attempts are already done")
    return ended


def _finish(out: Path, judge: _Judge, recipe: dict[str, Any], systems: Sequence[str]) -> dict[str, Any]:
    """Write prompts and statistics; warn or raise `DataError` when there are too few prompts."""
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
    summary = (
        f"{count} of {wanted} prompts accepted in {judge.judged} attempts, rejected: {stats['rejected'] or 'none'}"
    )
    if 2 * count < wanted:
        raise DataError(
            f"{summary}. The target rarely writes usable user turns: raise prompts.max_tokens if most are unfinished, "
            "lower prompts.temperature, or give prompts.sources"
        )
    if count < wanted:
        logger.warning(f"{summary}; continuing with {count}")
    conversations, provenance = [], {}
    for number, text in judge.accepted.items():
        conversations.append(Conversation(f"synth-{number:06d}", ({"role": "user", "content": text},)))
        provenance[conversations[-1].id] = {
            **recipe,
            "method": "self-synthesis",
            "attempt": number,
            "system": systems[number % len(systems)],
            **judge.ended[number].by_server,
        }
    write_conversations(out, conversations, provenance)
    return stats


# CJK text has no spaces between words: each character counts as a word.
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+(?:['’\-][^\W_{_CJK}]+)*")
_ROLE = re.compile(r"\s*[<\[(#*]*\s*(system|user|assistant|human|model|bot|ai)\b\s*[>\])#*]*\s*(:|\n)", re.IGNORECASE)
NGRAM = 3
MAX_REPEATED_NGRAMS = 0.3
MAX_RUN = 6
MIN_PRINTABLE = 0.95
MIN_LETTERS = 0.5


def words_of(text: str) -> tuple[str, ...]:
    """Return lower-case words without punctuation; two prompts with equal words are duplicates."""
    return tuple(word.lower() for word in _WORD.findall(text))


def rejection(text: str, min_words: int, max_words: int) -> str | None:
    """Return why `text` is unusable: empty, not_text, role_name, too_short, too_long or repetition; None if usable."""
    if not text.strip():
        return "empty"
    if not _mostly_text(text):
        return "not_text"
    if _ROLE.match(text):
        return "role_name"
    words = words_of(text)
    if len(words) < min_words:
        return "too_short"
    if len(words) > max_words:
        return "too_long"
    return "repetition" if _repeats(text, words) else None


def _mostly_text(text: str) -> bool:
    """Whether nearly all characters are printable, and at least half of the non-spaces are letters or digits."""
    printable = sum(char.isprintable() or char in "\n\t" for char in text) - text.count("\ufffd")
    solid = [char for char in text if not char.isspace()]
    letters = sum(char.isalnum() for char in solid)
    return printable >= MIN_PRINTABLE * len(text) and letters >= MIN_LETTERS * len(solid)


def _repeats(text: str, words: tuple[str, ...]) -> bool:
    """Whether one word or character repeats many times in a row, or too many word n-grams occur more than once."""
    longest = run = 1
    for before, word in zip(words, words[1:], strict=False):
        run = run + 1 if word == before else 1
        longest = max(longest, run)
    if longest >= MAX_RUN or re.search(r"(\S)\1{11,}", text):
        return True
    ngrams = Counter(zip(*(words[start:] for start in range(NGRAM)), strict=False))
    total = ngrams.total()
    return total >= 2 * NGRAM and (total - len(ngrams)) / total > MAX_REPEATED_NGRAMS
