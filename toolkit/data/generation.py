"""What data/ asks of whatever writes tokens: the bundled engine, or any server put in its place.

`GenerateFn` takes all requests at once, so that an engine can keep a large continuous batch full, and yields each
result as it ends, in any order, so that the caller can write it down at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt and how to continue it. `temperature` 0 is greedy; `seed` decides every draw of this request.

    turn: which of its conversation, from 1. last: none is asked after it, so prompt and answer are the whole text.
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
    """`output_ids` are the ids written, the stop id included if one ended it.

    `finish_reason` is "stop" (ended by a stop id) or "length" (cut by max_tokens or the context).
    `draft_used` names the draft head that helped, None for plain decoding. `verify_steps` and `accepted` count its
    whole verify steps and the drafts accepted in them: accept_length is 1 + accepted / verify_steps.
    """

    output_ids: list[int]
    finish_reason: str
    draft_used: str | None = None
    verify_steps: int = 0
    accepted: int = 0


GenerateFn = Callable[[Sequence[GenerationRequest]], Iterable[tuple[int, GenerationResult]]]
"""Yields (index into the requests, result) as each request ends. Every index once, in any order."""


def derived_seed(seed: int, *parts: object) -> int:
    """A 63-bit seed for one sample, hashed from the run's seed and the sample's name: order and batch do not matter."""
    text = "\x1f".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def run_all(generate: GenerateFn, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, GenerationResult]]:
    """The results of `generate`, its contract checked: each index once, none left out, ended by "stop" or "length"."""
    missing = set(range(len(requests)))
    for index, result in generate(requests) if requests else ():
        if index not in missing:
            raise RuntimeError(f"generate gave request {index} of {len(requests)} a second time, or it never existed")
        if result.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"generate ended request {index} by {result.finish_reason!r}; stop or length is needed")
        missing.remove(index)
        yield index, result
    if missing:
        raise RuntimeError(f"generate ended with {len(missing)} of {len(requests)} requests unanswered")


def written_ids(result: GenerationResult) -> list[int]:
    """The ids of the words written: without the stop id that ended them."""
    return result.output_ids[:-1] if result.finish_reason == "stop" else result.output_ids
