"""How fast the engine wrote rollouts, beside what plain decoding takes for the same tokens on the same machine.

Where drafting does not pay the engine decodes plainly, and at its start it always does: those rounds tell the plain
pace of a batch, seconds a token by its number of rows. Some of them also look at the head (`drafters/adaptive.py`),
which makes the pace slower by a hundredth or two.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from toolkit.infer.request import Request


@dataclass
class _Round:
    tokens: int = 0
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
            one.drafted |= event.offered > 0

    def summary(self) -> dict[str, float | None]:
        """decode_tokens_per_s of all rounds, and plain_tokens_per_s: all these tokens by the time that plain rounds of
        as many rows would take (of the nearest number of rows that has some; null without any)."""
        plain: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for (seconds, rows), one in self._rounds.items():
            if not one.drafted and one.tokens:
                plain[rows][0] += seconds
                plain[rows][1] += one.tokens

        def expected(tokens: int, rows: int) -> float:
            seconds, written = plain[min(plain, key=lambda known: (abs(known - rows), known))]
            return tokens * seconds / written

        tokens = sum(one.tokens for one in self._rounds.values())
        took = sum(seconds for seconds, _ in self._rounds)
        would = sum(expected(one.tokens, rows) for (_, rows), one in self._rounds.items()) if plain else 0.0
        return {
            "decode_tokens_per_s": tokens / took if took else None,
            "plain_tokens_per_s": tokens / would if would else None,
        }
