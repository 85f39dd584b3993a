"""How fast the engine wrote rollouts, beside what plain decoding takes for the same tokens on the same machine.

Where drafting does not pay the engine decodes plainly, and at its start it always does: those rounds tell the plain
pace of a batch, seconds a token by its number of rows.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from toolkit.infer.request import Request


class RolloutSpeed:
    """Seconds and tokens of the decoding rounds behind finished requests, by (drafted or not, rows of the batch).
    Reading prompts is in neither."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[bool, int], float] = defaultdict(float)
        self.tokens: dict[tuple[bool, int], int] = defaultdict(int)

    def add(self, request: Request) -> None:
        """Count a finished request's steps; of a batch's seconds each of its rows has a share."""
        for event in request.events:
            kind = (event.offered > 0, event.batch)
            self.seconds[kind] += (event.draft_s + event.verify_s + event.commit_s) / event.batch
            self.tokens[kind] += event.committed

    def summary(self) -> dict[str, Any]:
        """decode_tokens_per_s of all rounds, and plain_tokens_per_s: all these tokens by the time that plain rounds of
        as many rows would take (of the nearest number of rows that has some; null without any)."""
        tokens, seconds = sum(self.tokens.values()), sum(self.seconds.values())
        pace = {
            rows: self.seconds[False, rows] / count
            for (drafted, rows), count in self.tokens.items()
            if not drafted and count
        }

        def plain(rows: int) -> float:
            return pace[min(pace, key=lambda known: (abs(known - rows), known))]

        expected = sum(count * plain(rows) for (_, rows), count in self.tokens.items()) if pace else 0.0
        return {
            "decode_tokens_per_s": tokens / seconds if seconds else None,
            "plain_tokens_per_s": tokens / expected if expected else None,
        }
