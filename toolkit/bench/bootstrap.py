"""Confidence intervals of functions of sums, by resampling prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toolkit.infer.request.request import VerifyEvent, summarise

RESAMPLES = 2000
LEAST_GROUPS = 5  # of prompts that are timed together: the spread of fewer says little


def ratio_interval(
    numerators: Sequence[float],
    denominators: Sequence[float],
    *,
    least_units: int = 2,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[float, float] | None:
    """Return the 95 % percentile bootstrap interval of sum(numerators) / sum(denominators); units are pairs.

    One unit is one prompt, not one verify step: steps of a prompt are correlated, and treating them as independent
    would make the interval too narrow. Returns None with fewer than `least_units` units of non-zero denominator.
    (Efron & Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13.) With few units the interval is too narrow:
    in a simulation with normal units, 5 units covered 81 %, 10 units 87 %, 40 units 93 %.
    """
    pairs = [(top, bottom) for top, bottom in zip(numerators, denominators, strict=True) if bottom > 0]
    if len(pairs) < least_units:
        return None
    return resampled_interval(pairs, lambda tops, bottoms: tops / bottoms, resamples=resamples, seed=seed)


def resampled_interval(
    units: Sequence[Sequence[float]],
    statistic: Callable[..., NDArray[np.float64]],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of a statistic of sums over units, which are resampled whole.

    units: the numbers of each unit, [units, numbers]; of two measurements of one prompt together, for a paired
    interval. statistic: takes the sums of each number, [resamples] each, and returns [resamples].
    """
    values = np.asarray(units, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(len(values), size=(resamples, len(values)))
    low, high = np.quantile(statistic(*values[picks].sum(axis=1).T), [0.025, 0.975])
    return float(low), float(high)


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
