"""Confidence intervals of functions of sums, by resampling prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

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
    Raises ValueError for lists of different lengths.
    """
    if len(numerators) != len(denominators):
        raise ValueError(
            f"there are {len(numerators)} numerators but {len(denominators)} denominators; give one of each per unit"
        )
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
