"""Learning rate and depth are pure functions of the step."""

from __future__ import annotations

import pytest

from toolkit.errors import TrainError
from toolkit.train.loop import accumulation_steps
from toolkit.train.optimizer import rate_factor, total_steps, unroll_steps
from toolkit.train_settings import DataSettings, OnPolicySettings, OptimizerSettings, TrainSettings, UnrollSettings


@pytest.mark.parametrize(("schedule", "end"), [("cosine", 0.0), ("linear", 0.0), ("constant", 1.0)])
def test_warms_up_then_decays_to_zero(schedule, end):
    settings = TrainSettings(optimizer=OptimizerSettings(warmup_ratio=0.1, schedule=schedule))
    rates = [rate_factor(step, 100, settings) for step in range(101)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == pytest.approx(1.0)
    assert all(a < b for a, b in zip(rates[:9], rates[1:10], strict=True))
    assert all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))
    assert rates[100] == pytest.approx(end) and rates[99] > 0  # the last step of 100 still learns


def test_total_steps():
    assert total_steps(TrainSettings(epochs=2.5), 10) == 25
    assert total_steps(TrainSettings(epochs=2.5, max_steps=7), 10) == 7
    assert total_steps(TrainSettings(max_steps=7, on_policy=OnPolicySettings(every=6)), 10) == 7
    with pytest.raises(TrainError, match="on_policy.every = 7, but the training has 7 steps"):
        total_steps(TrainSettings(max_steps=7, on_policy=OnPolicySettings(every=7)), 10)


def test_the_curriculum_ends_at_the_whole_depth():
    depths = [
        unroll_steps(step, 20, TrainSettings(unroll=UnrollSettings(ttt_steps=4, curriculum=(0.5, 0.3))))
        for step in range(20)
    ]
    assert depths == [1] * 10 + [2] * 6 + [4] * 4
    assert {unroll_steps(step, 20, TrainSettings(unroll=UnrollSettings(ttt_steps=4))) for step in range(20)} == {4}


def test_global_batch_is_shared_out_or_refused():
    """The same global batch on any number of processes: what cannot be shared evenly is an error, not a rounding."""
    settings = TrainSettings(data=DataSettings(global_batch=8, micro_batch=2))
    assert [accumulation_steps(settings, processes) for processes in (1, 2, 4, 8)] == [4, 2, 1, 1]
    with pytest.raises(ValueError, match="multiple of 3"):
        accumulation_steps(settings, 3)
