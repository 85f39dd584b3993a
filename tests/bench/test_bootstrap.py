import numpy as np

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


def test_few_groups_have_no_interval():
    """Of two groups of one batch size came "1.06 [1.06, 1.06]", which looks exact and says nothing."""
    few, enough = ([3.0 + group for group in range(count)] for count in (LEAST_GROUPS - 1, LEAST_GROUPS))
    assert ratio_interval(few, [2] * len(few), least_units=LEAST_GROUPS) is None
    assert ratio_interval(enough, [2] * len(enough), least_units=LEAST_GROUPS) is not None
