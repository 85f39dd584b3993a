"""One request's answer: tokens in, text and usage out, counted exactly up to where the answer ends.

The engine ends the answer with the token that completes a stop string, also inside an accepted run; here its text is
cut before the string. A raw completion's text also has the space between prompt and answer, so that a stop string may
be complete here one token sooner: the tokens after it are then not part of the answer, neither text nor counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from toolkit.infer.engine.engine_thread import Update
from toolkit.infer.request.acceptance import summarise
from toolkit.infer.request.detokenize import TextStream
from toolkit.infer.request.request import TokenLogprob, VerifyEvent


class Answer:
    """Collects one answer; `finish_reason` ("stop", "length", "abort") is set when it has ended."""

    def __init__(self, text: TextStream) -> None:
        self._text = text
        self.n_tokens = 0
        self.n_from_draft = 0
        self._logprobs: list[TokenLogprob] = []  # of the answer's tokens, as far as they are not taken
        self.finish_reason: str | None = None

    def feed(self, update: Update) -> str:
        """The new text that may be shown."""
        return "".join(text for text, _ in self.feed_pieces(update))

    def take_logprobs(self) -> list[TokenLogprob]:
        """Those of the tokens fed since the last call; none unless the request asked for them."""
        taken, self._logprobs = self._logprobs, []
        return taken

    def feed_pieces(self, update: Update) -> list[tuple[str, bool]]:
        """The new text as (text, from_draft), a piece per token that completed some."""
        pieces: list[tuple[str, bool]] = []
        last = len(update.token_ids) - 1
        for i, (token_id, drafted) in enumerate(zip(update.token_ids, update.from_draft, strict=True)):
            self.n_tokens += 1
            self.n_from_draft += drafted
            self._logprobs += update.logprobs[i : i + 1]
            if i == last and isinstance(update.stop_reason, int):
                break  # the stop id itself, which is no text even where the tokenizer does not call it special
            pieces.append((self._text.push(token_id), drafted))
            if self._text.stopped:
                self.finish_reason = "stop"
                return pieces
        if update.finish_reason is not None:
            pieces.append((self._text.finish(), False))
            self.finish_reason = "stop" if self._text.stopped else update.finish_reason
        return [piece for piece in pieces if piece[0]]


def events_of_answer(events: Sequence[VerifyEvent], n_tokens: int) -> list[VerifyEvent]:
    """The verify steps that wrote the first `n_tokens` tokens; a step cut by the answer's end is marked truncated.

    The first token is the prefill's, so step 1 writes from token 2 on.
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
    """OpenAI's usage of one request: its answers, each with the engine's events, and the prompt counted once.

    shape: names the draft shape, None where nothing was drafted. cached_tokens: of the prompt,
    found in the prefix cache.
    accepted_prediction_tokens: drafted tokens that are in the answer; rejected: drafted nodes that are not.
    `speculative` is ours; accept_length excludes the prefill's token and truncated steps, accept_rate[i] is
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


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)  # JSON has no nan
