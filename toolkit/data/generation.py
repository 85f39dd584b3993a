"""The interface between data/ and a generator of tokens: the bundled engine, or any server.

`GenerateFn` takes requests as it has room for them, so that an engine can fill its continuous batch. It yields each
result as soon as the request finishes, in any order, so that the caller can store it at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

NO_ROUND_TRIP = "no_round_trip"
REFUSED = "refused"
UNANSWERED = (NO_ROUND_TRIP, REFUSED)  # another server may answer


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt and its sampling parameters. `temperature` 0 is greedy; `seed` determines all draws of the request.

    turn: its number in the conversation, from 1. last: no turn follows, so prompt and answer are the complete text.
    """

    prompt_ids: list[int]
    temperature: float
    top_p: float
    max_tokens: int
    seed: int
    turn: int = 1
    last: bool = True


@dataclass(frozen=True)
class GenerationResult:
    """`output_ids` are the generated ids, including the stop id if there is one.

    `finish_reason` is "stop" (ended by a stop id) or "length" (cut by max_tokens or the context length). It is
    NO_ROUND_TRIP, without ids, where a server's text does not give the ids that the target wrote, and REFUSED where a
    server refuses this prompt alone, as one that is too long for it.
    `draft_used` names the draft head; None is plain decoding. `verify_steps` counts the verify steps that were not
    truncated, `accepted` the drafts accepted in them: accept_length is 1 + accepted / verify_steps. `server` says which
    model and engine answered, if it was a server.
    """

    output_ids: list[int]
    finish_reason: str
    draft_used: str | None = None
    verify_steps: int = 0
    accepted: int = 0
    server: Mapping[str, Any] | None = None

    @property
    def by_server(self) -> dict[str, Any]:
        """`server` as a part of the provenance; empty for the bundled engine."""
        return {} if self.server is None else {"server": dict(self.server)}


GenerateFn = Callable[[Iterable[GenerationRequest]], Iterable[tuple[int, GenerationResult]]]
"""Yields (number of the request, result) as each request finishes: every number from 0 once, in any order. Requests
that ended may go on after a result has been taken: an answer may lead to the next request."""


def derived_seed(seed: int, *parts: object) -> int:
    """Return a 63-bit seed, a hash of the run's seed and the sample's name, independent of order and batch."""
    text = "\x1f".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def written_ids(result: GenerationResult) -> list[int]:
    """Return the output ids without the stop id."""
    return result.output_ids[:-1] if result.finish_reason == "stop" else result.output_ids
