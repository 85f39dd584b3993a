"""One request's answer: converts tokens to text and usage, counted exactly up to the answer's end.

The engine ends the answer at the token that completes a stop string, also among accepted drafts. This module truncates
the text before the stop string. The text of a raw completion includes the space between prompt and answer, so a stop
string may be complete one token earlier here than in the engine. Later tokens count neither as text nor as tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from toolkit.infer.request.detokenize import TextStream
from toolkit.infer.request.request import Request, TokenLogprob, Update, VerifyEvent, summarise


class Answer:
    """Collects one answer. `finish_reason` ("stop", "length", "abort") is None until it ends."""

    def __init__(self, text: TextStream) -> None:
        self._text = text
        self.n_tokens = 0
        self.n_from_draft = 0
        self._logprobs: list[TokenLogprob] = []  # of the tokens since the last take_logprobs()
        self.finish_reason: str | None = None

    def feed(self, update: Update) -> str:
        """Add an update. Returns the new text that can be shown."""
        return "".join(text for text, _ in self.feed_pieces(update))

    def take_logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities of the tokens since the last call; empty if the request did not ask for them."""
        taken, self._logprobs = self._logprobs, []
        return taken

    def drop(self) -> None:
        """Forget the answer, which was asked for with no tokens; it ended by its limit."""
        self.n_tokens = self.n_from_draft = 0
        self._logprobs, self.finish_reason = [], "length"

    def feed_pieces(self, update: Update) -> list[tuple[str, bool]]:
        """Add an update. Returns the new text as (text, from_draft), one piece per token that completed some text."""
        pieces: list[tuple[str, bool]] = []
        last = len(update.token_ids) - 1
        for i, (token_id, drafted) in enumerate(zip(update.token_ids, update.from_draft, strict=True)):
            self.n_tokens += 1
            self.n_from_draft += drafted
            self._logprobs += update.logprobs[i : i + 1]
            if i == last and isinstance(update.stop_reason, int):
                break  # the stop id is not text, even if the tokenizer does not mark it as special
            pieces.append((self._text.push(token_id), drafted))
            if self._text.hit is not None:
                self.finish_reason = "stop"
                return pieces
        if update.finish_reason is not None:
            pieces.append((self._text.finish(), False))
            self.finish_reason = "stop" if self._text.hit is not None else update.finish_reason
        return [piece for piece in pieces if piece[0]]


def events_of_answer(events: Sequence[VerifyEvent], n_tokens: int) -> list[VerifyEvent]:
    """The verify steps of the first `n_tokens` tokens. A step across the answer's end is marked truncated.

    The first token comes from the prefill, so step 1 begins with token 2.
    """
    kept, written = [], 1
    for event in events:
        if written >= n_tokens:
            break
        room = n_tokens - written
        kept.append(event if event.committed <= room else replace(event, committed=room, truncated=True))
        written += event.committed
    return kept


def usage(
    prompt_tokens: int,
    answers: Sequence[tuple[Answer, Sequence[VerifyEvent]]],
    shape: str | None,
    cached_tokens: int = 0,
) -> dict[str, Any]:
    """OpenAI's `usage` of one request. answers: each with the engine's events. The prompt counts once.

    shape: the name of the draft shape; None for plain decoding. cached_tokens: prompt tokens found in the prefix cache.
    accepted_prediction_tokens: drafted tokens in the answer. rejected_prediction_tokens: drafted nodes not in it.
    `speculative` is an extension: accept_length excludes the prefill's token and truncated steps; accept_rate[i] is
    the share of the steps that reached depth i and accepted it.
    """
    events = [event for answer, every in answers for event in events_of_answer(every, answer.n_tokens)]
    offered = sum(event.offered for event in events)
    tokens = sum(answer.n_tokens for answer, _ in answers)
    from_draft = sum(answer.n_from_draft for answer, _ in answers)
    result: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": from_draft,
            "rejected_prediction_tokens": max(0, offered - from_draft),
        },
    }
    if shape is not None:
        stats = summarise(events)
        result["speculative"] = {
            "shape": shape,
            "verify_steps": stats.verify_steps,
            "accept_length": _number(stats.accept_length),
            "accept_rate": [_number(rate) for rate in stats.accept_rate],
        }
    return result


def acceptance_details(request: Request, n_tokens: int) -> dict[str, Any]:
    """What drafting did for the first `n_tokens` tokens of one answer, and where its time went; also while it runs.

    drafts: verify steps that offered drafted tokens; verify_steps: those of them that count (AcceptanceStats says
    which, and what the other figures are). plain_steps: steps without drafts. histogram[i]: counted steps that accepted
    i drafted tokens. seconds: queue, prefill (reading the prompt, and the first token) and decode follow each other;
    draft, verify and commit are parts of decode, of the whole batch. A request that was preempted counts its second
    wait and reading as decode.
    """
    events = events_of_answer(list(request.events), n_tokens)
    stats = summarise(events)
    now = time.perf_counter()
    ended = now if request.finished_at is None else request.finished_at
    first = ended if request.first_token_at is None else request.first_token_at
    begun = first if request.admitted_at is None else request.admitted_at
    seconds = {"queue": begun - request.submitted_at, "prefill": first - begun, "decode": ended - first}
    parts = {part: sum(getattr(event, f"{part}_s") for event in events) for part in ("draft", "verify", "commit")}
    return {
        "accept_length": _number(stats.accept_length),
        "accept_rate": [_number(rate) for rate in stats.accept_rate],
        "histogram": list(stats.histogram),
        "drafts": stats.verify_steps + stats.truncated_steps,
        "verify_steps": stats.verify_steps,
        "plain_steps": len(events) - stats.verify_steps - stats.truncated_steps,
        "draft_tokens": stats.offered,
        "accepted_tokens": stats.accepted,
        "seconds": {name: round(value, 6) for name, value in (seconds | parts).items()},
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)  # JSON has no nan
