"""Statistics of replayed verify steps: the forecasts of training and of `toolkit forecast`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.bench.bootstrap import ratio_interval
from toolkit.infer.request.request import VerifyEvent, summarise


@dataclass(frozen=True)
class Forecast:
    """accept_length of a shape of `num_steps` levels with its 95 % bootstrap interval over prompts.

    accept_length: None without verify steps. interval: None if fewer than two prompts have verify steps.
    accept_rate[i]: conditional, the share of the verify steps that accepted depth i and also accepted depth i+1; None
    if no step accepted depth i.
    """

    accept_length: float | None
    interval: tuple[float, float] | None
    accept_rate: list[float | None]
    verify_steps: int
    num_steps: int


def summarise_replays(per_prompt: Sequence[Sequence[int]], num_steps: int) -> Forecast:
    """Pool the accepted drafts of all verify steps, a list for each prompt; counted as the engine counts its steps."""
    events = [
        VerifyEvent(num_steps, num_steps, accepted, accepted + 1, False, 0.0, 0.0, 0.0, 1)
        for steps in per_prompt
        for accepted in steps
    ]
    stats = summarise(events)
    tokens = [sum(steps) + len(steps) for steps in per_prompt]
    return Forecast(
        accept_length=stats.accept_length if events else None,
        interval=ratio_interval(tokens, [len(steps) for steps in per_prompt]),
        accept_rate=[None if math.isnan(rate) else rate for rate in stats.accept_rate],
        verify_steps=stats.verify_steps,
        num_steps=num_steps,
    )
