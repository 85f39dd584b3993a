"""Speed and acceptance of the last seconds and minutes, from samples of a server's counters."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Self

SAMPLE_S = 1.0  # between two samples
KEPT = 180  # samples: three minutes
LATEST_S = 10.0  # "the last seconds"


class Sample(NamedTuple):
    """The counters at a moment. at: seconds of any clock that never goes back."""

    at: float
    tokens: int
    steps: int
    committed: int
    offered: int
    accepted: int
    decode_steps: int
    plain_steps: int
    decoded: int

    @classmethod
    def of(cls, at: float, counts: Mapping[str, int]) -> Self:
        """Read them by their names in server_metrics.SERIES."""
        steps, committed = counts["verify_steps_total"], counts["committed_tokens_total"]
        offered, accepted = counts["draft_tokens_offered_total"], counts["draft_tokens_accepted_total"]
        every = (counts[f"{name}_total"] for name in ("decode_steps", "plain_steps", "decoded_tokens"))
        return cls(at, counts["completion_tokens_total"], steps, committed, offered, accepted, *every)


class Rates(NamedTuple):
    """What happened between two samples. tokens: written, of all answers.

    accept_length, accept_rate: of the counted verify steps. drafted_share, tokens_per_step: of all steps of requests,
    plain ones too. None without any."""

    tokens: int
    tokens_per_s: float
    accept_length: float | None
    accept_rate: float | None
    drafted_share: float | None
    tokens_per_step: float | None

    @classmethod
    def between(cls, first: Sample, last: Sample) -> Self:
        """All 0 and None if the samples are of the same moment."""
        seconds, tokens, steps = last.at - first.at, last.tokens - first.tokens, last.steps - first.steps
        offered, every = last.offered - first.offered, last.decode_steps - first.decode_steps
        return cls(
            tokens,
            tokens / seconds if seconds > 0 else 0.0,
            (last.committed - first.committed) / steps if steps else None,
            (last.accepted - first.accepted) / offered if offered else None,
            1 - (last.plain_steps - first.plain_steps) / every if every else None,
            (last.decoded - first.decoded) / every if every else None,
        )


class LiveRates:
    """Samples of the last three minutes, one a second or two."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=KEPT)

    def add(self, sample: Sample) -> None:
        """Keep a sample, in place of the last one if that came less than a second after the one before it."""
        if len(self._samples) > 1 and self._samples[-1].at - self._samples[-2].at < 0.9 * SAMPLE_S:
            self._samples.pop()
        self._samples.append(sample)

    @property
    def latest(self) -> Rates:
        """Of the last ten seconds, or since the first sample."""
        if not self._samples:
            return Rates(0, 0.0, None, None, None, None)
        last = self._samples[-1]
        earlier = [one for one in self._samples if one.at <= last.at - LATEST_S]
        return Rates.between(earlier[-1] if earlier else self._samples[0], last)

    def history(self) -> Iterator[tuple[float, Rates]]:
        """From each sample to the next: its seconds before the newest sample (0 or more), and the rates."""
        samples = list(self._samples)
        for first, last in zip(samples, samples[1:], strict=False):
            yield samples[-1].at - last.at, Rates.between(first, last)
