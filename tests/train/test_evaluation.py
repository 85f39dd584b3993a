"""Which head of a training is handed on, and when it stops."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from toolkit.train import evaluation
from toolkit.train.evaluation import Evaluation, has_stopped, update_best
from toolkit.train.state import Position
from toolkit.train_settings import EvaluationSettings, TrainSettings

FORECASTS_ALONE = TrainSettings(evaluation=EvaluationSettings(real_every=None, patience=2))
MEASURED = TrainSettings(evaluation=EvaluationSettings(real_every=2, patience=2))


def _after(evaluations: list[tuple[float | None, float | None]], settings: TrainSettings) -> list[Position]:
    """Positions after (forecast, real) of steps 1, 2, ..."""
    positions = [Position()]
    for step, (forecast, real) in enumerate(evaluations, start=1):
        positions.append(update_best(replace(positions[-1], step=step), forecast, real, settings))
    return positions[1:]


@pytest.mark.parametrize(
    ("forecasts", "best"),
    [
        ([1.2, 1.5, 1.4], 2),
        ([1.2, None, 1.1], 1),  # no steps are no reason to forget a head that was measured
        ([None, 1.1, None], 2),
        ([None, None], 2),  # nothing is known: the longest trained
    ],
)
def test_the_best_forecast_wins(forecasts, best):
    """NaN compares false with everything: as a number it would win once and then never be beaten, or never win."""
    last = _after([(forecast, None) for forecast in forecasts], FORECASTS_ALONE)[-1]
    assert (last.best_step, last.best_forecast) == (best, forecasts[best - 1])


def test_what_the_engine_measured_beats_every_forecast():
    """Step 1 has only a forecast, and it is the highest; step 3's forecast is higher than step 2's. Neither counts."""
    last = _after([(9.0, None), (1.5, 1.4), (2.5, None), (1.2, 1.6), (3.0, 1.5)], MEASURED)[-1]
    assert (last.best_step, last.best_real, last.best_forecast) == (4, 1.6, 1.2)


def test_patience_counts_only_what_decides():
    """Forecasts between two measurements would stop a training that the engine finds better each time."""
    measured = _after([(2.0, None), (2.0, 1.4), (1.9, None), (1.8, 1.5), (1.7, None), (1.6, 1.5)], MEASURED)
    assert [one.stale for one in measured] == [0, 0, 0, 0, 0, 1] and not has_stopped(measured[-1], MEASURED)
    stopped = _after([(1.5, None), (1.4, None), (1.5, None)], FORECASTS_ALONE)
    assert [has_stopped(one, FORECASTS_ALONE) for one in stopped] == [False, False, True]
    assert stopped[-1].best_step == 3, "of equals the later one is handed on, but it is no gain"
    assert not has_stopped(stopped[-1], replace(FORECASTS_ALONE, evaluation=EvaluationSettings(real_every=None)))


@pytest.mark.parametrize(("mine", "of_main", "kept"), [(1.2, 1.6, True), (1.6, 1.2, False)])
def test_the_main_process_decides(monkeypatch, mine, of_main, kept):
    """Under ZeRO-3 all processes gather the best head: a process that decides differently blocks the others."""
    one = object.__new__(Evaluation)
    one.side = SimpleNamespace(target=SimpleNamespace(device="cpu"))
    monkeypatch.setattr(evaluation, "broadcast", lambda tensor: torch.full_like(tensor, of_main))
    assert [value > 1.4 for value in one._from_main(mine, None)] == [kept, kept]
