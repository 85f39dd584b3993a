"""Compares the engine's decoding speed in rollouts with an estimate of plain decoding for the same tokens.

The engine decodes without drafts at its start and whenever drafting does not pay. These plain rounds give the time of a
plain round by its number of rows. Some of them also probe the head (`drafters/adaptive.py`), which makes them one or
two percent slower.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import mean

from toolkit.infer.request.request import Request


@dataclass
class _Round:
    """counted: rows of finished requests, whose tokens are counted; unfinished requests are not."""

    tokens: int = 0
    counted: int = 0
    drafted: bool = False


class RolloutSpeed:
    """The decoding rounds of finished requests, without prefill."""

    def __init__(self) -> None:
        self._rounds: dict[tuple[float, int], _Round] = defaultdict(_Round)  # key: seconds and rows

    def __bool__(self) -> bool:
        return bool(self._rounds)

    def add(self, request: Request) -> None:
        """Count a finished request's steps. The rows of one round are recognised by their equal seconds."""
        for event in request.events:
            one = self._rounds[event.draft_s + event.verify_s + event.commit_s, event.batch]
            one.tokens += event.committed
            one.counted += 1
            one.drafted |= event.offered > 0

    def summary(self) -> dict[str, float | None]:
        """decode_tokens_per_s: the tokens of all rounds by their time. plain_tokens_per_s: the same tokens by the
        estimated time of plain rounds, which give one token a row; null without plain rounds. The estimate for a round
        is the mean time of the plain rounds with the nearest number of rows."""
        plain: dict[int, list[float]] = defaultdict(list)  # seconds, by rows
        for (seconds, rows), one in self._rounds.items():
            if not one.drafted:
                plain[rows].append(seconds)

        def expected(one: _Round, rows: int) -> float:
            nearest = min(plain, key=lambda known: (abs(known - rows), known))
            return one.tokens / one.counted * mean(plain[nearest])

        tokens = sum(one.tokens for one in self._rounds.values())
        decode_seconds = sum(seconds for seconds, _ in self._rounds)
        plain_seconds = sum(expected(one, rows) for (_, rows), one in self._rounds.items()) if plain else 0.0
        return {
            "decode_tokens_per_s": tokens / decode_seconds if decode_seconds else None,
            "plain_tokens_per_s": tokens / plain_seconds if plain_seconds else None,
        }
