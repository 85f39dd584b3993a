"""Which head of a training is handed on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from toolkit.train import loop
from toolkit.train.forecast import Forecast
from toolkit.train.loop import Trainer
from toolkit.train.state import Position


@pytest.mark.parametrize(
    ("forecasts", "best"),
    [
        ([1.2, 1.5, 1.4], 2),
        ([1.2, None, 1.1], 1),  # no steps are no reason to forget a head that was measured
        ([None, 1.1, None], 2),
        ([None, None], 2),  # nothing is known: the longest trained
    ],
)
def test_the_best_forecast_wins(monkeypatch, tmp_path, forecasts, best):
    """NaN compares false with everything: as a number it would win once and then never be beaten, or never win."""
    trainer = object.__new__(Trainer)
    trainer.model = torch.nn.Linear(1, 1)
    trainer.metrics = SimpleNamespace(write=lambda row: None)
    trainer.accelerator, trainer.directory = SimpleNamespace(is_main_process=True), tmp_path
    trainer.target = SimpleNamespace(device="cpu", dtype=torch.float32)
    trainer.side, trainer.data = None, SimpleNamespace(held_out=[])
    trainer.settings = SimpleNamespace(ttt_steps=2)
    monkeypatch.setattr(trainer, "_head_state", lambda: {"w": torch.ones(1)}, raising=False)
    monkeypatch.setattr(loop, "broadcast", lambda tensor: tensor)
    values = iter(forecasts)
    monkeypatch.setattr(loop, "forecast_accept_length", lambda *_: Forecast(next(values), None, [], 0, 2))
    position = Position()
    for step in range(1, len(forecasts) + 1):
        position.step = step
        position = trainer._evaluate(position)
    assert (position.best_step, position.best_forecast) == (best, forecasts[best - 1])


@pytest.mark.parametrize(("mine", "of_main", "kept"), [(1.2, 1.6, True), (1.6, 1.2, False)])
def test_the_main_process_decides(monkeypatch, mine, of_main, kept):
    """Keeping a head gathers it from all processes at ZeRO-3: one that decides otherwise leaves the others waiting."""
    trainer = object.__new__(Trainer)
    trainer.target = SimpleNamespace(device="cpu")
    monkeypatch.setattr(loop, "broadcast", lambda tensor: torch.full_like(tensor, of_main))
    assert (trainer._as_on_main(mine) > 1.4) is kept
