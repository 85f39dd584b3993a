"""How fast the engine wrote rollouts, beside what plain decoding takes for the same tokens on the same machine.

Where drafting does not pay the engine decodes plainly, and at its start it always does: those rounds tell what a plain
round takes, by its number of rows. Some of them also look at the head (`drafters/adaptive.py`), which makes them slower
by a hundredth or two.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import mean

from toolkit.infer.request.request import Request


@dataclass
class _Round:
    """counted: rows whose tokens are here (one that was not finished is not)."""

    tokens: int = 0
    counted: int = 0
    drafted: bool = False


class RolloutSpeed:
    """The decoding rounds behind finished requests; reading prompts is in none of them."""

    def __init__(self) -> None:
        self._rounds: dict[tuple[float, int], _Round] = defaultdict(_Round)  # by seconds and rows

    def __bool__(self) -> bool:
        return bool(self._rounds)

    def add(self, request: Request) -> None:
        """Count a finished request's steps. The rows of a round hold the same seconds, by which it is known."""
        for event in request.events:
            one = self._rounds[event.draft_s + event.verify_s + event.commit_s, event.batch]
            one.tokens += event.committed
            one.counted += 1
            one.drafted |= event.offered > 0

    def summary(self) -> dict[str, float | None]:
        """decode_tokens_per_s of all rounds, and plain_tokens_per_s: all these tokens by the time of the plain rounds,
        one token a row, that would write them (each as long as those of the nearest number of rows that has some; null
        without any)."""
        plain: dict[int, list[float]] = defaultdict(list)  # seconds, by rows
        for (seconds, rows), one in self._rounds.items():
            if not one.drafted:
                plain[rows].append(seconds)

        def expected(one: _Round, rows: int) -> float:
            nearest = min(plain, key=lambda known: (abs(known - rows), known))
            return one.tokens / one.counted * mean(plain[nearest])

        tokens = sum(one.tokens for one in self._rounds.values())
        took = sum(seconds for seconds, _ in self._rounds)
        would = sum(expected(one, rows) for (_, rows), one in self._rounds.items()) if plain else 0.0
        return {
            "decode_tokens_per_s": tokens / took if took else None,
            "plain_tokens_per_s": tokens / would if would else None,
        }
