import numpy as np
import pytest

from toolkit.bench.bootstrap import LEAST_GROUPS, ratio_interval


def test_interval_covers_the_true_ratio_about_as_often_as_it_says():
    """An interval that resampled steps, or the wrong quantiles, would cover far less or nearly always.

    40 units with a true ratio of 1.9: about 93.5 % of 95 % intervals cover it, so 300 trials cover 280.5 +- 4.3 times.
    The band 262..295 lies more than 3.3 standard deviations off; the seed is fixed, so the outcome never changes.
    """
    rng = np.random.default_rng(5)
    covered = 0
    for trial in range(300):
        steps = rng.integers(20, 60, size=40)
        committed = steps * (1.9 + 0.3 * rng.standard_normal(40))
        low, high = ratio_interval(committed.tolist(), steps.tolist(), resamples=800, seed=trial)
        covered += low <= 1.9 <= high
    assert 262 <= covered <= 295


def test_interval_is_seeded_and_holds_the_ratio():
    """Two reports of one measurement must show one interval."""
    first = ratio_interval([10, 22, 33], [10, 10, 10], seed=3)
    assert first == ratio_interval([10, 22, 33], [10, 10, 10], seed=3)
    assert first[0] < 65 / 30 < first[1]


def test_equal_units_have_no_spread():
    """A sum taken over the wrong axis would show spread where there is none."""
    assert ratio_interval([20, 40, 60], [10, 20, 30]) == (2.0, 2.0)


def test_one_unit_has_no_interval():
    """One prompt says nothing about spread; units without verify steps do not count."""
    assert ratio_interval([3], [2]) is None
    assert ratio_interval([3, 0], [2, 0]) is None


def test_few_groups_have_no_interval():
    """Of two groups of one batch size came "1.06 [1.06, 1.06]", which looks exact and says nothing."""
    few, enough = ([3.0 + group for group in range(count)] for count in (LEAST_GROUPS - 1, LEAST_GROUPS))
    assert ratio_interval(few, [2] * len(few), least_units=LEAST_GROUPS) is None
    assert ratio_interval(enough, [2] * len(enough), least_units=LEAST_GROUPS) is not None


def test_lists_of_two_lengths_are_refused():
    with pytest.raises(ValueError, match="2 numerators but 1"):
        ratio_interval([1, 2], [1])
